"""Room and limits as a client sees them: those of the export's namespace."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.waiting import wait_until
from tests.nfs import ganesha
from tests.nfs.door import Door
from tests.nfs.node.test_door import EVERY, Side
from tests.nfs.status import NfsError
from tests.nfs.v4_attributes import (
    QUOTA_AVAIL_HARD,
    QUOTA_USED,
    SPACE_AVAIL,
    SPACE_FREE,
    SPACE_TOTAL,
    SPACE_USED,
    SUPPORTED,
)

LACKING = ganesha.why_not()
pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING)
MIB = 1 << 20
CAPACITY = 4 * MIB


@pytest.fixture
def small(plain_door: Door) -> Path:
    """A durable namespace of so many bytes."""
    return plain_door.node.mount / "small"


@pytest.fixture(params=EVERY)
def side(request: pytest.FixtureRequest, plain_door: Door, small: Path) -> Side:
    home = small / request.param
    home.mkdir(exist_ok=True)
    home.chmod(0o777)
    return Side(plain_door, request.param, home, "small")


def total_and_free(side: Side) -> tuple[int, int]:
    if hasattr(side.client, "minor"):
        told: Any = side.client.getattr(side.home, (SPACE_TOTAL, SPACE_AVAIL, SPACE_FREE))
        assert told[SPACE_AVAIL] <= told[SPACE_FREE]
        return told[SPACE_TOTAL], told[SPACE_AVAIL]
    space = side.client.fsstat(side.home)
    assert space.available_bytes <= space.free_bytes
    return space.total_bytes, space.available_bytes


def test_a_client_sees_the_namespaces_space(side: Side, small: Path) -> None:
    there = os.statvfs(small)
    total, free = total_and_free(side)
    assert total == CAPACITY == there.f_blocks * there.f_frsize
    assert free == there.f_bavail * there.f_frsize
    side.make("half", bytes(CAPACITY // 2))
    wait_until(
        lambda: total_and_free(side)[1] <= free - CAPACITY // 2, "what was written is counted"
    )
    side.client.remove(side.home, "half")
    wait_until(lambda: total_and_free(side)[1] == free, "what was removed is not counted")


def test_a_full_namespace_takes_no_more_and_says_why(side: Side, small: Path) -> None:
    def fill() -> None:
        for number in range(3 * CAPACITY // MIB):
            side.make(f"f{number}", b"x" * MIB)

    with pytest.raises(NfsError, match="NOSPC"):
        fill()
    kept = [each for each in small.rglob("*") if each.is_file() and each.stat().st_size == MIB]
    assert kept
    assert all(each.read_bytes() == b"x" * MIB for each in kept)
    for each in small.rglob("*"):
        if each.is_file():
            side.client.remove(side.home, each.name)

    def has_room() -> bool:
        try:
            side.make("after", b"x")
        except NfsError as error:
            assert "NOSPC" in error.name, error
            return False
        return True

    wait_until(has_room, "there is room again")
    assert (small / side.home_name / "after").read_bytes() == b"x"
    side.client.remove(side.home, "after")


def test_what_a_file_takes_is_told(side: Side, small: Path) -> None:
    handle = side.make("sized", bytes(100_000))
    used = (small / side.home_name / "sized").stat().st_blocks * 512
    told = side.client.getattr(handle)
    assert (told[SPACE_USED] if hasattr(side.client, "minor") else told.used) == used
    side.client.remove(side.home, "sized")


@pytest.mark.parametrize("version", ["v40", "v41"])
def test_version_4_has_no_quota_attributes_and_says_so(plain_door: Door, version: str) -> None:
    """A capacity is of the namespace, not of a user: it is told as space."""
    client = getattr(plain_door, version)()
    supported = client.getattr(client.walk("small"), (SUPPORTED,))[SUPPORTED]
    assert {SPACE_TOTAL.number, SPACE_AVAIL.number, SPACE_FREE.number} <= set(supported)
    told = client.getattr(client.walk("small"), (QUOTA_AVAIL_HARD, QUOTA_USED))
    assert QUOTA_AVAIL_HARD not in told
    assert QUOTA_USED not in told


def test_version_3_tells_its_limits(plain_door: Door) -> None:
    client, root = plain_door.v3(), plain_door.mounts().mount("/small").handle
    limits, names = client.fsinfo(root), client.pathconf(root)
    assert min(limits.read_max, limits.write_max) >= MIB
    assert limits.largest_file >= 1 << 60
    assert (names.no_trunc, names.case_insensitive, names.case_preserving) == (True, False, True)
