"""What is asked at once does not stand in each other's way."""

import os
import signal
import threading
from collections.abc import Iterator
from http.client import HTTPException

import pytest

from tests.integration.s3 import S3, serving
from tests.integration.s3_raw import ask

GIB = 1 << 30
COPIES = 24
SHORT_THREADS = 16
"""Of a worker (`s3api.server.worker`)."""


@pytest.fixture
def single() -> Iterator[S3]:
    """A server with one worker."""
    with serving("--s3-workers", "1") as server:
        server.add_user("main")
        yield server


def test_many_long_copies_do_not_hold_up_what_is_short(single: S3) -> None:
    bucket = single.new_bucket()
    # Nothing but a hole: copied in no time, but read and hashed for the checksum that is asked for.
    with open(single.mount / bucket / "large", "wb") as file:
        file.truncate(5 * GIB)
    answered: list[int] = []
    asked = threading.Barrier(COPIES + 1)
    headers = {
        "x-amz-copy-source": f"{bucket}/large",
        "x-amz-checksum-algorithm": "SHA256",
        "x-amz-metadata-directive": "REPLACE",
    }

    def copy(number: int) -> None:
        asked.wait()
        try:
            ask(single, "PUT", f"/{bucket}/copy-{number}", headers=headers)
        except (OSError, HTTPException):
            return  # the worker was ended
        answered.append(number)

    threads = [threading.Thread(target=copy, args=(number,)) for number in range(COPIES)]
    for thread in threads:
        thread.start()
    client = single.client()
    client.put_object(Bucket=bucket, Key="before", Body=b"x")
    asked.wait()
    while single.node.status()["s3"]["connections"] < COPIES:
        pass
    client.put_object(Bucket=bucket, Key="short", Body=b"x")
    done = len(answered)
    assert client.head_object(Bucket=bucket, Key="short")["ContentLength"] == 1
    assert client.get_object(Bucket=bucket, Key="short")["Body"].read() == b"x"
    for pid in single.node.status()["s3"]["workers"]:
        os.kill(pid, signal.SIGKILL)
    for thread in threads:
        thread.join()
    # Behind them in one queue, it would have had to wait for all but those.
    assert done < COPIES - SHORT_THREADS
