"""What may use the space that is kept for times without any."""

import pytest

from kvfs.meta.lmdb.growth import Growth
from kvfs.meta.lmdb.reserve import permitted, wanted_bytes

ADDS, CHANGES, REMOVES = Growth(1, 100), Growth(0, 20), Growth(-1, 23)


@pytest.mark.parametrize(
    ("left", "allowed"),
    [
        (0.9, {ADDS, CHANGES, REMOVES}),
        (0.7, {CHANGES, REMOVES}),
        (0.4, {REMOVES}),
        (0.0, {REMOVES}),
    ],
)
def test_the_less_is_left_the_fewer_may_use_it(left: float, allowed: set[Growth]) -> None:
    assert {each for each in (ADDS, CHANGES, REMOVES) if permitted(each, left)} == allowed


def test_a_long_attribute_adds_and_a_shorter_record_removes() -> None:
    assert not permitted(Growth(0, 4096), 0.6)
    assert permitted(Growth(0, -1), 0.1)


@pytest.mark.parametrize("disk", [1 << 20, 128 << 20, 1 << 30, 1 << 40])
def test_the_reserve_is_a_small_part_of_any_disk(disk: int) -> None:
    assert 0 < wanted_bytes(disk) <= max(disk // 16, 16 << 20)
    assert wanted_bytes(disk) <= 16 << 20
    assert wanted_bytes(disk) <= wanted_bytes(disk, is_replica=True) <= min(disk // 16, 64 << 20)
