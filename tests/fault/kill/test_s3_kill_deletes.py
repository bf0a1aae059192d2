"""Workers, or the node with them, are killed while they delete: each version is there, whole, or
gone; what was acknowledged stays gone; nothing else is left."""

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from tests.cluster.waiting import wait_until
from tests.contract import client_store
from tests.integration.s3 import S3, serving, users_of

KEYS: Final = 24
"""For each of the ways to delete."""
BATCH: Final = 8
PLAIN, VERSIONED = "plain", "versioned"
WAYS: Final = ("one", "many")
One = tuple[str, str, str]
"""Bucket, key and version, '' where none is named."""
Tell = Callable[[list[One]], None]
"""Told what the server says it has deleted."""


@pytest.fixture
def server() -> Iterator[S3]:
    with serving("--s3-workers", "2") as made:
        made.add_user("main")
        for bucket in (PLAIN, VERSIONED):
            made.client().create_bucket(Bucket=bucket)
        made.client().put_bucket_versioning(
            Bucket=VERSIONED, VersioningConfiguration={"Status": "Enabled"}
        )
        yield made


def kill_workers(server: S3) -> S3:
    for pid in server.node.status()["s3"]["workers"]:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: is_served(server), "a worker has come back")
    return server


def is_served(server: S3) -> bool:
    try:
        server.client().head_bucket(Bucket=PLAIN)
    except (BotoCoreError, ClientError):
        return False
    return True


def kill_node(server: S3) -> S3:
    node = server.node
    for pid in node.status()["s3"]["workers"]:
        os.kill(pid, signal.SIGKILL)
    node.kill()
    node.up()
    with users_of(node) as users:
        return S3(node, {name: users.find(name) for name in ("admin", "main")})


def body_of(key: str, number: int) -> bytes:
    """Of two sizes, of which the larger does not fit into one block."""
    return f"{key} {number} ".encode() * (1000 if number else 10)


def keys_of(way: str, what: str) -> list[str]:
    return [f"{way}/{what}/{number}" for number in range(KEYS)]


def fill(client: Any) -> dict[str, list[str]]:
    """Put every key anew, two versions in the versioned bucket: their ids by key."""
    versions: dict[str, list[str]] = {}
    for way in WAYS:
        for key in keys_of(way, "plain"):
            client.put_object(Bucket=PLAIN, Key=key, Body=body_of(key, 1))
        for key in keys_of(way, "marked") + keys_of(way, "ended"):
            versions[key] = [
                client.put_object(Bucket=VERSIONED, Key=key, Body=body_of(key, number))["VersionId"]
                for number in (0, 1)
            ]
    return versions


def doomed(versions: dict[str, list[str]], way: str) -> list[One]:
    """What is deleted: keys, keys under markers, versions for good."""
    return [
        *((PLAIN, key, "") for key in keys_of(way, "plain")),
        *((VERSIONED, key, "") for key in keys_of(way, "marked")),
        *((VERSIONED, key, each) for key in keys_of(way, "ended") for each in versions[key]),
    ]


def delete_one_by_one(client: Any, wanted: list[One], tell: Tell) -> None:
    for bucket, key, version in wanted:
        client.delete_object(Bucket=bucket, Key=key, **({"VersionId": version} if version else {}))
        tell([(bucket, key, version)])


def delete_many(client: Any, wanted: list[One], tell: Tell) -> None:
    for bucket in (PLAIN, VERSIONED):
        of_bucket = [each for each in wanted if each[0] == bucket]
        for start in range(0, len(of_bucket), BATCH):
            batch = of_bucket[start : start + BATCH]
            objects = [
                {"Key": key} | ({"VersionId": version} if version else {})
                for _, key, version in batch
            ]
            told = client.delete_objects(Bucket=bucket, Delete={"Objects": objects})
            assert "Errors" not in told, told
            tell(batch)


def delete_until(
    server: S3, kill: Callable[[S3], S3], versions: dict[str, list[str]], after: int
) -> tuple[S3, set[One]]:
    """Delete in both ways at once, and kill when so many have been acknowledged."""
    gone: set[One] = set()
    reached, ended = threading.Event(), []

    def tell(deleted: list[One]) -> None:
        gone.update(deleted)
        if len(gone) >= after:
            reached.set()

    def run(delete: Callable[..., None], way: str) -> None:
        try:
            delete(server.client(), doomed(versions, way), tell)
        except (BotoCoreError, ClientError):
            return
        finally:
            ended.append(way)
            if len(ended) == len(WAYS):
                reached.set()

    jobs = ((delete_one_by_one, "one"), (delete_many, "many"))
    threads = [threading.Thread(target=run, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    reached.wait()
    server = kill(server)
    for thread in threads:
        thread.join()
    return server, gone


def check_plain(server: S3, gone: set[One]) -> int:
    """How many are left."""
    client, left = server.client(), 0
    listed = {each["Key"] for each in client.list_objects_v2(Bucket=PLAIN).get("Contents", [])}
    for way in WAYS:
        for key in keys_of(way, "plain"):
            path = server.mount / PLAIN / key
            assert path.exists() is (key in listed), key
            if key in listed:
                assert (PLAIN, key, "") not in gone
                got = client.get_object(Bucket=PLAIN, Key=key)["Body"].read()
                assert got == path.read_bytes() == body_of(key, 1)
                left += 1
    assert left == len(listed)
    return left


def check_versioned(server: S3, gone: set[One], versions: dict[str, list[str]]) -> int:
    client = server.client()
    told = client.list_object_versions(Bucket=VERSIONED)
    assert not told["IsTruncated"]
    there = {(each["Key"], each["VersionId"]): each for each in told.get("Versions", [])}
    marked = {each["Key"] for each in told.get("DeleteMarkers", []) if each["IsLatest"]}
    for key, ids in versions.items():
        of_key = [number for number in (0, 1) if (key, ids[number]) in there]
        for number in of_key:
            assert (VERSIONED, key, ids[number]) not in gone
            got = client.get_object(Bucket=VERSIONED, Key=key, VersionId=ids[number])
            assert got["Body"].read() == body_of(key, number)
        if "/marked/" in key:
            assert of_key == [0, 1]
            assert key in marked or (VERSIONED, key, "") not in gone
        else:
            assert key not in marked
        latest = [number for number in of_key if there[key, ids[number]]["IsLatest"]]
        shown = [] if key in marked else of_key[-1:]
        assert latest == shown
        path = server.mount / VERSIONED / key
        assert path.exists() is bool(shown)
        if shown:
            assert path.read_bytes() == body_of(key, shown[0])
    return len(there)


@pytest.mark.parametrize("kill", [kill_workers, kill_node])
def test_kills_while_objects_are_deleted(server: S3, kill: Callable[[S3], S3], seed: int) -> None:
    chance = random.Random(seed)
    everything = 2 * 4 * KEYS
    versions = fill(server.client())
    server, gone = delete_until(server, kill, versions, chance.randrange(everything))
    left = check_plain(server, gone) + check_versioned(server, gone, versions)
    server.node.down()
    client_store.restart(server.node.store)
    assert client_store.problems(server.node.store) == []
    assert client_store.data_files(server.node.store) == left
