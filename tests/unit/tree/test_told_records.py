"""What nodes tell of the records that they had of one namespace: whoever tells first, the same
files are there afterwards, and each name has the file that was written last."""

import random
import stat
from itertools import permutations
from typing import Final, NamedTuple

import pytest

from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag, Inode, namespace_root, pack, unpack_inode
from kvfs.tree import namespaces
from kvfs.tree.copies import held_names, placements, told_records
from kvfs.tree.copies.told_records import OwnRecord
from tests.contract.bringers import Shared
from tests.contract.memory_engine import MemoryEngine

NS: Final = 1
TOP: Final = namespace_root(NS)
NODES: Final = (1, 2, 3)
PATHS: Final = (b"a", b"b", b"d/a", b"d/e/a")


class Had(NamedTuple):
    """What a node has of a file."""

    ino: int
    inode: Inode
    path: bytes | None
    is_removed: bool

    @property
    def is_live(self) -> bool:
        return self.path is not None and not self.is_removed


World = dict[int, list[Had]]


def _inode(ctime_ns: int, mtime_ns: int, name: bytes) -> Inode:
    return Inode(
        mode=stat.S_IFREG | 0o644,
        uid=0,
        gid=0,
        nlink=1,
        blocks=8,
        atime_ns=0,
        mtime_ns=mtime_ns,
        ctime_ns=ctime_ns,
        parent=TOP,
        name=name,
        flags=Flag.PUBLISHED | Flag.SEALED,
        checksum=b"%d" % mtime_ns,
    )


def _directory(name: bytes) -> Inode:
    inode = _inode(1, 1, name)
    inode.mode, inode.blocks, inode.checksum = stat.S_IFDIR | 0o755, 0, b""
    inode.flags = Flag.PUBLISHED | Flag.IMPLIED
    return inode


def _world(chance: random.Random) -> World:
    """Files of which nodes have copies, some of which were written, renamed or removed since."""
    world: World = {node: [] for node in NODES}
    times = iter(chance.sample(range(1_000), 200))
    for ino in range(TOP + 1, TOP + 9):
        made, path = next(times), chance.choice(PATHS)
        first = Had(ino, _inode(made, made, path.rpartition(b"/")[2]), path, is_removed=False)
        for node in NODES:
            what = chance.random()
            had = first
            if what < 0.4:
                continue
            if what < 0.6:  # written, renamed or both
                path = chance.choice(PATHS)
                written = next(times) if chance.random() < 0.5 else made
                changed = 1_000 + next(times)
                inode = _inode(changed, written, path.rpartition(b"/")[2])
                had = Had(ino, inode, path, is_removed=False)
            elif what < 0.7:
                had = had._replace(is_removed=True)
            elif what < 0.75:
                had = had._replace(path=None)
            world[node].append(had)
    return world


def _told(had: Had) -> OwnRecord:
    attributes = [(b"user.m", had.inode.checksum)]
    return OwnRecord(had.ino, pack(had.inode), had.path, attributes, None, is_directory=False)


def _directories(node: int, world: World) -> dict[bytes, OwnRecord]:
    found: dict[bytes, OwnRecord] = {}
    for had in world[node]:
        parts = (had.path or b"").split(b"/")[:-1] if had.is_live else []
        for depth in range(1, len(parts) + 1):
            path = b"/".join(parts[:depth])
            number = TOP + 100 * node + len(path)
            packed = pack(_directory(parts[depth - 1]))
            found[path] = OwnRecord(number, packed, path, [], None, is_directory=True)
    return found


def _run(world: World, records: tuple[int, ...], names: tuple[int, ...]) -> MemoryEngine:
    """Has all nodes tell, in these orders, one of them twice."""
    common = MemoryEngine()
    seats = {node: Shared(common, node) for node in NODES}

    def make(t: Transaction) -> None:
        namespaces.format(t, 1, 0, 0)
        namespaces.create(t, b"ns", kind="cache", uid=0, gid=0, now=1)

    seats[1].transact_now(make)
    for node in (*records, records[0]):

        def tell(t: Transaction, node: int = node) -> None:
            numbers = told_records.tell_directories(t, NS, _directories(node, world))
            for had in world[node]:
                own = _told(had)
                told_records.tell(t, own, numbers, is_removed=had.is_removed)

        seats[node].transact_now(tell)
    for node in (*names, names[0]):

        def name(t: Transaction, node: int = node) -> None:
            for had in world[node]:
                told_records.tell_name(t, _told(had), 5_000)

        seats[node].transact_now(name)
    return common


Names = dict[bytes, tuple[int, bytes, bytes, list[int]]]
"""Number, checksum, attribute and holders, by path."""


def _found(common: MemoryEngine) -> Names:
    found: Names = {}

    def fn(t: Transaction) -> None:
        for path in PATHS:
            ino = held_names.named(t, NS, path)
            if ino:
                inode = unpack_inode(t.get(keys.inode(ino)) or b"")
                attribute = t.get(keys.xattr(ino, b"user.m")) or b""
                nodes = [keys.unpack_node(each.node) for each in placements.holders(t, ino)]
                found[path] = ino, inode.checksum, attribute, nodes

    common.read_now(fn)
    return found


def _expected(world: World) -> Names:
    """What the rules say, by looking at everything at once."""
    latest: dict[int, Had] = {}
    for had in (had for node in NODES for had in world[node]):
        other = latest.get(had.ino)
        if other is None or _order(had) > _order(other):
            latest[had.ino] = had
    named: dict[bytes, Had] = {}
    for had in latest.values():
        if had.is_live:
            assert had.path is not None
            there = named.get(had.path)
            if there is None or _written(had) > _written(there):
                named[had.path] = had
    return {
        path: (
            had.ino,
            had.inode.checksum,
            had.inode.checksum,
            [n for n in NODES for e in world[n] if (e.ino, e.inode.checksum) == _content(had)],
        )
        for path, had in named.items()
    }


def _order(had: Had) -> tuple[bool, int]:
    return had.is_live, had.inode.ctime_ns


def _written(had: Had) -> tuple[int, int, int]:
    return had.inode.mtime_ns, had.inode.ctime_ns, had.ino


def _content(had: Had) -> tuple[int, bytes]:
    return had.ino, had.inode.checksum


@pytest.mark.parametrize("seed", range(20))
def test_the_order_in_which_nodes_tell_does_not_matter(seed: int) -> None:
    chance = random.Random(seed)
    world = _world(chance)
    expected = _expected(world)
    for records in permutations(NODES):
        names = tuple(chance.sample(NODES, len(NODES)))
        common = _run(world, records, names)
        assert _found(common) == expected
        usage = common.read_now(lambda t: namespaces.usage(t, NS))
        inodes = _inodes(common)
        assert usage.inodes == len(inodes)
        assert usage.bytes == sum(each.blocks for each in inodes) * 512


def _inodes(common: MemoryEngine) -> list[Inode]:
    prefix = keys.INODE + keys.pack_u16(NS)
    found = common.read_now(lambda t: list(t.scan(prefix, keys.after(prefix))))
    return [unpack_inode(value) for key, value in found if key != keys.inode(TOP)]
