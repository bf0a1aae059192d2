"""Locks that reach every node of a cluster, held by programs of a node whose daemon is killed or
replaced: nobody else has them, and they are given back as ever."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.harness import Node, kvfs
from tests.integration.posix import descriptor, refused
from tests.integration.several import Several, several
from tests.integration.takeover.successor import DEADLINE_S, WAIT, kill

_OWNER = """
import fcntl, os, sys
for path in sys.argv[1:]:
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    fcntl.lockf(fd, fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Several]:
    """The first is mounted anew, once there is a namespace whose locks reach further."""
    with several(1, *WAIT) as cluster:
        place = ("--store", str(cluster.nodes[0].store))
        for words in (
            ("namespace", "create", "shared", "--locks", "cluster"),
            ("umount",),
            ("mount",),
        ):
            done = kvfs(*words, *place)
            assert done.returncode == 0, done.stderr
        cluster.add(*WAIT)
        assert cluster.nodes[0].status()["mount"]["takeover_s"] == 60
        yield cluster


@pytest.fixture
def files(nodes: Several, request: pytest.FixtureRequest) -> list[Path]:
    """One file, as each node has it."""
    tops = [node.mount / "shared" / request.node.name for node in nodes.nodes]
    tops[0].write_bytes(bytes(1000))
    return tops


def _restart(node: Node) -> None:
    done = kvfs("restart", "--store", str(node.store), timeout_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    node.pid = node.status()["pid"]


class _Waiter(threading.Thread):
    """Takes a flock when it is free, and gives it back."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self._path = path
        self.has_it = threading.Event()
        self.start()

    def run(self) -> None:
        with descriptor(self._path) as fd:
            fcntl.flock(fd, fcntl.LOCK_EX)
            self.has_it.set()

    def gets_it(self) -> bool:
        return self.has_it.wait(DEADLINE_S)


@pytest.mark.parametrize("end", [kill, _restart])
def test_locks_stay_whose_they_are(
    nodes: Several, files: list[Path], end: Callable[[Node], None]
) -> None:
    node, (here, there) = nodes.nodes[0], files
    lone = node.mount / "models" / here.name
    lone.write_bytes(b"x")
    with (
        descriptor(here) as mine,
        descriptor(here) as beside,
        descriptor(there) as theirs,
        descriptor(lone) as own,
        descriptor(lone) as other,
    ):
        fcntl.flock(mine, fcntl.LOCK_EX)
        fcntl.flock(own, fcntl.LOCK_SH)
        fcntl.lockf(mine, fcntl.LOCK_EX, 100, 0)
        fcntl.lockf(theirs, fcntl.LOCK_EX, 100, 500)
        waiters = [_Waiter(here), _Waiter(there)]
        for _ in range(2):
            end(node)
            for fd in (beside, theirs):
                with refused(errno.EWOULDBLOCK):
                    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            with refused(errno.EWOULDBLOCK):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with refused(errno.EAGAIN):
                fcntl.lockf(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 99)
            with refused(errno.EAGAIN):
                fcntl.lockf(mine, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 500)
        assert not any(each.has_it.is_set() for each in waiters)
        fcntl.flock(mine, fcntl.LOCK_UN)
        for each in waiters:
            assert each.gets_it()
        fcntl.lockf(mine, fcntl.LOCK_UN, 50, 50)
        fcntl.lockf(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB, 50, 50)
        fcntl.flock(own, fcntl.LOCK_UN)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with descriptor(there) as theirs:  # what was closed is locked no more
        fcntl.lockf(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(theirs, fcntl.LOCK_EX)  # the kernel tells of the close soon, not before it ends


def test_an_owner_that_dies_while_there_is_no_daemon_leaves_its_locks(
    nodes: Several, files: list[Path]
) -> None:
    node, (here, there) = nodes.nodes[0], files
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(here)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with owner, descriptor(there) as theirs:
        assert owner.stdout is not None
        assert owner.stdout.readline()
        with refused(errno.EWOULDBLOCK):
            fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert node.pid is not None
        os.kill(node.pid, signal.SIGSTOP)  # so that its end is told to nobody
        owner.kill()
        kill(node)
        fcntl.flock(theirs, fcntl.LOCK_EX)
        fcntl.lockf(theirs, fcntl.LOCK_EX)


def test_a_lock_that_went_to_another_node_meanwhile_is_not_held_twice(
    nodes: Several, files: list[Path]
) -> None:
    node, (here, there) = nodes.nodes[0], files
    with descriptor(here) as mine, descriptor(there) as theirs:
        fcntl.flock(mine, fcntl.LOCK_EX)
        assert node.pid is not None
        os.kill(node.pid, signal.SIGSTOP)
        fcntl.flock(theirs, fcntl.LOCK_EX)  # once the node's lease has ended
        kill(node)
        with refused(errno.ENOLCK):
            fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with refused(errno.EWOULDBLOCK):
            fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(theirs, fcntl.LOCK_UN)
        fcntl.flock(mine, fcntl.LOCK_EX)
