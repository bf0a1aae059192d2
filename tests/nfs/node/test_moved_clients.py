"""Clients of a node that has ended go on at another one, by version 4 with what they had open and
locked; their locks hold on all nodes."""

import contextlib
import fcntl
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.cluster.waiting import wait_until
from tests.integration.harness import kvfs
from tests.integration.several import several
from tests.nfs import ganesha
from tests.nfs.door import Door
from tests.nfs.node.test_restarts import going_on
from tests.nfs.rpc import AuthSys
from tests.nfs.status import NfsError
from tests.nfs.v4 import Client, Client40, Client41, LockDenied, Locked, Opened, Owner
from tests.nfs.v4_operations import reclaim_complete

LACKING = ganesha.why_not()
pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING)
ALICE = AuthSys(uid=4001, gid=4001)


@dataclass
class Two:
    """Two nodes that export `shared`, whose locks reach the cluster, with a file `f`."""

    a: Door
    b: Door


@pytest.fixture
def two() -> Iterator[Two]:
    with several(0) as cluster, contextlib.ExitStack() as open_:
        a = open_.enter_context(Door.of(cluster))
        directory = a.exported("shared", mode=0o777)
        a.kvfs("namespace", "set", "shared", "--coherence", "strict", "--locks", "cluster")
        for words in (["umount"], ["mount", str(a.node.mount)]):
            a.kvfs(*words)
        b = open_.enter_context(Door.of(cluster))
        for door in (a, b):
            wait_until(lambda door=door: is_served(door), "both serve it")
        (directory / "f").write_bytes(bytes(100))
        (directory / "f").chmod(0o666)
        wait_until(lambda: (b.node.mount / "shared" / "f").exists(), "it is there")
        yield Two(a, b)


def is_served(door: Door) -> bool:
    status = door.node.status()["nfs"]
    return bool(status["is_serving"]) and len(status["exports"]) == 1


class Mover:
    """A client with the file open and a part of it locked."""

    def __init__(self, door: Door, version: str) -> None:
        self.version = version
        self._owner, self._locker = Owner(), Owner()
        self._connect(door)
        self._have_taken_back()
        opened: list[Opened] = []

        def take() -> None:
            opened.append(self.client.open(self.client.walk("shared"), "f", self._owner))

        going_on(take)
        self.opened = opened[-1]
        offset = 10 if version == "v40" else 30
        self.range = offset, 10
        self.locked: Locked = self.client.lock(self.opened, self._locker, offset=offset, length=10)

    def _connect(self, door: Door) -> None:
        made: list[Client] = []

        def connect() -> None:
            name = b"mover " + self.version.encode()
            connection = door.connection(ALICE)
            if self.version == "v40":
                made.append(Client40(connection, name, b"verifier"))
            else:
                made.append(Client41(connection, name, b"verifier", reclaims=True))

        going_on(connect)
        self.client = made[-1]

    def _have_taken_back(self) -> None:
        if self.version == "v41":
            self.client.call(reclaim_complete())

    def move(self, door: Door) -> None:
        """Takes back what it had at another node."""
        self._connect(door)
        self._owner.seqid = self._locker.seqid = 0
        self.opened = self.client.open_again(self.opened.handle, self._owner)
        offset, length = self.range
        self.locked = self.client.lock(
            self.opened, self._locker, offset=offset, length=length, reclaim=True
        )
        self._have_taken_back()


def program_can_lock(door: Door, start: int, length: int) -> bool:
    with (door.node.mount / "shared" / "f").open("r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
        except BlockingIOError:
            return False
        return True


def test_locks_of_clients_hold_on_the_other_node_and_move_with_them(two: Two) -> None:
    movers = [Mover(two.a, version) for version in ("v40", "v41")]
    for each in movers:
        assert not program_can_lock(two.b, *each.range)
    assert program_can_lock(two.b, 50, 10)
    stranger = two.b.v41(ALICE)
    theirs: list[Opened] = []
    going_on(lambda: theirs.append(stranger.open(stranger.walk("shared"), "f", Owner())))
    with pytest.raises(LockDenied):
        stranger.lock(theirs[-1], Owner(), offset=15, length=1)
    with (two.b.node.mount / "shared" / "f").open("r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 5, 60)
        with pytest.raises(LockDenied):
            movers[1].client.lock(movers[1].opened, Owner(), offset=62, length=1)

    wait_until(
        lambda: two.a.node.status()["nfs"]["movable_clients"] == len(movers), "all know of them"
    )
    refused = kvfs("nfs", "adopt", "2", "--store", str(two.b.node.store))
    assert refused.returncode, "its own clients"
    assert "own" in refused.stderr
    two.a.node.kill()
    assert "2 clients of node" in two.b.kvfs("nfs", "adopt", "1")
    unknown = Client41(two.b.connection(ALICE), b"unknown", b"verifier", reclaims=True)
    with pytest.raises(NfsError, match=r"NO_GRACE|RECLAIM_BAD"):
        unknown.open_again(movers[0].opened.handle, Owner())
    for each in movers:
        each.move(two.b)
        each.client.write(each.opened.handle, each.range[0], b"moved", stateid=each.opened.stateid)
        assert not program_can_lock(two.b, *each.range)
    for each in movers:
        each.client.unlock(each.locked, *each.range)
        assert program_can_lock(two.b, *each.range)
    two.a.node.up()
    data = (two.b.node.mount / "shared" / "f").read_bytes()
    assert (data[10:15], data[30:35]) == (b"moved", b"moved")
