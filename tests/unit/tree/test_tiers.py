"""What tiers may be named, where new files go, and when a place is full."""

import pytest

from kvfs.base.errors import Invalid, NotSupported
from kvfs.base.media import Place, parse_shared, parse_tier
from kvfs.meta.records import Namespace
from kvfs.policy.tier_choice import TierRoom, targets
from kvfs.tree import namespace_policies

GIB = 1 << 30
RAM = Place("ram", "/ram", GIB)
DISK = Place("ssd", "/disk", 8 * GIB)
SHARED = Place("shared:flash", "/flash")


def test_a_tier_is_written_as_it_is_shown() -> None:
    assert parse_tier("ram=/dev/shm/kvfs:4GiB") == Place("ram", "/dev/shm/kvfs", 4 * GIB)
    assert str(parse_tier("ssd=/a:b/c:1.5T")) == "ssd=/a:b/c:1536GiB"
    assert str(parse_shared("flash=/mnt/x=y")) == "flash=/mnt/x=y"
    assert parse_shared("flash=/mnt/flash").medium == "shared:flash"


@pytest.mark.parametrize(
    "text", ["", "ram", "ram=/x", "ram=x:1GiB", "tape=/x:1GiB", "ram=/x:0", "ram=/x:much"]
)
def test_what_is_no_tier_is_refused(text: str) -> None:
    with pytest.raises(Invalid):
        parse_tier(text)


@pytest.mark.parametrize("text", ["", "x", "x=y", "=/x", "a/b=/x"])
def test_what_is_no_shared_store_is_refused(text: str) -> None:
    with pytest.raises(Invalid):
        parse_shared(text)


@pytest.mark.parametrize(
    ("kind", "media"),
    [
        ("durable", ["ram", "ssd"]),
        ("cache", ["ram"]),
        ("cache", ["ssd", "ram"]),
        ("cache", ["shared:x", "ssd"]),
    ],
)
def test_media_that_cannot_be_kept_to_are_refused(kind: str, media: list[str]) -> None:
    record = Namespace(name=b"x")
    with pytest.raises(NotSupported):
        namespace_policies.change(record, {"kind": kind, "media": media}, in_cluster=False)


def test_new_files_go_to_the_first_medium_that_has_room() -> None:
    media = {1: ["ram", "ssd"], 2: ["ssd"], 3: [], 4: ["shared:flash"]}
    roomy = [TierRoom(RAM, 0, GIB), TierRoom(DISK, 0, 8 * GIB), TierRoom(SHARED, 0, GIB)]
    assert targets(media, roomy, own_free=GIB) == {1: "/ram", 2: "/disk", 3: "/disk", 4: "/flash"}
    full = [TierRoom(RAM, GIB * 9 // 10, GIB), TierRoom(DISK, 0, 8 * GIB)]
    assert targets(media, full, own_free=GIB) == {1: "/disk", 2: "/disk", 3: "/disk"}
    assert targets(media, full, own_free=9 * GIB) == {}
    assert targets(media, [], own_free=0) == {}


def test_a_place_is_relieved_before_it_is_full() -> None:
    assert TierRoom(RAM, GIB // 2, GIB).excess == 0
    assert TierRoom(RAM, GIB * 7 // 8, GIB).excess > GIB // 8
    assert not TierRoom(RAM, GIB * 7 // 8, GIB).takes_files
