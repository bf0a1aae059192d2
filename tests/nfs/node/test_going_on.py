"""The daemon is replaced or killed under NFS clients, where its mount outlives it (`takeover_s`):
NFS-Ganesha goes on, and no call of a client fails, is lost, or is done twice."""

import contextlib
import fcntl
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.cluster.waiting import wait_until
from tests.conftest import LONG
from tests.integration.harness import kvfs
from tests.integration.takeover.successor import WAIT, follow, kill
from tests.nfs import ganesha
from tests.nfs.door import Door
from tests.nfs.rpc import AuthSys, Connection
from tests.nfs.status import NfsError
from tests.nfs.v3 import Client as Client3
from tests.nfs.v3_types import Stability
from tests.nfs.v4 import Client, Client40, Client41, LockDenied, Owner
from tests.nfs.v4_operations import Guarded

LACKING = ganesha.why_not()
pytestmark = [
    pytest.mark.skipif(bool(LACKING), reason=LACKING),
    pytest.mark.usefixtures("outlives"),
]
ALICE = AuthSys(uid=4001, gid=4001)
PATIENCE_S = 60.0
ROUNDS = 100 if LONG else 6


@pytest.fixture(scope="module")
def mine() -> Iterator[Door]:
    """A node whose mount outlives its daemons; `shared` is everybody's, `readonly` for reading."""
    with Door.make("--nfs-v3", *WAIT) as door:
        door.exported("shared", mode=0o777)
        door.exported("readonly", "--read-only")
        yield door


def restart(door: Door) -> None:
    """As an administrator does it; returns when another daemon serves."""
    assert door.node.pid is not None
    dead = door.node.pid
    done = kvfs("restart", "--store", str(door.node.store))
    assert done.returncode == 0, done.stderr + door.node.log
    follow(door.node, [dead])


def serving(door: Door) -> int:
    """The process of Ganesha, once a daemon is for it; 0 would be this process and its own. By one
    look: a daemon may have one for served that is dead, and start another in the next moment."""
    found = 0

    def is_served() -> bool:
        nonlocal found
        nfs = door.node.status().get("nfs", {})
        found = nfs["pid"] if nfs.get("is_serving") else 0
        return found > 1

    wait_until(is_served, "clients are served")
    return found


class Load(threading.Thread):
    """A client that makes, changes, reads and removes files, each call once: one that was done
    twice or not at all is an error, as is any that fails."""

    def __init__(self, door: Door, name: str, namespace: str) -> None:
        super().__init__(name=name)
        self.namespace = namespace
        self.directory = door.node.mount / namespace / name
        self.directory.mkdir()
        self.directory.chmod(0o777)
        self.turns = 0
        self.error: BaseException | None = None
        self._end = threading.Event()
        self._connection = Connection("127.0.0.1", door.port, ALICE, PATIENCE_S)
        with Connection("127.0.0.1", door.mount_port, ALICE, PATIENCE_S) as mounting:
            self._connect(door, mounting)

    def _connect(self, door: Door, mounting: Connection) -> None:
        raise NotImplementedError

    def turn(self, name: str) -> None:
        raise NotImplementedError

    def run(self) -> None:
        with self._connection:
            try:
                for number in itertools.count():
                    if self._end.is_set():
                        return
                    self.turn(f"{number:06}")
                    self.turns += 1
            except BaseException as error:  # the test's to tell
                self.error = error

    def wait_for_more(self) -> None:
        goal = self.turns + 3
        wait_until(lambda: self.turns >= goal or self.error is not None, f"{self.name} goes on")
        self.check()

    def check(self) -> None:
        if self.error is not None:
            raise AssertionError(f"{self.name}, turn {self.turns}") from self.error

    def stop(self) -> None:
        self._end.set()
        self.join()


class Load3(Load):
    def _connect(self, door: Door, mounting: Connection) -> None:
        del mounting
        self._client = Client3(self._connection)
        root = door.mounts().mount(f"/{self.namespace}").handle
        self._at = self._client.lookup(root, self.name).handle
        self._kept = self._client.create(self._at, "kept", guarded=True).handle

    def turn(self, name: str) -> None:
        client, at, content = self._client, self._at, name.encode() * 1000
        made = client.create(at, name, guarded=True).handle
        written = client.write(made, 0, content, Stability.UNSTABLE)
        assert client.commit(made) == written.verifier
        assert client.read(made, 0, 6000).data == content
        client.rename(at, name, at, f"{name}.new")
        client.link(made, at, f"{name}.link")
        client.mkdir(at, f"{name}.dir")
        assert set(client.names(at)) - {".", ".."} == {
            *("kept", f"{name}.new", f"{name}.link", f"{name}.dir")
        }
        client.rmdir(at, f"{name}.dir")
        client.remove(at, f"{name}.link")
        client.remove(at, f"{name}.new")
        client.write(self._kept, 6 * self.turns, name.encode())


class Load4(Load):
    """It keeps a file open, with a lock, and opens and locks others."""

    def _client_of(self) -> Client:
        raise NotImplementedError

    def _connect(self, door: Door, mounting: Connection) -> None:
        del mounting
        self._door = door
        self._client = self._client_of()
        self._at = self._client.walk(f"{self.namespace}/{self.name}")
        self._owner = Owner()
        made = self._client.open(self._at, "kept", self._owner, creation=Guarded())
        self._locked = self._client.lock(made, Owner(), offset=0, length=1 << 20)
        self._kept = made

    def turn(self, name: str) -> None:
        client, content = self._client, name.encode() * 1000
        opened = client.open(self._at, name, self._owner, creation=Guarded())
        locked = client.lock(opened, Owner(), offset=5, length=10)
        client.write(opened.handle, 0, content, stateid=opened.stateid)
        assert client.read(opened.handle, 0, 6000, opened.stateid).data == content
        client.unlock(locked, 5, 10)
        client.rename(self._at, name, self._at, f"{name}.new")
        client.close(opened)
        assert set(client.names(self._at)) == {"kept", f"{name}.new"}
        client.remove(self._at, f"{name}.new")
        kept = self._kept
        client.write(kept.handle, 6 * self.turns, name.encode(), stateid=kept.stateid)
        with (self.directory / "kept").open("rb") as file, pytest.raises(BlockingIOError):
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB, 10, 100)


class Load40(Load4):
    def _client_of(self) -> Client:
        return Client40(self._connection)


class Load41(Load4):
    def _client_of(self) -> Client:
        return Client41(self._connection)


@contextlib.contextmanager
def loaded(door: Door, name: str, namespace: str = "shared") -> Iterator[list[Load]]:
    loads = [kind(door, f"{name}-{kind.__name__}", namespace) for kind in (Load3, Load40, Load41)]
    for each in loads:
        each.start()
    try:
        yield loads
    finally:
        for each in loads:
            each.stop()
    for each in loads:
        each.check()
        kept = b"".join(f"{turn:06}".encode() for turn in range(each.turns))
        assert (each.directory / "kept").read_bytes() == kept
        assert os.listdir(each.directory) == ["kept"]


def test_clients_see_a_pause_and_no_error(mine: Door) -> None:
    """Twice killed, once replaced, and so on: always the same Ganesha, which says how it is."""
    server = serving(mine)
    with loaded(mine, "paused") as loads:
        for number in range(ROUNDS):
            restart(mine) if number % 3 == 2 else kill(mine.node)
            for each in loads:
                each.wait_for_more()
            assert serving(mine) == server
            assert mine.node.status()["nfs"]["restarts"] == 0
    print(f"{ROUNDS} daemons; turns: {[each.turns for each in loads]}")
    assert len(os.listdir(f"/proc/{mine.node.pid}/fd")) < 300


@pytest.mark.parametrize("change", [kill, restart])
def test_exports_change_after_another_daemon_has_come(
    mine: Door, change: Callable[[object], None]
) -> None:
    name = f"later-{change.__name__}"
    reader = mine.v3(ALICE)
    (mine.node.mount / "readonly" / name).write_bytes(b"content")
    (mine.node.mount / "readonly" / name).chmod(0o644)
    root = mine.mounts().mount("/readonly").handle
    found = reader.lookup(root, name).handle
    change(mine.node if change is kill else mine)
    serving(mine)
    mine.exported(name, mode=0o777)
    made = reader.create(mine.mounts().mount(f"/{name}").handle, "file").handle
    reader.write(made, 0, b"written")
    assert (mine.node.mount / name / "file").read_bytes() == b"written"
    assert reader.read(found, 0, 100).data == b"content"
    mine.kvfs("nfs", "unexport", name)
    with pytest.raises(NfsError):
        reader.read(made, 0, 100)
    assert reader.read(found, 0, 100).data == b"content"


def test_locks_that_a_client_gives_back_later_are_free(mine: Door) -> None:
    path = mine.node.mount / "shared" / "lent"
    path.write_bytes(bytes(100))
    path.chmod(0o666)
    client = mine.v41(ALICE)
    opened = client.open(client.walk("shared"), path.name, Owner())
    locked = client.lock(opened, Owner(), offset=0, length=10)
    kill(mine.node)
    with pytest.raises(LockDenied):
        client.lock(opened, Owner(), offset=5, length=1)
    client.unlock(locked, 0, 10)
    with path.open("r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 0)
    client.close(opened)
    kill(mine.node)
    with path.open("r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_ganesha_that_dies_is_started_anew_by_the_daemon_that_goes_on(mine: Door) -> None:
    kill(mine.node)
    before = serving(mine)
    shared = mine.node.mount / "shared"
    with contextlib.ExitStack() as held:
        os.kill(before, signal.SIGKILL)
        for number in range(40):  # for which the node takes descriptors that have become free
            held.enter_context((shared / f"held{number}").open("wb"))
        wait_until(lambda: serving(mine) != before, "another serves")
        kill(mine.node)
        assert serving(mine) != before
    root = mine.mounts().mount("/shared").handle
    mine.v3(ALICE).create(root, "after", guarded=True)


def test_a_ganesha_that_dies_with_its_daemon_is_started_anew(mine: Door) -> None:
    before = serving(mine)
    os.kill(before, signal.SIGKILL)
    kill(mine.node)
    wait_until(lambda: serving(mine) != before, "another serves")
    root = mine.mounts().mount("/shared").handle
    mine.v3(ALICE).create(root, "both", guarded=True)
