"""Who has a file's data, in the transactions that change it."""

import stat

from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag, Inode, namespace_root, unpack_usage
from kvfs.tree import lifecycle, namespaces, tree
from kvfs.tree.copies import placements
from kvfs.tree.inodes import AttributeChanges, read_inode, set_attributes
from tests.contract.memory_engine import MemorySnapshot, MemoryTransaction

A, B = keys.pack_node(1), keys.pack_node(2)


class Cluster:
    """Metadata that several nodes change, one after the other."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        t = self.on(A)
        namespaces.format(t, 1, 0, 0)
        self.root = namespace_root(
            namespaces.create(t, b"cache", kind="cache", uid=0, gid=0, now=1)
        )
        self.done(t)

    def on(self, node: bytes) -> MemoryTransaction:
        t = MemoryTransaction(MemorySnapshot(self.values), writable=True)
        t.node = node
        return t

    def done(self, t: MemoryTransaction) -> None:
        for key, value in t.writes.items():
            if value is None:
                self.values.pop(key, None)
            else:
                self.values[key] = value

    def make(self, name: bytes, node: bytes, now: int = 5) -> int:
        t = self.on(node)
        ino = namespaces.allocate_inodes(t, self.root >> 48, 1)
        inode = Inode(
            mode=stat.S_IFREG | 0o644,
            uid=0,
            gid=0,
            nlink=1,
            atime_ns=now,
            mtime_ns=now,
            ctime_ns=now,
            parent=0,
            name=b"",
        )
        tree.add(t, self.root, name, ino, inode)
        publish(t, ino, 10)
        self.done(t)
        return ino

    def hold(self, ino: int, node: bytes) -> None:
        t = self.on(node)
        placements.hold(t, ino, 0)
        self.done(t)


def publish(t: Transaction, ino: int, size: int) -> None:
    lifecycle.publish(t, ino, size=size, blocks=8, mtime_ns=6, ctime_ns=6, boot=0)


def nodes(t: Transaction, ino: int) -> list[bytes]:
    return [each.node for each in placements.holders(t, ino)]


def test_who_makes_a_file_holds_it_and_marks_it_as_its_own() -> None:
    cluster = Cluster()
    ino = cluster.make(b"x", A)
    t = cluster.on(A)
    assert nodes(t, ino) == [A]
    assert placements.held_by(t, A, 0, 10) == [ino]
    assert lifecycle.unsealed(t, 0, 10) == [ino]
    assert lifecycle.unsealed(cluster.on(B), 0, 10) == []


def test_new_content_is_held_by_its_writer_alone() -> None:
    cluster = Cluster()
    ino = cluster.make(b"x", A)
    cluster.hold(ino, B)
    assert nodes(cluster.on(A), ino) == [A, B]
    t = cluster.on(B)
    lifecycle.reopen(t, ino)
    publish(t, ino, 20)
    cluster.done(t)
    t = cluster.on(A)
    assert nodes(t, ino) == [B]
    assert placements.held_by(t, A, 0, 10) == []


def test_an_orphan_is_reaped_with_its_last_holder() -> None:
    cluster = Cluster()
    ino = cluster.make(b"x", A)
    cluster.hold(ino, B)
    t = cluster.on(B)
    assert not tree.unlink(t, cluster.root, b"x", 9, lambda _: False).dropped
    cluster.done(t)
    t = cluster.on(B)
    tree.reap(t, ino)
    cluster.done(t)
    assert keys.inode(ino) in cluster.values
    t = cluster.on(A)
    tree.reap(t, ino)
    cluster.done(t)
    left = [key for key in cluster.values if key.endswith(keys.pack_u64(ino))]
    assert left == []
    assert not [key for key in cluster.values if key[:1] in b"ph"]


def test_names_in_one_directory_come_and_go_without_its_record() -> None:
    cluster = Cluster()
    before = cluster.values[keys.inode(cluster.root)]
    cluster.make(b"x", A, now=50)
    cluster.make(b"y", B, now=40)
    assert cluster.values[keys.inode(cluster.root)] == before
    found = read_inode(cluster.on(A), cluster.root)
    assert (found.mtime_ns, found.ctime_ns) == (50, 50)


def test_a_directorys_time_can_be_set_to_an_earlier_one() -> None:
    cluster = Cluster()
    cluster.make(b"x", A, now=50)
    t = cluster.on(A)
    set_attributes(t, cluster.root, AttributeChanges(mtime_ns=7), 60)
    cluster.done(t)
    found = read_inode(cluster.on(B), cluster.root)
    assert (found.mtime_ns, found.ctime_ns) == (7, 60)


def test_usage_counts_what_all_nodes_make_once() -> None:
    cluster = Cluster()
    ino = cluster.make(b"x", A)
    cluster.hold(ino, B)
    cluster.make(b"y", B)
    usage = unpack_usage(cluster.values[keys.usage(cluster.root >> 48)])
    assert (usage.inodes, usage.bytes) == (2, 2 * 8 * 512)


def test_a_lone_node_records_no_placement() -> None:
    cluster = Cluster()
    ino = cluster.make(b"x", b"")
    assert nodes(cluster.on(b""), ino) == []
    assert not [key for key in cluster.values if key[:1] in b"phm"]
    assert cluster.values[keys.unsealed(ino)] == b""
    assert read_inode(cluster.on(b""), ino).flags & Flag.PUBLISHED


def test_a_data_file_is_here_with_its_placement_and_its_name() -> None:
    cluster = Cluster()
    ino = cluster.make(b"x", A)

    def here(node: bytes) -> bool:
        return placements.read_here(cluster.on(node), [ino]) != [None]

    assert (here(A), here(B)) == (True, False)
    cluster.hold(ino, B)
    assert (here(A), here(B)) == (True, True)
    t = cluster.on(B)
    lifecycle.publish(t, ino, size=3, blocks=8, mtime_ns=7, ctime_ns=7, boot=0, version=1)
    cluster.done(t)
    assert (here(A), here(B)) == (False, True)
    t = cluster.on(B)
    assert lifecycle.evict(t, ino, 8) is not None
    cluster.done(t)
    assert (here(A), here(B)) == (False, False)
