"""A real node that serves S3, with its mount beside it: one for the session.

    def test_something(s3: S3, bucket: str) -> None:
        s3.client("main").put_object(Bucket=bucket, Key="a", Body=b"x")
        assert (s3.mount / bucket / "a").read_bytes() == b"x"

`s3.client(user)` gives boto3's client of a user: `admin` (who may do all), `main` and `alt` (two
owners, as the public conformance suites have them), any that `s3.add_user` made, and None:
anonymous. `s3.exchange` sends bytes as they stand.
"""

import contextlib
import itertools
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ClientError

from cli.open_store import engine_of
from kvfs.base import config as configuration
from kvfs.objects.object_errors import BucketNotEmpty, NoSuchBucket
from kvfs.objects.object_store import Doomed, ObjectStore
from s3api.auth.credentials import Credentials
from s3api.auth.key_holders import ADMINISTRATOR
from s3api.server.users import Users
from s3api.storage.bucket_settings import OWNER, pack
from tests.integration.harness import Node, best_mode

REGION = "us-east-1"
_numbers = itertools.count()


@dataclass
class S3:
    """The server, and who may ask it."""

    node: Node
    users: dict[str, Credentials] = field(default_factory=dict)
    clients: dict[object, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        status = self.node.status()
        self.endpoint: str = status["s3"]["endpoint"]
        self.admin_endpoint: str = status["admin"]["endpoint"]
        where = urlsplit(self.endpoint)
        self.host, self.port = where.hostname or "", where.port or 0

    @property
    def mount(self) -> Path:
        return self.node.mount

    def add_user(self, name: str, policy: str = "") -> Credentials:
        """A new user with a key pair; its clients can be had at once."""
        with users_of(self.node) as users:
            self.users[name] = users.add(name, policy)
        return self.users[name]

    def client(self, user: str | None = "main", service: str = "s3", **options: Any) -> Any:
        """boto3's client of a user; `options` are botocore's Config. One attempt, path style."""
        wanted = {"retries": {"total_max_attempts": 1}, "s3": {"addressing_style": "path"}}
        wanted |= options
        asked = user, service, repr(sorted(wanted.items(), key=lambda item: item[0]))
        if asked not in self.clients:
            self.clients[asked] = self._new_client(user, service, wanted)
        return self.clients[asked]

    def _new_client(self, user: str | None, service: str, wanted: dict[str, Any]) -> Any:
        keys: dict[str, str] = {}
        if user is None:
            wanted["signature_version"] = UNSIGNED
        else:
            pair = self.users[user]
            keys = {
                "aws_access_key_id": pair.access_key,
                "aws_secret_access_key": pair.secret,
            }
        return boto3.session.Session().client(
            service,
            endpoint_url=self.endpoint,
            region_name=REGION,
            config=Config(**wanted),
            **keys,
        )

    def connect(self) -> socket.socket:
        """A connection for bytes of one's own."""
        return socket.create_connection((self.host, self.port), timeout=30)

    def exchange(self, request: bytes) -> bytes:
        """Send bytes, end, and return all that comes back."""
        with self.connect() as peer:
            peer.sendall(request)
            peer.shutdown(socket.SHUT_WR)
            received = bytearray()
            while part := peer.recv(65536):
                received += part
        return bytes(received)

    def new_bucket(self, user: str = "main", **options: Any) -> str:
        """A bucket of a name that was not used before."""
        name = f"test-{os.getpid()}-{next(_numbers)}"
        self.client(user).create_bucket(Bucket=name, **options)
        return name

    def new_cache(self, user: str = "main") -> str:
        """A bucket that evicts, and whose changes wait for no disk."""
        name = f"test-{os.getpid()}-{next(_numbers)}"
        store = ObjectStore(self.node.store)
        try:
            store.buckets.create(name.encode(), "cache", {OWNER: pack(user)})
        finally:
            store.close()
        return name

    def remove_bucket(self, name: str) -> None:
        """With all that is in it, past the API; a bucket that holds locked objects stays."""
        store = ObjectStore(self.node.store)
        try:
            _empty(store, name.encode())
            store.buckets.delete(name.encode())
        except (NoSuchBucket, BucketNotEmpty):
            pass
        finally:
            store.close()


def _empty(store: ObjectStore, bucket: bytes) -> None:
    for upload in store.uploads.list_all(bucket).uploads:
        store.uploads.abort(bucket, upload.key, upload.id)
    found = store.list_versions(bucket, max_keys=100_000).versions
    store.delete_many(bucket, [Doomed(each.key, each.version) for each in found], bypass=True)


def code_of(error: ClientError) -> tuple[int, str]:
    """Status and code of an answer that boto3 raised."""
    response: Mapping[str, Any] = error.response
    return response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"]


@contextlib.contextmanager
def refused(status: int, code: str) -> Iterator[ClientError]:
    """What is inside must be answered with this error; `.response` afterwards has it all."""
    told = ClientError({"Error": {}}, "")
    try:
        yield told
    except ClientError as error:
        told.response = error.response
        assert code_of(error) == (status, code), error
    else:
        pytest.fail(f"it was not refused with {status} {code}")


@contextlib.contextmanager
def users_of(node: Node) -> Iterator[Users]:
    """The users of a node's store, opened beside it."""
    with engine_of(configuration.Config(store=node.store)) as engine:
        yield Users(node.store, engine)


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[S3]:
    """A node of one's own that serves S3, started with these flags."""
    node = Node.make(best_mode(), "--s3", "127.0.0.1:0", "--admin", "127.0.0.1:0", *flags)
    try:
        node.up()
        with users_of(node) as users:
            server = S3(node, {ADMINISTRATOR: users.find(ADMINISTRATOR)})
        yield server
        for client in server.clients.values():
            client.close()
    finally:
        print(node.log[-5000:])  # shown where a test failed
        node.remove()


@pytest.fixture(scope="session")
def s3() -> Iterator[S3]:
    """The server of the session. ACLs count in its buckets, so that what they do can be seen."""
    with serving("--s3-object-ownership", "ObjectWriter") as server:
        server.add_user("main")
        server.add_user("alt")
        yield server


@pytest.fixture
def bucket(s3: S3) -> Iterator[str]:
    """A fresh bucket of `main`."""
    name = s3.new_bucket()
    yield name
    s3.remove_bucket(name)


@pytest.fixture(params=["durable", "cache"])
def either_bucket(s3: S3, request: pytest.FixtureRequest) -> Iterator[str]:
    """A fresh bucket of `main`: its changes wait for the disk, or for none."""
    name = s3.new_bucket() if request.param == "durable" else s3.new_cache()
    yield name
    s3.remove_bucket(name)
