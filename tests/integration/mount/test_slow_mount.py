"""A mount that cannot say in time that it has forgotten: what was answered is true of it anyway.

Slow for real causes: its process is stopped, or a program holds a directory's lock in the kernel.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

import pytest

import kvfs
from gateway.fuse.channel import mode_probe
from tests.integration.client.test_client import sealed
from tests.integration.conftest import start
from tests.integration.harness import Node
from tests.integration.s3 import S3, serving

T = TypeVar("T")
pytestmark = pytest.mark.skipif(
    not mode_probe.cache_drop().available, reason=mode_probe.cache_drop().reason
)
_READ_S = 60
_REMEMBERED_S = 1
"""In which the kernel shows what it remembers; what it asks the mount for hangs longer."""
_HOLDER = """
import ctypes, fcntl, mmap, os, select, struct, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
faults = libc.syscall(323, os.O_CLOEXEC | os.O_NONBLOCK)
if faults < 0:
    sys.exit("no userfaultfd: " + os.strerror(ctypes.get_errno()))
fcntl.ioctl(faults, 0xC018AA3F, bytearray(struct.pack("QQQ", 0xAA, 0, 0)))
page = mmap.mmap(-1, mmap.PAGESIZE)
start = ctypes.addressof(ctypes.c_char.from_buffer(page))
fcntl.ioctl(faults, 0xC020AA00, bytearray(struct.pack("QQQQ", start, mmap.PAGESIZE, 1, 0)))
directory = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY)
libc.getdents64.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
listing = threading.Thread(target=libc.getdents64, args=(directory, start, mmap.PAGESIZE))
listing.start()
select.select([faults], [], [])  # the listing waits for a page that it never gets
print("held", flush=True)
listing.join()
"""


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with serving("--s3-workers", "1") as server:
        server.add_user("main")
        yield server


@pytest.fixture
def bucket(server: S3) -> Iterator[str]:
    name = server.new_bucket()
    yield name
    server.remove_bucket(name)


def _wait(*futures: "Future[Any]") -> None:
    wait(futures, _REMEMBERED_S)


def started(step: Callable[[], T]) -> "Future[T]":
    """What a thread of its own makes of it: it may hang in the kernel for a while."""
    told: Future[T] = Future()

    def run() -> None:
        try:
            told.set_result(step())
        except BaseException as error:
            told.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return told


@contextlib.contextmanager
def stopped(node: Node) -> Iterator[None]:
    assert node.pid is not None
    os.kill(node.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(node.pid, signal.SIGCONT)


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """Somebody holds the directory's lock."""
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline() != "held\n":
            pytest.skip(holder.stderr.read().strip())
        try:
            yield
            assert holder.poll() is None
        finally:
            holder.kill()


def remember(directory: Path, *names: str) -> None:
    """The kernel knows these names, their attributes, and the listing."""
    for _ in range(2):
        assert set(names) <= set(os.listdir(directory))
        for name in names:
            assert (directory / name).stat().st_size == 3


def test_what_s3_answers_beside_a_stopped_mount_is_seen_on_it(server: S3, bucket: str) -> None:
    client, directory = server.client(), server.mount / bucket
    for name in ("deleted", "replaced", "kept"):
        client.put_object(Bucket=bucket, Key=name, Body=b"old")
    remember(directory, "deleted", "replaced", "kept")
    with stopped(server.node):
        answer = client.delete_object(Bucket=bucket, Key="deleted")
        assert answer["ResponseMetadata"]["HTTPStatusCode"] == 204
        seen = started(lambda: (directory / "deleted").exists())
        listed = started(lambda: os.listdir(directory))
        size = started(lambda: (directory / "kept").stat().st_size)
        _wait(seen, listed, size)
    assert seen.result(_READ_S) is False
    assert sorted(listed.result(_READ_S)) == ["kept", "replaced"]
    assert size.result(_READ_S) == 3
    client.put_object(Bucket=bucket, Key="replaced", Body=b"newer")
    assert (directory / "replaced").read_bytes() == b"newer"


def test_what_s3_answers_while_a_directory_is_locked_is_seen_on_it(server: S3, bucket: str) -> None:
    client, directory = server.client(), server.mount / bucket
    for name in ("deleted", "replaced", "kept", "elsewhere/a"):
        client.put_object(Bucket=bucket, Key=name, Body=b"old")
    sizes = [(directory / name).stat().st_size for name in ("deleted", "replaced", "elsewhere/a")]
    assert sizes == [3, 3, 3]
    assert not (directory / "new").exists()
    with held(directory):
        client.delete_object(Bucket=bucket, Key="deleted")
        client.put_object(Bucket=bucket, Key="replaced", Body=b"newer")
        client.put_object(Bucket=bucket, Key="new", Body=b"fresh")
        client.delete_object(Bucket=bucket, Key="elsewhere/a")
        seen = started(lambda: (directory / "deleted").exists())
        replaced = started((directory / "replaced").read_bytes)
        new = started((directory / "new").read_bytes)
        _wait(seen, replaced, new)
    assert seen.result(_READ_S) is False
    assert replaced.result(_READ_S) == b"newer"
    assert new.result(_READ_S) == b"fresh"
    assert not (directory / "elsewhere").exists()
    assert sorted(os.listdir(directory)) == ["kept", "new", "replaced"]


def test_what_a_client_changes_beside_a_stopped_mount_is_seen_on_it() -> None:
    """In libfuse mode, whose device is libfuse's; the others are alike in this."""
    node = start(Node.make("libfuse"))
    try:
        (node.mount / "suite").mkdir()
        _rename_beside(node, node.mount / "suite")
    finally:
        node.remove()


def _rename_beside(node: Node, here: Path) -> None:
    for name in ("a", "b"):
        (here / name).write_bytes(b"old")
    with kvfs.Client(node.store) as client, open(here / "b", "rb") as before:
        sealed(client, "/suite/a")
        sealed(client, "/suite/b")
        remember(here, "a", "b")
        with stopped(node):
            client.rename("/suite/a", "/suite/b")
            moved = started(lambda: (here / "a").exists())
            listed = started(lambda: os.listdir(here))
            links = started(lambda: os.fstat(before.fileno()).st_nlink)
            _wait(moved, listed, links)
        assert moved.result(_READ_S) is False
        assert listed.result(_READ_S) == ["b"]
        assert links.result(_READ_S) == 0
        assert before.read() == b"old"
