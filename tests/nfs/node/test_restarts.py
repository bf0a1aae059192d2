"""NFS-Ganesha, the node or both are killed under clients: after a pause they go on, with what they
had, and nothing that was told to be stable is lost."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway.nfs import jail_process
from tests.cluster.waiting import wait_until
from tests.nfs import ganesha
from tests.nfs.door import Door
from tests.nfs.rpc import AuthSys, RpcError
from tests.nfs.status import NfsError
from tests.nfs.v3 import Client as Client3
from tests.nfs.v3_types import Stability
from tests.nfs.v4 import Client, Client40, Client41, LockDenied, Opened, Owner
from tests.nfs.v4_operations import Unchecked, reclaim_complete

LACKING = ganesha.why_not()
pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING)
ALICE = AuthSys(uid=4001, gid=4001)
PASSING = ("NFS4ERR_GRACE", "NFS4ERR_DELAY", "NFS3ERR_JUKEBOX")


@pytest.fixture(scope="module")
def mine() -> Iterator[Door]:
    """A node that the tests may kill; `shared` is everybody's."""
    with Door.make("--nfs-v3") as door:
        door.exported("shared", mode=0o777)
        yield door


def kill_server(door: Door) -> None:
    os.kill(door.node.status()["nfs"]["pid"], signal.SIGKILL)


def kill_node(door: Door) -> None:
    """The server ends with it."""
    door.node.kill()
    door.node.up()


def kill_both(door: Door) -> None:
    server = door.node.status()["nfs"]["pid"]
    os.kill(server, signal.SIGKILL)
    door.node.kill()
    wait_until(lambda: not Path(f"/proc/{server}").exists(), "the server has gone")
    door.node.up()


def going_on(attempt: Callable[[], object]) -> None:
    """Try until it is done, as a client does whose server is being started."""

    def is_done() -> bool:
        try:
            attempt()
        except (OSError, RpcError):
            return False
        except NfsError as error:
            if error.name not in PASSING:
                raise
            return False
        return True

    wait_until(is_done, "the server serves again")


class Writer(threading.Thread):
    """Makes files by version 3, each stable before the next; goes on where it was when the server
    goes and comes again."""

    def __init__(self, door: Door, name: str) -> None:
        super().__init__()
        self._door = door
        self._end = threading.Event()
        self.directory = door.node.mount / "shared" / name
        self.directory.mkdir()
        self.directory.chmod(0o777)
        self._connect()
        self.stable: list[str] = []
        self.longest_s = 0.0
        """The longest pause between two files."""

    def _connect(self) -> None:
        with contextlib.ExitStack():
            root = self._door.mounts().mount("/shared").handle
            self._client: Client3 = self._door.v3(ALICE)
            self._handle = self._client.lookup(root, self.directory.name).handle

    def _make(self, name: str) -> None:
        """Once more where it is not known whether it was done: an unchecked create may be."""
        try:
            handle = self._client.create(self._handle, name).handle
            if int(name) % 2:
                self._client.write(handle, 0, name.encode() * 100)
            else:
                self._client.write(handle, 0, name.encode() * 100, Stability.UNSTABLE)
                self._client.commit(handle)
        except OSError:
            self._connect()
            raise

    def run(self) -> None:
        last = time.monotonic()
        while not self._end.is_set():
            name = str(len(self.stable))
            going_on(lambda name=name: self._make(name))
            self.stable.append(name)
            self.longest_s = max(self.longest_s, time.monotonic() - last)
            last = time.monotonic()

    def wait_for_more(self) -> None:
        goal = len(self.stable) + 20
        wait_until(lambda: len(self.stable) >= goal or not self.is_alive(), "it writes")
        assert self.is_alive()

    def stop(self) -> None:
        self._end.set()
        self.join()


class Holder:
    """A client that has a file open, with a lock on some of it."""

    def __init__(self, door: Door, version: str) -> None:
        self.version = version
        self.path = door.node.mount / "shared" / f"held-{version}"
        self.path.write_bytes(bytes(100))
        self.path.chmod(0o666)
        self._door = door
        self._name = b"client " + version.encode()
        self._owner, self._locker = Owner(), Owner()
        client = self._connect()
        self._took_back(client)
        opened = client.open(client.walk("shared"), self.path.name, self._owner)
        client.lock(opened, self._locker, offset=10, length=10)
        client.write(opened.handle, 0, b"before", stateid=opened.stateid)
        self._handle = opened.handle

    def _connect(self) -> Client:
        connection = self._door.connection(ALICE)
        if self.version == "v40":
            return Client40(connection, self._name, b"verifier")
        return Client41(connection, self._name, b"verifier", reclaims=True)

    def _took_back(self, client: Client) -> None:
        if self.version == "v41":
            client.call(reclaim_complete())

    def return_(self) -> None:
        """The server has been started anew."""
        made: list[Client] = []
        going_on(lambda: made.append(self._connect()))
        self._client = made[-1]
        self._owner.seqid = self._locker.seqid = 0
        self._opened = self._client.open_again(self._handle, self._owner)
        self._locked = self._client.lock(
            self._opened, self._locker, offset=10, length=10, reclaim=True
        )
        self._took_back(self._client)
        self._client.write(self._handle, 10, b"after", stateid=self._opened.stateid)

    def renew(self) -> None:
        assert isinstance(self._client, Client40 | Client41)
        self._client.renew()

    def end(self) -> None:
        self._client.unlock(self._locked, 10, 10)
        with pytest.raises(NfsError, match="NO_GRACE"):
            self._client.open_again(self._handle, Owner())
        self._client.close(self._opened)
        assert self.path.read_bytes()[:15] == b"before\0\0\0\0after"


def test_what_clients_have_open_and_locked_they_take_back(mine: Door) -> None:
    """Within the grace period, in which nobody else gets it; others wait no longer than that."""
    holders = [Holder(mine, version) for version in ("v40", "v41")]
    kill_server(mine)
    began = time.monotonic()
    for each in holders:
        each.return_()
    print(f"taken back after {time.monotonic() - began:.2f} s")
    stranger, theirs = mine.v41(ALICE), list[Opened]()
    with pytest.raises(NfsError, match="NFS4ERR_GRACE"):
        stranger.open(stranger.walk("shared"), holders[0].path.name, Owner())

    def take(name: str) -> None:
        for each in holders:
            each.renew()
        theirs.append(stranger.open(stranger.walk("shared"), name, Owner()))

    for each in holders:
        going_on(lambda name=each.path.name: take(name))
        with pytest.raises(LockDenied):
            stranger.lock(theirs[-1], Owner(), offset=15, length=1)
    print(f"others open files after {time.monotonic() - began:.2f} s")
    for each, opened in zip(holders, theirs, strict=True):
        each.end()
        stranger.lock(opened, Owner(), offset=15, length=1)


@pytest.mark.parametrize("kill", [kill_server, kill_node, kill_both])
def test_a_writer_goes_on_after_a_pause(mine: Door, kill: Callable[[Door], None]) -> None:
    writer = Writer(mine, kill.__name__)
    writer.start()
    try:
        writer.wait_for_more()
        kill(mine)
        writer.wait_for_more()
    finally:
        writer.stop()
    print(f"{kill.__name__}: the longest pause was {writer.longest_s:.2f} s")
    for name in writer.stable:
        assert (writer.directory / name).read_bytes() == name.encode() * 100


def test_a_file_that_was_made_is_there_after_a_kill_and_written_on_by_its_handle(
    mine: Door,
) -> None:
    """Its making was acknowledged: the client closes it later, or, by version 3, never."""
    root = mine.mounts().mount("/shared").handle
    made = mine.v3(ALICE).create(root, "made3").handle

    def connected() -> Client41:
        return Client41(mine.connection(ALICE), b"maker", b"verifier", reclaims=True)

    client, owner = connected(), Owner()
    client.call(reclaim_complete())
    before: list[Opened] = []

    def make() -> None:
        directory = client.walk("shared")
        before.append(client.open(directory, "made4", owner, creation=Unchecked()))

    going_on(make)
    client.write(before[0].handle, 0, b"one", stateid=before[0].stateid)
    kill_node(mine)
    going_on(lambda: mine.v3(ALICE).write(made, 0, b"two"))
    again: list[Client41] = []
    going_on(lambda: again.append(connected()))
    opened = again[0].open_again(before[0].handle, Owner())
    again[0].write(opened.handle, 3, b"two", stateid=opened.stateid)
    again[0].close(opened)
    directory = mine.node.mount / "shared"
    assert (directory / "made3").read_bytes() == b"two"
    assert (directory / "made4").read_bytes() == b"onetwo"


@pytest.mark.parametrize("kill", [kill_server, kill_node])
def test_each_start_has_a_write_verifier_of_its_own(
    mine: Door, kill: Callable[[Door], None]
) -> None:
    """By it clients know that what they have not committed may be lost, and send it again."""
    path = mine.node.mount / "shared" / "verified"
    path.touch()
    path.chmod(0o666)
    seen: list[bytes] = []

    def look() -> None:
        client = mine.v3(ALICE)
        handle = client.lookup(mine.mounts().mount("/shared").handle, "verified").handle
        written = client.write(handle, 0, b"x", Stability.UNSTABLE)
        assert client.commit(handle) == written.verifier
        client4 = mine.v41(ALICE)
        assert client4.commit(client4.walk("shared/verified")) == written.verifier
        seen.append(written.verifier)

    look()
    for _ in range(3):
        kill(mine)
        going_on(look)
    assert len(set(seen)) == 4


def test_a_start_is_told_from_all_others_of_its_second() -> None:
    """Whatever the clock says, and on whichever node."""
    epochs = [jail_process.epoch() for _ in range(100)]
    assert len(set(epochs)) == 100
    assert all(0 < each < 1 << 32 for each in epochs)
