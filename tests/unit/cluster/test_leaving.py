"""What a removed node leaves in the metadata goes, and nothing of anybody else's."""

import stat

from kvfs.cluster import decommission
from kvfs.meta import delegations, keys
from kvfs.meta.records import Inode, namespace_root
from kvfs.tree import lifecycle, namespaces, reserved_inodes, tree
from kvfs.tree.copies import placements
from tests.contract.memory_engine import MemorySnapshot, MemoryTransaction

A, B = keys.pack_node(1), keys.pack_node(2)
CACHE, DURABLE = b"cache", b"models"


class Metadata:
    """What several nodes change, one after the other."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        t = self.on(A)
        namespaces.format(t, 1, 0, 0)
        self.roots = {
            name: namespace_root(namespaces.create(t, name, kind=kind, uid=0, gid=0, now=1))
            for name, kind in ((CACHE, "cache"), (DURABLE, "durable"))
        }
        self.commit(t)

    def on(self, node: bytes) -> MemoryTransaction:
        t = MemoryTransaction(MemorySnapshot(self.values), writable=True)
        t.node = node
        return t

    def commit(self, t: MemoryTransaction) -> None:
        for key, value in t.writes.items():
            if value is None:
                self.values.pop(key, None)
            else:
                self.values[key] = value

    def make(
        self, where: bytes, name: bytes, node: bytes, *also: bytes, closed: bool = True
    ) -> int:
        """A file made on one node; others fetched it."""
        t = self.on(node)
        ino = namespaces.allocate_inodes(t, self.roots[where] >> 48, 1)
        mode = stat.S_IFREG | 0o644
        inode = Inode(
            mode=mode, uid=0, gid=0, nlink=1, parent=0, name=b"", atime_ns=5, mtime_ns=5, ctime_ns=5
        )
        tree.add(t, self.roots[where], name, ino, inode)
        if closed:
            lifecycle.publish(t, ino, size=9, blocks=8, mtime_ns=6, ctime_ns=6, boot=0)
        self.commit(t)
        for other in also:
            t = self.on(other)
            placements.hold(t, ino, 0)
            self.commit(t)
        return ino

    def exists(self, ino: int) -> bool:
        return keys.inode(ino) in self.values

    def remove(self, node: bytes) -> tuple[list[int], int]:
        """Have all go that a node left: what was evicted, how many were lost."""
        evicted, lost = [], 0
        while any(left := decommission.list_left(self.on(A), node, 2)):
            t = self.on(A)
            gone = decommission.let_go(t, node, left, now=9)
            self.commit(t)
            evicted += [each.ino for each in gone.evicted]
            lost += gone.lost
        return evicted, lost


def test_a_cache_file_goes_with_its_only_holder_and_a_durable_one_stays() -> None:
    cluster = Metadata()
    caches = [cluster.make(CACHE, b"c%d" % n, B) for n in range(5)]
    durable = cluster.make(DURABLE, b"d", B)
    assert decommission.alone(cluster.on(A), B, 0, 100)[0] == [durable]
    evicted, lost = cluster.remove(B)
    assert (sorted(evicted), lost) == (caches, 1)
    assert not any(cluster.exists(ino) for ino in caches)
    assert cluster.exists(durable)
    assert not [key for key in cluster.values if key[:1] in b"ph"]


def test_what_others_have_as_well_stays_theirs() -> None:
    cluster = Metadata()
    inos = [cluster.make(where, b"x", B, A) for where in (CACHE, DURABLE)]
    assert decommission.alone(cluster.on(A), B, 0, 100)[0] == []
    assert cluster.remove(B) == ([], 0)
    t = cluster.on(A)
    for ino in inos:
        assert [each.node for each in placements.holders(t, ino)] == [A]
    assert lifecycle.unsealed(t, 0, 10) == inos


def test_what_others_do_meanwhile_is_left_alone() -> None:
    cluster = Metadata()
    mine = cluster.make(CACHE, b"mine", A)
    unclosed = cluster.make(CACHE, b"unclosed", A, closed=False)
    before = dict(cluster.values)
    assert cluster.remove(B) == ([], 0)
    assert cluster.values == before
    assert cluster.exists(mine)
    assert cluster.exists(unclosed)


def test_what_it_was_making_goes() -> None:
    cluster = Metadata()
    unclosed = cluster.make(DURABLE, b"unclosed", B, closed=False)
    t = cluster.on(B)
    reserved_inodes.reserve(t, cluster.roots[CACHE] >> 48, 3)
    cluster.commit(t)
    assert cluster.remove(B) == ([unclosed], 0)
    assert not cluster.exists(unclosed)
    assert not [key for key in cluster.values if key[:1] in b"uwrpho"]


def test_an_orphan_that_it_held_last_goes() -> None:
    cluster = Metadata()
    ino = cluster.make(DURABLE, b"x", B)
    t = cluster.on(A)
    tree.unlink(t, cluster.roots[DURABLE], b"x", 9, lambda _: False)
    cluster.commit(t)
    assert decommission.alone(cluster.on(A), B, 0, 100)[0] == []
    assert cluster.remove(B) == ([], 0)
    assert not cluster.exists(ino)


def test_it_stops_where_another_took_a_file_over_meanwhile() -> None:
    cluster = Metadata()
    ino = cluster.make(CACHE, b"x", B)
    left = decommission.list_left(cluster.on(A), B, 10)
    t = cluster.on(A)
    lifecycle.publish(t, ino, size=7, blocks=8, mtime_ns=8, ctime_ns=8, boot=0)
    cluster.commit(t)
    t = cluster.on(A)
    assert decommission.let_go(t, B, left, now=9) == ([], 0)
    cluster.commit(t)
    assert [each.node for each in placements.holders(cluster.on(A), ino)] == [A]
    assert lifecycle.unsealed(cluster.on(A), 0, 10) == [ino]


def test_its_delegations_go_and_nobody_elses() -> None:
    cluster = Metadata()
    numbers = [root >> 48 for root in cluster.roots.values()]
    for node in (A, B):
        t = cluster.on(node)
        for namespace_id in numbers:
            delegations.take(t, namespace_id)
        cluster.commit(t)
    cluster.remove(B)
    assert delegations.of_node(cluster.on(A), B) == []
    assert delegations.of_node(cluster.on(A), A) == sorted(numbers)
