"""Removals of names as nodes tell each other of them: what a node does with one, and what becomes
of it where a node, or its disk, fails in between."""

import os
import signal
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import trio

from kvfs.base.errors import NoSpace, NotFound, Unavailable
from kvfs.cluster.handshake import Party
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.records import Flag, namespace_root
from kvfs.meta.replica.local_namespaces import LocalNamespaces, NotHeld, Then
from kvfs.meta.replica.local_transaction import LocalChange
from kvfs.node.names import removal_exchange
from kvfs.node.names.directory_paths import DirectoryPaths
from kvfs.node.names.name_members import NameMembers
from kvfs.node.names.name_protocol import ASK_REMOVED, News
from kvfs.node.names.peer_outbox import PeerOutbox
from kvfs.node.names.removal_exchange import RemovalExchange
from kvfs.node.names.removals import Removals
from kvfs.node.names.tombstones import Tombstone, Tombstones
from kvfs.tree import inodes, namespaces, tree
from kvfs.tree.changes import Change
from kvfs.tree.copies import placements
from kvfs.tree.rename import rename
from tests.contract.small_node import new_inode
from tests.contract.tombs import removed
from tests.jumping import run_jumping

T = TypeVar("T")
TOP = namespace_root(1)


class Disk(EmbeddedEngine):
    """Metadata on a disk that may be full."""

    is_full = False

    async def transact(
        self, fn: Callable[[Transaction], T], *, private: int = 0, behind: bool = False
    ) -> T:
        if self.is_full:
            raise NoSpace("the disk is full")
        return await super().transact(fn, private=private, behind=behind)


class Host:
    """A node, as far as it hears of removals; `alive` are the nodes that all see."""

    def __init__(self, root: Path, me: int, hosts: dict[int, "Host"], alive: set[int]) -> None:
        self.me = me
        self.engine = Disk(root)
        self.engine.node = keys.pack_node(me)
        self.engine.transact_now(_make_namespace)
        self.stones = Tombstones(self.engine)
        self._hosts, self._alive = hosts, alive
        self.asks = 0
        self.elsewhere = set[bytes]()
        self.members = NameMembers(me, lambda: [(each, each in alive) for each in hosts])
        self.removals = Removals(
            *(self.engine, me, DirectoryPaths(self.engine), self.stones),
            *(lambda _space, path: path in self.elsewhere, self._tell, self._forget),
        )
        self.outbox = PeerOutbox(self._call, self.members.interval_s, self.hear)
        self.exchange = RemovalExchange(
            *(self.members, self.stones, self._call, self.outbox, self.removals)
        )
        hosts[me] = self

    async def _call(self, node: int, method: str, params: Any, _deadline_s: float) -> Any:
        other = self._hosts[node]
        if node not in self._alive or self.me not in self._alive:
            raise Unavailable("it does not live")
        if method == ASK_REMOVED:
            self.asks += 1
            return await other.exchange.asked(Party("c", self.me, 1, "n"), params)
        await other.hear(params)
        return other.outbox.answer(self.me)

    async def hear(self, news: News) -> None:
        self.exchange.told(news.sums, news.stones)

    def _tell(self, made: Sequence[Tombstone]) -> None:
        self.exchange.tell(made)

    async def _forget(self, changes: Sequence[Change]) -> None:
        pass

    def write(self, name: bytes, top: int = TOP) -> None:
        """Have a file written a second ago: the clock of files' times stands still meanwhile."""
        ino, inode = top + 1 + self.me, new_inode()
        inode.ctime_ns -= 10**9
        inode.flags = Flag.PUBLISHED | Flag.SEALED
        self.engine.transact_now(lambda t: tree.add(t, top, name, ino, inode))

    def rename(self, name: bytes, new: bytes) -> None:
        """Rename the file that it wrote, as its users do."""
        key = keys.inode(TOP + 1 + self.me)

        def fn(t: Transaction) -> Then:
            before = t.get(key)
            rename(t, TOP, name, TOP, new, now=9, keep=lambda _ino: False)
            return self.removals.on_local(t, [LocalChange(key, before, t.get(key))])

        self.engine.transact_now(fn)()

    def has(self, name: bytes, top: int = TOP) -> bool:
        try:
            return self.engine.read_now(lambda t: tree.find(t, top, name)) is not None
        except NotFound:
            return False

    def remove(self, name: bytes, namespace_id: int = 1) -> None:
        """Have a name removed by its users; a copy of it was changed a moment ago."""
        self.exchange.tell(removed(self.engine, self.stones, (namespace_id, name, 5), self.me))


def _make_namespace(t: Transaction) -> None:
    namespaces.format(t, 1, 0, 0)
    namespaces.create(t, b"blocks", kind="cache", coherence="peer", uid=0, gid=0, now=1)
    namespaces.create(t, b"shared", kind="durable", uid=0, gid=0, now=1)


def run(tmp_path: Path, step: Callable[[list[Host], set[int]], Any]) -> None:
    """Three hosts; time passes as they wait."""

    async def main() -> None:
        others: dict[int, Host] = {}
        alive = {1, 2, 3}
        hosts = [Host(tmp_path / str(number), number, others, alive) for number in (1, 2, 3)]
        async with trio.open_nursery() as nursery:
            for host in hosts:
                host.members.look()
                nursery.start_soon(host.outbox.run)
                nursery.start_soon(host.exchange.run)
            await trio.sleep(0.001)
            await step(hosts, alive)
            nursery.cancel_scope.cancel()
        for host in hosts:
            host.engine.close()

    run_jumping(main)


def look(hosts: Sequence[Host]) -> None:
    for host in hosts:
        host.members.look()


def test_a_removal_comes_though_its_node_died_before_the_other_was_back(tmp_path: Path) -> None:
    async def step(hosts: list[Host], alive: set[int]) -> None:
        first, second, third = hosts
        second.write(b"x")
        alive.remove(2)
        look(hosts)
        first.remove(b"x")
        await trio.sleep(1)
        assert third.stones.of(1)
        alive.remove(1)
        alive.add(2)
        look(hosts)
        await trio.sleep(12)
        assert not second.has(b"x")
        assert second.stones.of(1) == first.stones.of(1)

    run(tmp_path, step)


def test_a_removal_that_a_power_cut_took_back_where_it_was_made_is_done_there_again(
    tmp_path: Path,
) -> None:
    async def step(hosts: list[Host], _alive: set[int]) -> None:
        first, second, third = hosts
        first.write(b"x")
        first.remove(b"x")
        first.remove(b"kept")
        await trio.sleep(2)
        first.stones.forget(each for each in first.stones.of(1) if each.path == b"x")
        await trio.sleep(30)
        assert not first.has(b"x")
        assert {each.path for each in Tombstones(first.engine).of(1)} == {b"x", b"kept"}
        asks = [host.asks for host in (first, second, third)]
        await trio.sleep(30)
        assert [host.asks for host in (first, second, third)] == asks

    run(tmp_path, step)


def test_a_node_that_tells_the_same_removals_without_end_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removal_exchange, "_PAGE", 10)
    monkeypatch.setattr(removal_exchange, "MOST", 100)
    asks: list[object] = []

    async def step(hosts: list[Host], alive: set[int]) -> None:
        first, second, third = hosts
        old = msgspec.msgpack.encode(Tombstone(1, b"old", 5, 2))

        async def asked(_peer: Party, params: object) -> list[bytes]:
            asks.append(params)
            await trio.sleep(0.001)
            return [old] * 10

        monkeypatch.setattr(second.exchange, "asked", asked)
        alive.remove(2)
        second.stones.keep(second.stones.take([Tombstone(1, b"x", time.time_ns(), 2)]))
        alive.add(2)
        look([first, second, third])
        await trio.sleep(4)
        assert 11 <= len(asks) <= 22  # both others, once each

    run(tmp_path, step)


def test_a_removal_that_a_full_disk_refused_is_done_later(tmp_path: Path) -> None:
    async def step(hosts: list[Host], _alive: set[int]) -> None:
        first, second, _ = hosts
        second.write(b"x")
        second.engine.is_full = True
        first.remove(b"x")
        await trio.sleep(3)
        assert second.has(b"x")
        second.engine.is_full = False
        await trio.sleep(20)
        assert not second.has(b"x")

    run(tmp_path, step)


def test_a_removal_is_kept_only_after_it_was_done(tmp_path: Path) -> None:
    async def step(hosts: list[Host], _alive: set[int]) -> None:
        first, second, _ = hosts
        second.write(b"x")
        second.engine.is_full = True  # in place of a kill between the two
        first.remove(b"x")
        await trio.sleep(0.5)
        assert not Tombstones(second.engine).of(1)

    run(tmp_path, step)


def test_a_removal_whose_time_is_over_for_one_node_is_not_asked_for(tmp_path: Path) -> None:
    async def step(hosts: list[Host], _alive: set[int]) -> None:
        first, second, _ = hosts
        for number in range(10):
            first.remove(b"%d" % number)
        await trio.sleep(2.75)  # no sum of before is on its way
        asks = second.asks
        day_ns = 24 * 3600 * 10**9
        for host in hosts:  # the clock of the second is some seconds ahead
            ahead_ns = 5 * 10**9 if host is second else -5 * 10**9
            host.stones._cluster_ns = _at(first.stones.of(1)[0].removed_ns + day_ns + ahead_ns)
        second.stones.expire()
        assert not second.stones.of(1)
        assert first.stones.of(1)
        await trio.sleep(30)
        assert second.asks == asks

    run(tmp_path, step)


def test_a_removal_from_elsewhere_touches_no_shared_namespace(tmp_path: Path) -> None:
    async def step(hosts: list[Host], _alive: set[int]) -> None:
        first, second, _ = hosts
        second.write(b"x", namespace_root(2))
        second.write(b"y")
        first.remove(b"x", 2)
        first.remove(b"y")
        await trio.sleep(1)
        assert second.has(b"x", namespace_root(2))
        assert not second.has(b"y")

    run(tmp_path, step)


def test_a_removal_takes_directories_that_were_made_for_the_name(tmp_path: Path) -> None:
    async def step(hosts: list[Host], _alive: set[int]) -> None:
        first, second, _ = hosts
        implied, made = TOP + 21, TOP + 22
        for ino, name, flags in ((implied, b"i", Flag.IMPLIED), (made, b"m", 0)):
            directory = new_inode()
            directory.mode, directory.flags = stat.S_IFDIR | 0o755, flags

            def fn(t: Transaction, ino=ino, name=name, directory=directory) -> None:  # type: ignore[no-untyped-def]
                tree.add(t, TOP, name, ino, directory)

            second.engine.transact_now(fn)
        second.write(b"x", implied)
        first.remove(b"i/x")
        await trio.sleep(1)
        assert not second.has(b"i")
        second.write(b"x", made)
        first.remove(b"m/x")
        await trio.sleep(1)
        assert second.has(b"m")

    run(tmp_path, step)


def test_a_temporary_name_that_nobody_was_told_is_no_removal(tmp_path: Path) -> None:
    async def step(hosts: list[Host], _alive: set[int]) -> None:
        first, second, _ = hosts
        first.write(b"x.tmp")
        first.rename(b"x.tmp", b"x")
        assert not first.stones.of(1)
        first.elsewhere.add(b"x")
        first.rename(b"x", b"y")
        await trio.sleep(1)
        assert [each.path for each in second.stones.of(1)] == [b"x"]

    run(tmp_path, step)


def _at(ns: int) -> Callable[[], int]:
    return lambda: ns


def test_what_the_disk_refuses_counts_and_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = EmbeddedEngine(tmp_path)
    stones = Tombstones(engine)
    stone = Tombstone(1, b"x", time.time_ns(), 2)

    def refuse(*_: object) -> None:
        raise NoSpace("the disk is full")

    with monkeypatch.context() as full:
        full.setattr(engine, "transact_now", refuse)
        stones.keep(stones.take([stone]))
        assert stones.hides(1, b"x", 5)
        with pytest.raises(NoSpace):
            stones.save()
    assert Tombstones(engine).of(2) == []
    stones.save()
    assert Tombstones(engine).of(2) == [stone]
    engine.close()


def _dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _unlink(t: Transaction) -> None:
    tree.unlink(t, *_PLACE, 9, lambda _ino: False)


def _unlink_with_directory(t: Transaction) -> None:
    _unlink(t)
    tree.rmdir(t, TOP, b"d", 9, lambda _ino: False)


def _move(t: Transaction) -> None:
    rename(t, *_PLACE, TOP, b"y", now=9, keep=lambda _ino: False)


_DIRECTORY, _FILE = TOP + 11, TOP + 12
_PLACE = _DIRECTORY, b"x"


@pytest.mark.parametrize("remove", [_unlink, _unlink_with_directory, _move])
@pytest.mark.parametrize("step", ["before", "commit"])
def test_a_kill_leaves_a_removal_and_its_tombstone_or_neither(
    tmp_path: Path, remove: Callable[[Transaction], None], step: str
) -> None:
    def act() -> None:
        """Removes a file, and is killed before, or when, that is committed."""
        local, removals = _opened(tmp_path)

        def on_local(t: Transaction, changes: Sequence[LocalChange]) -> Then:
            removals.on_local(t, changes)
            if step == "before":
                _dies()
            return _dies

        spaces = LocalNamespaces(local, on_local)
        spaces.load()
        assert spaces.has(1)
        spaces.try_commit(remove)

    local, _ = _opened(tmp_path)
    local.transact_now(_make_namespace)
    spaces = LocalNamespaces(local)
    key = keys.namespace(1)
    local.transact_now(lambda t: spaces.note(t, key, t.get(key)))
    local.transact_now(_make_file)
    local.close()
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    local, _ = _opened(tmp_path)
    stones = Tombstones(local)
    is_there = local.read_now(lambda t: t.get(keys.file_entry(*_PLACE))) is not None
    assert (is_there, [each.path for each in stones.of(1)]) == (
        (True, []) if step == "before" else (False, [b"d/x"])
    )
    local.close()


def test_the_path_of_a_directory_whose_commit_fails_is_not_remembered(tmp_path: Path) -> None:
    """Its number is given out again."""
    local, _ = _opened(tmp_path)
    local.transact_now(_make_namespace)
    paths = DirectoryPaths(local)

    def make(t: Transaction, name: bytes) -> None:
        directory = new_inode()
        directory.mode = stat.S_IFDIR | 0o755
        tree.add(t, TOP, name, _DIRECTORY, directory)
        assert paths.of(_DIRECTORY, b"x", t.get) == name + b"/x"
        if name == b"d":
            raise NoSpace("the disk is full")

    with pytest.raises(NoSpace):
        local.transact_now(lambda t: make(t, b"d"))
    local.transact_now(lambda t: make(t, b"e"))
    assert paths.of(_DIRECTORY, b"x") == b"e/x"
    local.close()


def _opened(root: Path) -> tuple[EmbeddedEngine, Removals]:
    local = EmbeddedEngine(root / "meta")
    local.node = keys.pack_node(1)
    paths = DirectoryPaths(local)
    return local, Removals(
        *(local, 1, paths, Tombstones(local), lambda *_: True, lambda _: None, _forget_nothing)
    )


async def _forget_nothing(_changes: Sequence[Change]) -> None:
    pass


def _make_file(t: Transaction) -> None:
    directory, file = new_inode(), new_inode()
    directory.mode = stat.S_IFDIR | 0o755
    file.flags = Flag.PUBLISHED | Flag.SEALED
    tree.add(t, TOP, b"d", _DIRECTORY, directory)
    tree.add(t, *_PLACE, _FILE, file)


def test_a_removal_of_a_path_that_nobody_is_told_of_is_told_to_nobody(tmp_path: Path) -> None:
    """Other nodes refuse it, and with it what comes behind it."""
    local, removals = _opened(tmp_path)
    local.transact_now(_make_namespace)

    def make(t: Transaction) -> None:
        above = TOP
        for each in range(_DIRECTORY, _DIRECTORY + 17):
            directory = new_inode()
            directory.mode = stat.S_IFDIR | 0o755
            tree.add(t, above, b"d" * 250, each, directory)
            above = each
        file = new_inode()
        file.flags = Flag.PUBLISHED | Flag.SEALED
        tree.add(t, above, b"x", _DIRECTORY + 17, file)

    def remove(t: Transaction) -> None:
        key = keys.inode(_DIRECTORY + 17)
        before = t.get(key)
        tree.unlink(t, _DIRECTORY + 16, b"x", 9, lambda _ino: True)
        removals.on_local(t, [LocalChange(key, before, t.get(key))])

    local.transact_now(make)
    local.transact_now(remove)
    assert not len(Tombstones(local))
    local.close()


def test_a_file_written_after_a_removal_says_so_in_its_own_commit(tmp_path: Path) -> None:
    local, removals = _opened(tmp_path)
    local.transact_now(_make_namespace)
    stones = removals._stones
    (stone,) = removed(local, stones, (1, b"d/x", time.time_ns()), 2)

    def fn(t: Transaction) -> None:
        _make_file(t)
        removals.on_local(t, [LocalChange(keys.inode(_FILE), None, t.get(keys.inode(_FILE)))])

    local.transact_now(fn)
    assert Tombstones(local).renews(1, b"d/x") == stone.removed_ns
    local.close()


@pytest.mark.parametrize(
    "change", [_move, lambda t: inodes.set_xattr(t, _FILE, b"user.a", b"1", 0, 9)]
)
def test_a_file_whose_data_are_elsewhere_is_not_changed_here(
    tmp_path: Path, change: Callable[[Transaction], None]
) -> None:
    local, removals = _opened(tmp_path)
    local.transact_now(_make_namespace)
    local.transact_now(_make_file)
    local.transact_now(lambda t: placements.let_go(t, _FILE, t.node))
    key = keys.inode(_FILE)

    def fn(t: Transaction) -> None:
        before = t.get(key)
        change(t)
        removals.on_local(t, [LocalChange(key, before, t.get(key))])

    with pytest.raises(NotHeld):
        local.transact_now(fn)
    local.close()
