"""Workers of the S3 API are killed while they put, copy and complete: each object is old or new,
whole, and nothing else is left."""

import hashlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from tests.cluster.waiting import wait_until
from tests.contract import client_store
from tests.integration.s3 import S3, serving

MIB: Final = 1 << 20
PART: Final = 5 * MIB
ROUNDS: Final = 5
BUCKET: Final = "killed"


def body_of(name: str, number: int, size: int) -> bytes:
    """Bytes in which a piece of another body would show."""
    digest = hashlib.sha256(f"{name} {number}".encode()).digest()
    return (digest * (4096 // len(digest)) * (size // 4096 + 1))[:size]


def put(client: Any, number: int) -> None:
    client.put_object(Bucket=BUCKET, Key="put", Body=body_of("put", number, 6 * MIB))


def put_small(client: Any, number: int) -> None:
    for _ in range(20):
        client.put_object(Bucket=BUCKET, Key="put_small", Body=body_of("put_small", number, 9000))


def copy(client: Any, number: int) -> None:
    body = body_of("copy", number, 6 * MIB)
    client.put_object(Bucket=BUCKET, Key=f"source-{number}", Body=body)
    client.copy_object(Bucket=BUCKET, Key="copy", CopySource=f"{BUCKET}/source-{number}")


def complete(client: Any, number: int) -> None:
    body = body_of("complete", number, PART + 1000)
    upload = client.create_multipart_upload(Bucket=BUCKET, Key="complete")["UploadId"]
    asked = {"Bucket": BUCKET, "Key": "complete", "UploadId": upload}
    parts = []
    for part, piece in ((1, body[:PART]), (2, body[PART:])):
        told = client.upload_part(PartNumber=part, Body=piece, **asked)
        parts.append({"PartNumber": part, "ETag": told["ETag"]})
    client.complete_multipart_upload(MultipartUpload={"Parts": parts}, **asked)


CHANGES: Final[dict[str, tuple[Callable[[Any, int], None], int]]] = {
    "put": (put, 6 * MIB),
    "put_small": (put_small, 9000),
    "copy": (copy, 6 * MIB),
    "complete": (complete, PART + 1000),
}


@pytest.fixture
def server() -> Iterator[S3]:
    with serving("--s3-workers", "2") as made:
        made.add_user("main")
        made.client().create_bucket(Bucket=BUCKET)
        yield made


def kill_workers(server: S3) -> None:
    for pid in server.node.status()["s3"]["workers"]:
        os.kill(pid, signal.SIGKILL)


def is_served(server: S3) -> bool:
    try:
        server.client().head_bucket(Bucket=BUCKET)
    except (BotoCoreError, ClientError):
        return False
    return True


def test_kills_while_objects_change(server: S3, seed: int) -> None:
    chance = random.Random(seed)
    client = server.client()
    known = dict.fromkeys(CHANGES, 0)
    for name, (change, _) in CHANGES.items():
        change(client, 0)
        assert number_of(client, name, {0}) == 0
    for number in range(1, ROUNDS + 1):
        done = run_until_killed(server, number, chance.uniform(0.02, 0.5))
        wait_until(lambda: is_served(server), "a worker has come back")
        for name in CHANGES:
            allowed = {number} if name in done else {known[name], number}
            known[name] = number_of(client, name, allowed)
            path, body = server.mount / BUCKET / name, body_of(name, known[name], CHANGES[name][1])
            if name in done:
                is_same = path.read_bytes() == body
                assert is_same, f"the mount shows an older {name} than round {number}"
            else:  # nobody was told of it: the node acts on the dead worker's notice in seconds
                wait_until(lambda: path.read_bytes() == body, f"the mount shows {name}")  # noqa: B023
    end_uploads(client)
    objects = client.list_objects_v2(Bucket=BUCKET)["KeyCount"]
    server.node.down()
    leftovers_are_gone(server.node.store, objects)


def run_until_killed(server: S3, number: int, after_s: float) -> set[str]:
    """Make all changes at once and kill the workers meanwhile; those that were acknowledged."""
    done: set[str] = set()

    def run(name: str) -> None:
        try:
            CHANGES[name][0](server.client(), number)
        except (BotoCoreError, ClientError):
            return
        done.add(name)

    threads = [threading.Thread(target=run, args=(name,)) for name in CHANGES]
    for thread in threads:
        thread.start()
    time.sleep(after_s)
    kill_workers(server)
    for thread in threads:
        thread.join()
    return done


def number_of(client: Any, name: str, allowed: set[int]) -> int:
    """Which of these an object is, whole."""
    body = client.get_object(Bucket=BUCKET, Key=name)["Body"].read()
    size = CHANGES[name][1]
    found = [number for number in allowed if body == body_of(name, number, size)]
    assert len(found) == 1, f"{name} is none of {allowed}"
    return found[0]


def end_uploads(client: Any) -> None:
    for each in client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", []):
        client.abort_multipart_upload(Bucket=BUCKET, Key=each["Key"], UploadId=each["UploadId"])


def leftovers_are_gone(store: Path, objects: int) -> None:
    """The next start drops what the dead processes left."""
    client_store.restart(store)
    assert client_store.problems(store) == []
    assert client_store.data_files(store) == objects
