"""From made to published to sealed and back; eviction; attributes; namespaces and their books."""

import stat

import pytest

from kvfs.base.errors import (
    Corrupt,
    Exists,
    Invalid,
    NoAttribute,
    NoSpace,
    NotEmpty,
    NotFound,
    NotSupported,
    Stale,
    TooLarge,
)
from kvfs.meta import keys
from kvfs.meta.records import ROOT_INODE, Flag, Inode, namespace_of, namespace_root
from kvfs.tree import inodes, lifecycle, namespaces, tree
from tests.contract.memory_engine import MemoryEngine
from tests.unit.space import BOOT, Space


@pytest.fixture
def space() -> Space:
    return Space()


def publish(space: Space, ino: int, *, blocks: int = 8, now: int = 20, boot: int = BOOT) -> Inode:
    return space.do(
        lambda t: lifecycle.publish(
            t, ino, size=blocks * 500, blocks=blocks, mtime_ns=now, ctime_ns=now, boot=boot
        )
    )


def seal(space: Space, ino: int, *, mtime: int = 20, blocks: int = 8) -> bool:
    return space.do(
        lambda t: lifecycle.seal(
            t,
            ino,
            tree.read_inode(t, ino),
            version=0,
            size=blocks * 500,
            blocks=blocks,
            mtime_ns=mtime,
            ctime_ns=mtime,
            checksum=b"sum",
        )
    )


def lists(space: Space) -> tuple[list[int], list[int]]:
    return space.do(lambda t: (lifecycle.unpublished(t, 0, 9), lifecycle.unsealed(t, 0, 9)))


def used(space: Space) -> tuple[int, int]:
    usage = space.do(lambda t: namespaces.usage(t, space.id))
    return usage.bytes, usage.inodes


def test_a_life(space: Space) -> None:
    ino = space.add(space.root, b"f")
    assert lists(space) == ([ino], [ino])
    assert not seal(space, ino)
    inode = publish(space, ino)
    assert inode.flags == Flag.PUBLISHED
    assert (inode.size, inode.blocks, inode.boot) == (4000, 8, BOOT)
    assert lists(space) == ([], [ino])
    assert seal(space, ino)
    inode = space.inode(ino)
    assert inode.flags == Flag.PUBLISHED | Flag.SEALED
    assert (inode.checksum, inode.boot) == (b"sum", 0)
    assert lists(space) == ([], [])
    inode = space.do(lambda t: lifecycle.reopen(t, ino))
    assert (inode.flags, inode.checksum) == (Flag.PUBLISHED, b"")
    assert lists(space) == ([], [ino])


def test_a_file_synced_once_is_never_dropped_after_a_power_cut(space: Space) -> None:
    ino = space.add(space.root, b"f")
    assert publish(space, ino, boot=0).boot == 0
    assert publish(space, ino, boot=BOOT, now=30).boot == 0


def test_a_seal_of_an_earlier_version_without_sync_settles_nothing(space: Space) -> None:
    ino = space.add(space.root, b"f")
    sealed = publish(space, ino)
    sealed.flags |= Flag.SEALED
    space.do(lambda t: inodes.write_inode(t, ino, sealed))
    assert not space.do(lambda t: lifecycle.is_settled(t, ino, space.inode(ino)))
    assert seal(space, ino)
    assert space.do(lambda t: lifecycle.is_settled(t, ino, space.inode(ino)))
    assert lists(space) == ([], [])


def test_a_seal_of_what_has_changed_is_refused(space: Space) -> None:
    ino = space.add(space.root, b"f")
    publish(space, ino)
    publish(space, ino, now=21)
    assert not seal(space, ino)
    assert not seal(space, ino, mtime=21, blocks=9)
    assert seal(space, ino, mtime=21)


def test_a_chmod_does_not_undo_a_seal(space: Space) -> None:
    ino = space.add(space.root, b"f")
    publish(space, ino)
    space.do(lambda t: inodes.set_attributes(t, ino, inodes.AttributeChanges(mode=0o600), 99))
    assert seal(space, ino)
    assert space.inode(ino).ctime_ns == 99


def test_usage_follows_the_blocks(space: Space) -> None:
    ino = space.add(space.root, b"f")
    assert used(space) == (0, 1)
    publish(space, ino, blocks=8)
    assert used(space) == (8 * 512, 1)
    publish(space, ino, blocks=2)
    assert used(space) == (2 * 512, 1)
    space.do(lambda t: inodes.set_attributes(t, ino, inodes.AttributeChanges(size=0, blocks=0), 30))
    assert used(space) == (0, 1)
    publish(space, ino, blocks=4)
    space.do(lambda t: tree.unlink(t, space.root, b"f", 40, space.keep))
    assert used(space) == (0, 0)


def test_eviction_removes_every_name_and_keeps_the_record(space: Space) -> None:
    top = space.directory(space.root, b"d")
    ino = space.add(space.root, b"a")
    space.do(lambda t: tree.link(t, ino, top, b"b", 20))
    publish(space, ino)
    evicted = space.do(lambda t: lifecycle.evict(t, ino, 60))
    assert evicted is not None
    assert sorted(evicted.names) == sorted([(space.root, b"a"), (top, b"b")])
    assert space.names(space.root) == [b"d"]
    assert space.inode(space.root).mtime_ns == space.inode(top).mtime_ns == 60
    assert used(space) == (8 * 512, 2)
    assert space.do(lambda t: lifecycle.evict(t, ino, 61)) is None
    space.do(lambda t: tree.reap(t, ino))
    assert used(space) == (0, 1)
    assert space.do(lambda t: lifecycle.evict(t, ino, 62)) is None


def test_attributes_change_what_is_named_and_ctime(space: Space) -> None:
    ino = space.add(space.root, b"f")
    inode = space.do(
        lambda t: inodes.set_attributes(
            t, ino, inodes.AttributeChanges(mode=0o4711, uid=5, mtime_ns=1), 70
        )
    )
    assert inode.mode == stat.S_IFREG | 0o4711
    assert (inode.uid, inode.gid, inode.atime_ns, inode.mtime_ns) == (5, 0, 10, 1)
    assert inode.ctime_ns == 70
    with pytest.raises(Stale):
        space.do(lambda t: inodes.set_attributes(t, ino + 1, inodes.AttributeChanges(), 70))


@pytest.mark.parametrize(
    ("before", "after"),
    [(0o6755, 0o755), (0o6744, 0o2744), (0o4644, 0o644), (0o2755, 0o755), (0o1777, 0o1777)],
)
def test_set_id_bits_go_with_a_change(before: int, after: int) -> None:
    assert inodes.without_set_ids(stat.S_IFREG | before) == stat.S_IFREG | after
    assert inodes.without_set_ids(stat.S_IFDIR | before) == stat.S_IFDIR | before


def test_extended_attributes(space: Space) -> None:
    ino = space.add(space.root, b"f")

    def put(name: bytes, value: bytes, flags: int = 0, now: int = 80) -> None:
        space.do(lambda t: inodes.set_xattr(t, ino, name, value, flags, now))

    def value(name: bytes) -> bytes:
        return space.do(lambda t: inodes.get_xattr(t, ino, name))

    put(b"user.b", b"2", inodes.XATTR_CREATE)
    put(b"user.a", b"")
    assert space.inode(ino).ctime_ns == 80
    assert (value(b"user.a"), value(b"user.b")) == (b"", b"2")
    assert space.do(lambda t: inodes.list_xattrs(t, ino)) == [b"user.a", b"user.b"]
    put(b"user.b", b"3", inodes.XATTR_REPLACE)
    with pytest.raises(Exists):
        put(b"user.b", b"", inodes.XATTR_CREATE)
    with pytest.raises(NoAttribute):
        put(b"user.c", b"", inodes.XATTR_REPLACE)
    with pytest.raises(Invalid):
        put(b"user.c", b"", 4)
    space.do(lambda t: inodes.remove_xattr(t, ino, b"user.b", 90))
    assert space.inode(ino).ctime_ns == 90
    with pytest.raises(NoAttribute):
        value(b"user.b")
    with pytest.raises(NoAttribute):
        space.do(lambda t: inodes.remove_xattr(t, ino, b"user.b", 91))


def test_extended_attributes_have_limits(space: Space) -> None:
    ino = space.add(space.root, b"f")

    def put(name: bytes, value: bytes) -> None:
        space.do(lambda t: inodes.set_xattr(t, ino, name, value, 0, 80))

    put(b"n" * 255, bytes(65_536 - 256))
    with pytest.raises(NoSpace):
        put(b"user.a", b"")
    put(b"n" * 255, bytes(65_536 - 256))
    put(b"n" * 255, b"")
    for name in (b"", b"n" * 256):
        with pytest.raises(TooLarge):
            put(name, b"")
    with pytest.raises(TooLarge):
        put(b"user.a", bytes(65_537))
    with pytest.raises(NoSpace):
        for number in range(300):
            put(b"%0255d" % number, b"")
    listed = space.do(lambda t: inodes.list_xattrs(t, ino))
    assert sum(len(name) + 1 for name in listed) == 65_536
    # An older version took more: it can be read, shortened and removed.
    space.do(lambda t: t.put(keys.xattr(ino, b"user.old"), bytes(65_536)))
    put(b"user.old", bytes(60_000))
    with pytest.raises(NoSpace):
        put(b"user.old", bytes(60_001))
    space.do(lambda t: inodes.remove_xattr(t, ino, b"user.old", 90))


def test_a_namespace_has_a_policy(space: Space) -> None:
    space.do(lambda t: namespaces.set_policy(t, space.id, now=0, kind="durable", capacity=1 << 30))
    namespace = space.do(lambda t: namespaces.get(t, space.id))
    assert (namespace.kind, namespace.capacity, namespace.eviction) == ("durable", 1 << 30, "lru")
    for wrong in ({"kind": "odd"}, {"capacity": -1}, {"eviction": "arc"}):
        with pytest.raises(Invalid):
            space.do(lambda t, wrong=wrong: namespaces.set_policy(t, space.id, now=0, **wrong))
    with pytest.raises(NotFound):
        space.do(lambda t: namespaces.set_policy(t, 999, now=0, capacity=1))
    with pytest.raises(Exists):
        space.do(lambda t: namespaces.create(t, b"cache", uid=0, gid=0, now=3))


def test_a_namespace_is_removed_when_it_is_empty(space: Space) -> None:
    space.add(space.root, b"f")
    with pytest.raises(NotEmpty):
        space.do(lambda t: namespaces.remove(t, b"cache", 20))
    space.do(lambda t: tree.unlink(t, space.root, b"f", 20, space.keep))
    space.do(lambda t: namespaces.remove(t, b"cache", 30))
    assert space.do(namespaces.list_all) == []
    assert space.inode(ROOT_INODE).nlink == 2
    with pytest.raises(NotFound):
        space.do(lambda t: namespaces.remove(t, b"cache", 31))
    again = space.do(lambda t: namespaces.create(t, b"cache", uid=0, gid=0, now=40))
    assert again != space.id


def test_an_orphan_outlives_its_namespace(space: Space) -> None:
    ino = space.add(space.root, b"f")
    space.held.add(ino)
    space.do(lambda t: tree.unlink(t, space.root, b"f", 20, space.keep))
    space.do(lambda t: tree.rmdir(t, ROOT_INODE, b"cache", 30, space.keep))
    publish(space, ino)
    space.do(lambda t: tree.reap(t, ino))
    with pytest.raises(Stale):
        space.inode(ino)


def test_inode_numbers_are_never_given_out_twice(space: Space) -> None:
    first = space.do(lambda t: namespaces.allocate_inodes(t, space.id, 100))
    second = space.do(lambda t: namespaces.allocate_inodes(t, space.id, 1))
    assert first > space.root
    assert second == first + 100
    assert namespace_of(first) == namespace_of(second) == space.id
    with pytest.raises(NotFound):
        space.do(lambda t: namespaces.allocate_inodes(t, 0, 1))
    with pytest.raises(NoSpace):
        space.do(lambda t: namespaces.allocate_inodes(t, space.id, 1 << 48))


def test_namespace_ids_run_out_with_an_error(space: Space) -> None:
    space.do(lambda t: t.put(keys.counter(0), keys.pack_u64(65_535)))
    last = space.do(lambda t: namespaces.create(t, b"last", uid=0, gid=0, now=3))
    assert namespace_of(namespace_root(last)) == last == 65_535
    with pytest.raises(NoSpace):
        space.do(lambda t: namespaces.create(t, b"one more", uid=0, gid=0, now=3))


def test_the_schema_is_checked() -> None:
    engine = MemoryEngine()
    with pytest.raises(Corrupt):
        engine.read_now(namespaces.check_format)
    engine.transact_now(lambda t: namespaces.format(t, 1, 0, 0))
    engine.transact_now(lambda t: namespaces.format(t, 2, 0, 0))
    engine.read_now(namespaces.check_format)
    assert engine.read_now(lambda t: tree.read_inode(t, ROOT_INODE)).mtime_ns == 1
    engine.transact_now(lambda t: t.put(keys.VERSION, b"3"))
    with pytest.raises(NotSupported, match="schema 3"):
        engine.read_now(namespaces.check_format)
