"""Which objects of the cold tier count and which are garbage, by transactions."""

import pytest

from kvfs.meta.records import Flag
from kvfs.policy import eviction
from kvfs.tree import lifecycle, tree
from kvfs.tree.copies import cold_copies
from kvfs.tree.copies.cold_copies import Object
from tests.unit.space import Space

CHECKSUM = b"c" * 16


def publish(space: Space, ino: int, *, seal: bytes | None = CHECKSUM) -> None:
    """A file was closed, and sealed where there is a checksum."""
    closed = space.do(
        lambda t: lifecycle.publish(t, ino, size=9, blocks=8, mtime_ns=20, ctime_ns=20, boot=0)
    )
    if seal is not None:
        content = {"version": closed.version, "size": 9, "blocks": 8}
        times = {"mtime_ns": 20, "ctime_ns": 20}
        assert space.do(lambda t: lifecycle.seal(t, ino, closed, checksum=seal, **content, **times))


@pytest.fixture
def space() -> Space:
    return Space()


@pytest.fixture
def kept(space: Space) -> Object:
    """A sealed file that the tier has."""
    ino = space.add(space.root, b"file")
    publish(space, ino)
    wanted = Object(ino, 0, CHECKSUM)
    assert space.do(lambda t: cold_copies.begin(t, wanted))
    assert garbage(space) == []
    assert space.do(lambda t: cold_copies.finish(t, wanted))
    return wanted


def garbage(space: Space) -> list[Object]:
    return space.do(lambda t: cold_copies.garbage(t, b"", 100))[0]


def test_what_was_sent_is_there_and_takes_no_space_when_released(
    space: Space, kept: Object
) -> None:
    assert space.do(lambda t: cold_copies.there(t, [kept])) == [kept]
    assert space.do(lambda t: cold_copies.release(t, kept))
    inode = space.inode(kept.ino)
    assert (inode.blocks, inode.size, inode.nlink) == (0, 9, 1)
    assert space.do(lambda t: lifecycle.brought(t, kept.ino, 0, 8))
    assert space.inode(kept.ino).blocks == 8
    assert garbage(space) == []


@pytest.mark.parametrize("change", ["written", "opened for writing", "removed"])
def test_an_object_of_old_content_is_garbage(space: Space, kept: Object, change: str) -> None:
    if change == "written":
        publish(space, kept.ino, seal=b"d" * 16)
    elif change == "opened for writing":
        space.do(lambda t: lifecycle.reopen(t, kept.ino))
    else:
        space.do(lambda t: tree.unlink(t, space.root, b"file", 30, lambda _: True))
        space.do(lambda t: tree.reap(t, kept.ino))
    assert garbage(space) == [kept]
    assert not space.do(lambda t: cold_copies.release(t, kept))
    space.do(lambda t: cold_copies.collected(t, [kept]))
    assert garbage(space) == []


def test_the_same_content_waits_until_its_garbage_was_collected(space: Space, kept: Object) -> None:
    space.do(lambda t: lifecycle.reopen(t, kept.ino))
    publish(space, kept.ino)
    assert not space.do(lambda t: cold_copies.begin(t, kept))
    space.do(lambda t: cold_copies.collected(t, [kept]))
    assert space.do(lambda t: cold_copies.begin(t, kept))
    assert space.do(lambda t: cold_copies.finish(t, kept))
    assert garbage(space) == []


def test_what_changed_while_it_was_sent_is_garbage(space: Space) -> None:
    ino = space.add(space.root, b"file")
    publish(space, ino)
    wanted = Object(ino, 0, CHECKSUM)
    assert space.do(lambda t: cold_copies.begin(t, wanted))
    publish(space, ino, seal=b"d" * 16)
    assert not space.do(lambda t: cold_copies.finish(t, wanted))
    assert garbage(space) == [wanted]
    assert not space.inode(ino).flags & Flag.COLD


def test_what_a_killed_process_was_sending_is_garbage(space: Space) -> None:
    sent = []
    for number in range(5):
        ino = space.add(space.root, b"file%d" % number)
        publish(space, ino)
        sent.append(Object(ino, 0, CHECKSUM))
        assert space.do(lambda t: cold_copies.begin(t, sent[-1]))
    left, after = space.do(lambda t: cold_copies.uploads(t, b"", 2))
    space.do(lambda t: cold_copies.abandon(t, left))
    while after:
        left, after = space.do(lambda t: cold_copies.uploads(t, after, 2))  # noqa: B023
        space.do(lambda t: cold_copies.abandon(t, left))  # noqa: B023
    assert garbage(space) == sent


def test_only_what_is_sealed_and_on_disk_is_sent(space: Space) -> None:
    ino = space.add(space.root, b"file")
    publish(space, ino, seal=None)
    assert cold_copies.object_of(ino, space.inode(ino)) is None
    assert not space.do(lambda t: cold_copies.begin(t, Object(ino, 0, b"")))


def test_an_eviction_waits_while_half_of_the_headroom_is_free() -> None:
    capacity = 1 << 30  # a quarter of it is headroom
    assert eviction.may_wait_for_cold_tier(capacity * 7 // 8, capacity)
    assert not eviction.may_wait_for_cold_tier(capacity * 7 // 8 + 1, capacity)
