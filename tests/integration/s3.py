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
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import msgspec
import pytest
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ClientError

from kvfs import identities
from kvfs.client import session
from kvfs.encryption import open_key
from kvfs.objects.problems import BucketNotEmpty, NoSuchBucket
from kvfs.objects.store import Doomed, ObjectStore
from kvfs.wire.http import listen
from s3api.auth import credentials
from s3api.auth.credentials import Credentials
from tests.integration.harness import ROOT, Node, best_mode

REGION = "us-east-1"
ALLOW_ALL = '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"*","Resource":"*"}]}'
_numbers = itertools.count()


@dataclass
class S3:
    """The server, and who may ask it."""

    node: Node
    host: str
    port: int
    users: dict[str, Credentials] = field(default_factory=dict)
    clients: dict[object, Any] = field(default_factory=dict)

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def mount(self) -> Path:
        return self.node.mount

    def add_user(self, name: str, policy: str = "") -> Credentials:
        """A new user with a key pair; its clients can be had at once."""
        key = open_key(self.node.store / "secret.key")
        pair = credentials.generate()
        secret = credentials.encrypt_secret(key, pair)
        opened = session.acquire(self.node.store)
        try:
            opened.write(
                lambda t: identities.create(
                    t, name, pair.access_key, secret, policy=policy, now=time.time_ns()
                )
            )
        finally:
            session.release(opened)
        self.users[name] = pair
        return pair

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

    def remove_bucket(self, name: str) -> None:
        """With all that is in it, past the API; a bucket that holds locked objects stays."""
        store = ObjectStore(self.node.store)
        try:
            _empty(store, name.encode())
            store.delete_bucket(name.encode())
        except (NoSuchBucket, BucketNotEmpty):
            pass
        finally:
            store.close()


def _empty(store: ObjectStore, bucket: bytes) -> None:
    for upload in store.list_uploads(bucket).uploads:
        store.abort_upload(bucket, upload.key, upload.id)
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
def serving(node: Node, workers: int = 2) -> Iterator[S3]:
    """Workers on a running node."""
    listeners = [listen("127.0.0.1", 0, share_port=True)[0]]
    port = listeners[0].getsockname()[1]
    listeners += [listen("127.0.0.1", port, share_port=True)[0] for _ in range(workers - 1)]
    server = S3(node, "127.0.0.1", port)
    server.add_user("admin", ALLOW_ALL)
    server.add_user("main")
    server.add_user("alt")
    processes = [_start_worker(node, listener) for listener in listeners]
    try:
        yield server
    finally:
        for client in server.clients.values():
            client.close()
        for process in processes:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.wait(30)
            process.stdout.close()


def _start_worker(node: Node, listener: socket.socket) -> subprocess.Popen[bytes]:
    fd = listener.fileno()
    process = subprocess.Popen(
        [sys.executable, "-m", "s3api.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[fd],
        cwd=ROOT,
    )
    listener.close()
    plan = {
        "store": str(node.store),
        "listeners": [fd],
        "domains": ["localhost", "s3.localhost"],
        "region": REGION,
        "version_2": True,
    }
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(msgspec.json.encode(plan) + b"\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"ready\n"
    return process


@pytest.fixture(scope="session")
def s3() -> Iterator[S3]:
    """The server of the session."""
    node = Node.make(best_mode())
    try:
        node.up()
        with serving(node) as server:
            yield server
        print(node.log[-5000:])
    finally:
        node.remove()


@pytest.fixture
def bucket(s3: S3) -> Iterator[str]:
    """A fresh bucket of `main`."""
    name = s3.new_bucket()
    yield name
    s3.remove_bucket(name)
