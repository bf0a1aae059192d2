"""Byte ranges that clients of NFS lock are locked for programs on the mount, and for each other."""

import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.harness import CannotStart, kvfs
from tests.integration.several import several
from tests.nfs import ganesha
from tests.nfs.door import Door
from tests.nfs.status import NfsError
from tests.nfs.v4 import Client, LockDenied, Owner
from tests.nfs.v4_operations import LockKind

LACKING = ganesha.why_not()
pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING)


@pytest.fixture
def path(door: Door, request: pytest.FixtureRequest) -> Path:
    made = door.node.mount / "open" / request.node.name
    made.write_bytes(bytes(100))
    return made


@pytest.fixture(params=["v40", "v41"])
def client(door: Door, request: pytest.FixtureRequest) -> Client:
    made = getattr(door, request.param)()
    assert isinstance(made, Client)
    return made


@pytest.fixture
def local(path: Path) -> Iterator[int]:
    """A descriptor of a program on the mount."""
    fd = os.open(path, os.O_RDWR)
    yield fd
    os.close(fd)


def ofd_lock(fd: int, kind: int, start: int, length: int) -> None:
    """Raises BlockingIOError where another lock is in the way."""
    fcntl.fcntl(fd, 37, struct.pack("hhqqi4x", kind, os.SEEK_SET, start, length, 0))


def test_a_clients_lock_is_in_the_way_of_a_program(client: Client, path: Path, local: int) -> None:
    opened = client.open(client.walk("open"), path.name, Owner())
    locked = client.lock(opened, Owner(), LockKind.WRITE, 10, 10)
    with pytest.raises(BlockingIOError):
        ofd_lock(local, fcntl.F_WRLCK, 15, 1)
    ofd_lock(local, fcntl.F_WRLCK, 20, 5)
    client.unlock(locked, 10, 10)
    ofd_lock(local, fcntl.F_WRLCK, 15, 1)
    client.close(opened)


def test_a_programs_lock_is_in_the_way_of_a_client(client: Client, path: Path, local: int) -> None:
    ofd_lock(local, fcntl.F_RDLCK, 0, 50)
    opened = client.open(client.walk("open"), path.name, Owner())
    with pytest.raises(LockDenied):
        client.lock(opened, Owner(), LockKind.WRITE, 40, 20)
    locked = client.lock(opened, Owner(), LockKind.READ, 40, 20)
    with pytest.raises(BlockingIOError):
        ofd_lock(local, fcntl.F_WRLCK, 45, 1)
    client.unlock(locked, 40, 20)
    client.close(opened)


def test_a_programs_lock_is_told_of(client: Client, path: Path, local: int) -> None:
    handle = client.walk(f"open/{path.name}")
    ofd_lock(local, fcntl.F_RDLCK, 10, 40)
    client.lock_test(handle, Owner(), LockKind.READ, 0, 20)
    client.lock_test(handle, Owner(), LockKind.WRITE, 50, 20)
    with pytest.raises(LockDenied) as denied:
        client.lock_test(handle, Owner(), LockKind.WRITE, 0, 20)
    assert (denied.value.held.offset, denied.value.held.length) == (10, 40)


def test_locks_end_with_their_open_file(client: Client, path: Path, local: int) -> None:
    opened = client.open(client.walk("open"), path.name, Owner())
    locked = client.lock(opened, Owner())
    with pytest.raises(BlockingIOError):
        ofd_lock(local, fcntl.F_WRLCK, 0, 1)
    with pytest.raises(NfsError, match="LOCKS_HELD"):
        client.close(opened)
    client.unlock(locked)
    client.close(opened)
    ofd_lock(local, fcntl.F_WRLCK, 0, 1)


def test_locks_that_reach_the_cluster_are_in_each_others_way() -> None:
    with several(1) as cluster:
        another = cluster.nodes[0]
        place = ("--store", str(another.store))
        assert kvfs("namespace", "create", "locked", "--locks", "cluster", *place).returncode == 0
        another.down()
        another.up()
        with Door.of(cluster) as door:
            door.kvfs("nfs", "export", "locked", "--squash", "none")
            path = another.mount / "locked" / "x"
            path.write_bytes(bytes(100))
            client = door.v41()
            with path.open("r+b") as local:
                fcntl.lockf(local, fcntl.LOCK_EX, 40, 10)
                handle = client.walk("locked/x")
                client.lock_test(handle, Owner(), LockKind.READ, 60, 5)
                opened = client.open(client.walk("locked"), "x", Owner())
                with pytest.raises(LockDenied) as told:
                    client.lock_test(handle, Owner(), LockKind.READ, 0, 20)
                with pytest.raises(LockDenied) as denied:
                    client.lock(opened, Owner(), LockKind.READ, 0, 20)
                for each in (told.value.held, denied.value.held):
                    assert (each.offset, each.length) == (10, 40)
                client.lock(opened, Owner(), LockKind.WRITE, 60, 5)
                with pytest.raises(BlockingIOError):
                    fcntl.lockf(local, fcntl.LOCK_EX | fcntl.LOCK_NB, 5, 60)


def test_a_mount_that_is_taken_away_waits_for_no_lock() -> None:
    with Door.make() as door:
        directory = door.exported("open", "--squash", "none")
        (directory / "x").write_bytes(bytes(10))
        client = door.v41()
        opened = client.open(client.walk("open"), "x", Owner())
        client.lock(opened, Owner())
        door.kvfs("umount", "--lazy")
        assert not door.node.status()["nfs"]["is_serving"]
        door.node.down()


def test_nfs_over_libfuse_is_refused_at_once() -> None:
    with pytest.raises(CannotStart, match="passthrough or relay"), Door.make(mode="libfuse"):
        pass
