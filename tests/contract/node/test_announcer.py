"""What a node announces of the names that it holds, as its records change."""

import math
import random
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvfs.holdings.fingerprints import Fingerprinter, derive_seed
from kvfs.holdings.own_set import OwnSet
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.lmdb.lmdb_transactions import WriteTransaction
from kvfs.meta.records import Flag, namespace_root, unpack_inode
from kvfs.meta.replica.local_transaction import LocalChange, LocalSpaces, LocalTransaction
from kvfs.node.names.announcer import Announcer
from kvfs.node.names.directory_paths import DirectoryPaths
from kvfs.tree import lifecycle, namespaces, rename, tree
from kvfs.tree.copies import placements
from tests.contract.small_node import new_inode

TOP = namespace_root(1)
INO = TOP + 7
MOST_DELAY_S = 1.0


class Host:
    def __init__(self, root: Path) -> None:
        self.engine = EmbeddedEngine(root / "meta")
        self.engine.node = keys.pack_node(1)
        self.engine.transact_now(_make_namespace)
        self.own = OwnSet.open(root / "names", 1, 1)
        self.fingerprinter = Fingerprinter(derive_seed(b"cluster"), keys.pack_u16(1))
        self.announcer = Announcer(
            *(self.engine, DirectoryPaths(self.engine), self.own),
            *(lambda _space: self.fingerprinter, lambda: None, lambda: MOST_DELAY_S),
        )

    def write(self, name: bytes, now_ns: int = 1, ino: int = INO) -> None:
        """Make a file that is published here, of which the announcer hears."""
        self.engine.transact_now(lambda t: _write(t, name, ino, now_ns))
        record = self.engine.read_now(lambda t: t.get(keys.inode(ino)))
        self.announcer.on_local([LocalChange(keys.inode(ino), None, record)])

    def announces(self, name: bytes) -> bool:
        self.announcer.flush()
        return self.tells(name)

    def rename(self, new: bytes, now_ns: int = 9, ino: int = INO) -> None:
        before = self.engine.read_now(lambda t: t.get(keys.inode(ino)))
        old = unpack_inode(before or b"").name
        self.engine.transact_now(
            lambda t: rename.rename(t, TOP, old, TOP, new, now=now_ns, keep=lambda _ino: True)
        )
        after = self.engine.read_now(lambda t: t.get(keys.inode(ino)))
        self.announcer.on_local([LocalChange(keys.inode(ino), before, after)])

    def commit(self, fn: Callable[[Transaction], object]) -> None:
        """Run a transaction of keys of this node's own, of which the announcer hears."""
        spaces = LocalSpaces()
        spaces.add(keys.pack_u16(1))
        changes: list[LocalChange] = []

        def body(t: WriteTransaction) -> None:
            local = LocalTransaction(t, spaces)
            fn(local)
            changes.extend(local.changes)

        self.engine.transact_now(body)
        self.announcer.on_local(changes)

    def held(self, t: Transaction) -> set[bytes]:
        """The names of the files here that are published, and whose data are here."""
        entries = t.scan(keys.entries(TOP), keys.after(keys.entries(TOP)))
        found = {key[9:]: keys.unpack_u64(ino) for key, ino in entries}
        return {
            name
            for name, ino in found.items()
            if tree.read_inode(t, ino).flags & Flag.PUBLISHED
            and t.get(keys.placement(ino, t.node)) is not None
        }

    def tells(self, name: bytes) -> bool:
        return bool(self.own.holds(np.array([self.fingerprinter.of(name)], np.uint64))[0])


def _make_namespace(t: Transaction) -> None:
    namespaces.format(t, 1, 0, 0)
    namespaces.create(t, b"blocks", kind="cache", coherence="peer", uid=0, gid=0, now=1)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    host.own.close()
    host.engine.close()


def test_a_name_that_came_while_another_node_was_denied_it_stays_announced(host: Host) -> None:
    host.write(b"block")
    host.announcer.denied(1, b"block")
    assert host.announces(b"block")


def test_a_name_that_went_unheard_is_taken_back_once_it_is_denied(host: Host) -> None:
    host.own.mark_filled()
    host.write(b"block")
    assert not host.announcer.may_be_announced(1, b"block")
    assert host.announces(b"block")
    assert host.announcer.may_be_announced(1, b"block")
    host.engine.transact_now(lambda t: tree.unlink(t, TOP, b"block", 9, lambda _ino: False))
    assert host.announces(b"block")  # a kill came before it heard of that
    host.announcer.denied(1, b"block")
    assert not host.announces(b"block")


class Clock:
    """The time, of which the announcer and the records of files hear."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.s = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.s)

    @property
    def ns(self) -> int:
        return round(self.s * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_where_names_are_final_they_are_told_at_once(host: Host, clock: Clock) -> None:
    assert host.announcer.due_s() == math.inf
    host.write(b"block", clock.ns)
    assert host.announcer.due_s() == 0
    host.announcer.flush_due()
    assert host.tells(b"block")
    assert not host.announcer.waiting


@pytest.mark.parametrize(("lives_s", "first"), [(0.001, 1), (0.04, 1), (0.35, 4)])
def test_temporary_names_are_told_to_nobody(
    host: Host, clock: Clock, lives_s: float, first: int
) -> None:
    """But for the first: by those it learns for how long they live."""
    for number in range(20):
        name, ino = b"%d" % number, INO + number
        host.write(name + b".tmp", clock.ns, ino)
        for _ in range(4):
            clock.s += lives_s / 4
            host.announcer.flush_due()
        was_told = host.announcer.may_be_announced(1, name + b".tmp")
        assert was_told == host.tells(name + b".tmp") == (number < first)
        host.rename(name, clock.ns, ino)
        clock.s += 1.5 * lives_s
    while host.announcer.waiting:
        clock.s += max(host.announcer.due_s(), 0.0001)
        host.announcer.flush_due()
    assert host.tells(b"19")
    assert not host.tells(b"19.tmp")
    assert not host.tells(b"0.tmp")


def test_a_name_is_told_within_the_time_that_the_cluster_leaves(host: Host, clock: Clock) -> None:
    for number in range(20):
        host.write(b"%d.tmp" % number, clock.ns, INO + number)
        clock.s += 5
        host.rename(b"%d" % number, clock.ns, INO + number)
    clock.s += MOST_DELAY_S - 0.001
    host.announcer.flush_due()
    assert not host.tells(b"19")
    clock.s += 0.002
    host.announcer.flush_due()
    assert host.tells(b"19")


def test_a_file_that_takes_the_name_of_another_had_a_temporary_one(
    host: Host, clock: Clock
) -> None:
    host.write(b"block", clock.ns)
    host.announcer.flush_due()
    clock.s += 0.1
    host.commit(lambda t: _write(t, b"tmp", INO + 1, clock.ns))
    clock.s += 0.1
    host.commit(
        lambda t: rename.rename(
            *(t, TOP, b"tmp", TOP, b"block"), now=clock.ns, keep=lambda _ino: True
        )
    )
    assert host.tells(b"block")
    host.commit(lambda t: _write(t, b"next", INO + 2, clock.ns))
    assert host.announcer.due_s() == pytest.approx(0.05)


def test_a_file_that_gets_another_name_long_after_keeps_no_name_back(
    host: Host, clock: Clock
) -> None:
    host.write(b"old", clock.ns)
    clock.s += 3600
    host.rename(b"new", clock.ns)
    assert host.announcer.due_s() == 0


def test_where_temporary_names_come_no_more_names_are_told_at_once(
    host: Host, clock: Clock
) -> None:
    host.write(b"block.tmp", clock.ns)
    clock.s += 0.2
    host.rename(b"block", clock.ns)
    assert host.announcer.due_s() == pytest.approx(0.05)
    clock.s += 11
    host.write(b"direct", clock.ns, INO + 1)
    assert host.announcer.due_s() == 0


def test_a_name_that_was_listed_elsewhere_is_announced(host: Host, clock: Clock) -> None:
    host.write(b"first.tmp", clock.ns)
    clock.s += 0.1
    host.rename(b"first", clock.ns)
    host.write(b"listed.tmp", clock.ns, INO + 1)
    assert not host.announcer.may_be_announced(1, b"listed.tmp")
    host.announcer.told(1, [b"other", b"listed.tmp"])
    assert host.announcer.may_be_announced(1, b"listed.tmp")
    assert host.tells(b"listed.tmp")
    assert not host.tells(b"first")


NAMES = [b"%c" % letter for letter in b"abcdefgh"]


@pytest.mark.parametrize("seed", range(4))
def test_what_is_announced_is_what_is_held_whatever_a_commit_changes_together(
    host: Host, seed: int
) -> None:
    chance, inos = random.Random(seed), iter(range(INO, INO + 1_000))

    def step(t: Transaction) -> None:
        name, other = chance.choice(NAMES), chance.choice(NAMES)
        found = tree.find(t, TOP, name)
        if found is None:
            ino = next(inos)
            tree.add(t, TOP, name, ino, new_inode())
            if chance.random() < 0.5:
                _publish(t, ino)
            return
        match chance.randrange(5):
            case 0:
                _publish(t, found[0])
            case 1:
                rename.rename(t, TOP, name, TOP, other, now=9, keep=lambda _ino: True)
            case 2:
                tree.unlink(t, TOP, name, 9, lambda _ino: True)
            case 3:
                placements.let_go(t, found[0], t.node)
            case 4:
                placements.hold(t, found[0], found[1].version)

    for _ in range(300):
        count = 1 if chance.random() < 0.7 else 2  # alone, or with others
        host.commit(lambda t, count=count: [step(t) for _ in range(count)])
        if chance.random() < 0.2:
            host.announcer.flush()
            told = {name for name in NAMES if host.tells(name)}
            assert told == host.engine.read_now(host.held)


def test_a_directory_is_announced_with_its_first_file_until_it_is_removed(host: Host) -> None:
    directory, removed = TOP + 900, new_inode()
    removed.mode = stat.S_IFDIR | 0o755

    def fill(t: Transaction) -> None:
        tree.add(t, directory, b"block", INO, new_inode())
        _publish(t, INO)

    host.commit(lambda t: tree.add(t, TOP, b"directory", directory, removed))
    assert not host.announces(b"directory")
    host.commit(fill)
    assert host.announces(b"directory")
    assert host.tells(b"directory/block")
    host.commit(lambda t: tree.unlink(t, directory, b"block", 9, lambda _ino: False))
    assert host.announces(b"directory")
    host.commit(lambda t: tree.rmdir(t, TOP, b"directory", 9, lambda _ino: False))
    assert not host.announces(b"directory")


def _publish(t: Transaction, ino: int) -> None:
    lifecycle.publish(t, ino, size=1, blocks=8, mtime_ns=9, ctime_ns=9, boot=0)


def _write(t: Transaction, name: bytes, ino: int, now_ns: int) -> None:
    inode = new_inode()
    inode.flags, inode.ctime_ns = Flag.PUBLISHED | Flag.SEALED, now_ns
    tree.add(t, TOP, name, ino, inode)
