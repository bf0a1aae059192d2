"""flock and fcntl locks that reach every node of a cluster."""

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.harness import kvfs
from tests.integration.posix import descriptor, refused
from tests.integration.several import Several, several

DEADLINE_S = 60


@pytest.fixture(scope="module")
def nodes() -> Iterator[Several]:
    """The first was mounted before there was a namespace whose locks reach further."""
    with several(1) as cluster:
        store = str(cluster.nodes[0].store)
        kvfs("namespace", "create", "shared", "--locks", "cluster", "--store", store)
        cluster.add()
        cluster.add()
        (cluster.nodes[1].mount / "shared" / "f").write_bytes(bytes(1000))
        yield cluster


@pytest.fixture
def a(nodes: Several) -> Path:
    return nodes.nodes[1].mount / "shared" / "f"


@pytest.fixture
def b(nodes: Several) -> Path:
    return nodes.nodes[2].mount / "shared" / "f"


def test_flock_keeps_other_hosts_out(a: Path, b: Path) -> None:
    with descriptor(a) as one, descriptor(b) as two:
        fcntl.flock(one, fcntl.LOCK_SH)
        fcntl.flock(two, fcntl.LOCK_SH | fcntl.LOCK_NB)
        with refused(errno.EWOULDBLOCK):
            fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(two, fcntl.LOCK_UN)
        fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with refused(errno.EWOULDBLOCK):
            fcntl.flock(two, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_ranges_of_other_hosts_do_not_overlap(a: Path, b: Path) -> None:
    with descriptor(a) as one, descriptor(b) as two:
        fcntl.lockf(one, fcntl.LOCK_EX | fcntl.LOCK_NB, 100, 0)
        fcntl.lockf(two, fcntl.LOCK_EX | fcntl.LOCK_NB, 100, 100)
        with refused(errno.EAGAIN):
            fcntl.lockf(two, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 99)
        fcntl.lockf(one, fcntl.LOCK_UN, 50, 50)
        fcntl.lockf(two, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 99)


def test_a_close_gives_locks_back(a: Path, b: Path) -> None:
    with descriptor(a) as one:
        fcntl.flock(one, fcntl.LOCK_EX)
        fcntl.lockf(one, fcntl.LOCK_EX)
    with descriptor(a) as one:  # who asks on the same host after the close
        fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.lockf(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
    done = threading.Event()

    def wait() -> None:
        with descriptor(b) as two:
            fcntl.flock(two, fcntl.LOCK_EX)
            fcntl.lockf(two, fcntl.LOCK_EX)
            done.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert done.wait(DEADLINE_S)
    thread.join()


def test_who_waits_on_another_host_gets_it(a: Path, b: Path) -> None:
    """Two hosts count up under a blocking lock; nothing is lost."""
    with descriptor(a) as fd:
        os.pwrite(fd, b"0".ljust(20), 0)

    def count(path: Path) -> None:
        for _ in range(20):
            with descriptor(path, os.O_RDONLY) as fd:
                fcntl.flock(fd, fcntl.LOCK_EX)
                with descriptor(path) as fresh:  # an open after the lock sees what was closed
                    number = int(os.pread(fresh, 20, 0)) + 1
                    os.pwrite(fresh, b"%-20d" % number, 0)

    threads = [threading.Thread(target=count, args=(path,), daemon=True) for path in (a, b)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert int(a.read_bytes()[:20]) == 40


def test_a_mount_that_began_before_refuses_such_files(nodes: Several) -> None:
    early = nodes.nodes[0].mount / "shared"
    assert (early / "f").exists()
    with refused(errno.ENOLCK):
        (early / "f").read_bytes()
    with refused(errno.ENOLCK):
        (early / "new").write_bytes(b"x")
    (nodes.nodes[0].mount / "models" / "other").write_bytes(b"x")


def test_a_killed_hosts_locks_end_with_its_lease(nodes: Several, a: Path, b: Path) -> None:
    fd = os.open(b, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with descriptor(a) as mine:
        with refused(errno.EWOULDBLOCK):
            fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        nodes.nodes[2].kill()
        fcntl.flock(mine, fcntl.LOCK_EX)
    with contextlib.suppress(OSError):  # its mount has gone
        os.close(fd)
