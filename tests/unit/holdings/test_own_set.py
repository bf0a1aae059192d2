"""The own set: what it holds, what it tells others, and when its file is believed."""

import errno
import os
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfs.holdings import own_counts
from kvfs.holdings.fingerprints import BITS, RANGES, sums_by_range, total
from kvfs.holdings.own_set import OwnSet
from kvfs.holdings.own_set_file import MOST_INTENTS
from kvfs.holdings.row_address import SLOTS
from tests.unit.holdings.claim_model import u64

STORE, BOOT = 0xFEDCBA9876543210, 5
RING = 2 * MOST_INTENTS


def open_set(path: Path, store: int = STORE, boot: int = BOOT) -> OwnSet:
    return OwnSet.open(path, store, boot, RING)


def filled(path: Path, *fingerprints: int) -> OwnSet:
    own = open_set(path)
    own.add(u64(fingerprints))
    own.mark_filled()
    return own


def members(own: OwnSet) -> set[int]:
    return {each for range_ in range(RANGES) for each in own.fingerprints(range_).tolist()}


def assert_has(own: OwnSet, expected: set[int]) -> None:
    assert members(own) == expected
    assert len(own) == len(expected)
    assert (own.checksums() == sums_by_range(u64(expected))).all()
    assert own.digest() == total(sums_by_range(u64(expected)))


def follow(own: OwnSet, held: set[int], sequence: int, most: int = MOST_INTENTS) -> int:
    """Applies what is told after `sequence`; returns the last number."""
    while sequence < own.sequence:
        deltas = own.deltas_since(sequence, most)
        assert deltas is not None
        assert deltas.first == sequence + 1
        held |= set(deltas.added.tolist())
        held -= set(deltas.removed.tolist())
        sequence = deltas.last
    return sequence


FEW = [number << 16 | 7 for number in range(1, 80)] + list(range(5))
changes = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "remove", "ensure", "reopen"]),
        st.lists(st.sampled_from(FEW), max_size=90),
    ),
    max_size=12,
)


@given(changes, st.integers(1, 50))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_others_that_follow_the_changes_hold_the_same(
    tmp_path: Path, steps: list[tuple[str, list[int]]], most: int
) -> None:
    path = tmp_path / "own"
    path.unlink(missing_ok=True)
    own, names = filled(path), Counter[int]()
    followed: set[int] = set()
    sequence = 0
    for verb, some in steps:
        if verb == "add":
            own.add(u64(some))
            names.update(some)
        elif verb == "remove":
            own.remove(u64(some))
            names = +Counter({each: names[each] - some.count(each) for each in names})
        elif verb == "ensure":
            own.ensure(u64(some))
            names.update({each: 1 for each in set(some) if not names[each]})
        else:
            own = open_set(path)
            assert own.is_filled, own.reason
        sequence = follow(own, followed, sequence, most)
        assert followed == set(names)
    assert own.holds(u64(FEW)).tolist() == [each in names for each in FEW]
    assert_has(own, set(names))


def test_it_grows_and_keeps_all(tmp_path: Path) -> None:
    own = filled(tmp_path / "own")
    some = np.unique(np.random.default_rng(1).integers(0, 1 << BITS, 300_000, dtype=np.uint64))
    for start in range(0, len(some), 1000):
        own.add(some[start : start + 1000])
    own.remove(some[::3])
    left = np.delete(some, np.s_[::3])
    assert own.holds(some).tolist() == [bool(at % 3) for at in range(len(some))]
    again = open_set(tmp_path / "own")
    for each in (own, again):
        assert len(each) == len(left)
        assert (each.checksums() == sums_by_range(left)).all()
    assert (tmp_path / "own").stat().st_size < 40 * len(some)
    assert own.refused == 0
    os.truncate(tmp_path / "own", (tmp_path / "own").stat().st_size // 2)
    assert "fewer rows" in open_set(tmp_path / "own").reason


def test_two_names_of_one_fingerprint_are_told_once(tmp_path: Path) -> None:
    own = filled(tmp_path / "own")
    own.add(u64([5, 5]))
    assert own.sequence == 1
    own.remove(u64([5]))
    assert own.sequence == 1
    own.remove(u64([5, 5, 6]))
    assert (own.sequence, own.missing) == (2, 2)
    assert_has(own, set())


def test_a_batch_of_changes_is_told_as_its_net_effect(tmp_path: Path) -> None:
    own = filled(tmp_path / "own", 1)
    own.add(u64([2, 3]))
    own.remove(u64([2]))
    own.add(u64([4]))
    deltas = own.deltas_since(1)
    assert deltas is not None
    assert (deltas.first, deltas.last, deltas.digest) == (2, 5, own.digest())
    assert (deltas.added.tolist(), deltas.removed.tolist()) == ([3, 4], [2])
    part = own.deltas_since(1, most=2)
    assert part is not None
    assert (part.last, part.digest) == (3, None)
    nothing = own.deltas_since(own.sequence)
    assert nothing is not None
    assert (nothing.first, nothing.last) == (6, 5)


def test_changes_that_the_ring_has_lost_are_not_told(tmp_path: Path) -> None:
    own = filled(tmp_path / "own", *range(1, RING + 10))
    oldest = own.sequence - (RING - MOST_INTENTS)
    assert own.deltas_since(oldest) is not None
    for number in (oldest - 1, own.sequence + 1, -1):
        assert own.deltas_since(number) is None


def test_a_killed_node_goes_on_where_it_was(tmp_path: Path) -> None:
    own = filled(tmp_path / "own", 1, 2)
    again = open_set(tmp_path / "own")
    assert (again.is_filled, again.reason) == (True, "")
    assert (again.epoch, again.sequence) == (own.epoch, 2)
    assert_has(again, {1, 2})


def test_a_closed_set_counts_after_another_boot_and_only_once(tmp_path: Path) -> None:
    path = tmp_path / "own"
    own = filled(path, 1, 2)
    own.close()
    again = open_set(path, boot=BOOT + 1)
    assert (again.is_filled, again.epoch, again.sequence) == (True, own.epoch, 2)
    assert_has(again, {1, 2})
    assert open_set(path, boot=BOOT + 1).is_filled
    third = open_set(path, boot=BOOT + 2)
    assert "went away" in third.reason
    assert (third.is_filled, len(third), third.sequence) == (False, 0, 0)
    assert third.epoch > own.epoch


def test_a_later_life_has_a_later_epoch_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = filled(tmp_path / "own", 1)
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    assert open_set(tmp_path / "own", boot=BOOT + 1).epoch == own.epoch + 1


@pytest.mark.parametrize(
    ("at", "reason"),
    [
        (9, "header"),
        (60, "header"),
        (513, "word 0"),
        (521, "word 1"),
        (529, "word 2"),
    ],
)
def test_damage_begins_a_new_set(tmp_path: Path, at: int, reason: str) -> None:
    path = tmp_path / "own"
    filled(path, 1, 2)
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes((byte[0] ^ 1,)))
    own = open_set(path)
    assert reason in own.reason
    assert not own.is_filled
    assert_has(own, set())
    own.add(u64([3]))
    own.mark_filled()
    assert_has(open_set(path), {3})


def test_a_file_that_is_no_set_begins_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "own"
    for content in (b"", b"x" * 100, bytes(1 << 20), os.urandom(1 << 20)):
        path.write_bytes(content)
        assert not open_set(path).is_filled
    filled(path, 1)
    os.truncate(path, path.stat().st_size - 4096)
    assert "short" in open_set(path).reason
    filled(path, 1)
    assert "another store" in open_set(path, store=STORE + 1).reason
    filled(path, 1)
    assert "another version" in OwnSet.open(path, STORE, BOOT, RING - 512).reason


def test_damaged_content_of_a_closed_set_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "own"
    own = filled(path, 1, 2)
    own.close()
    content = bytearray(path.read_bytes())
    slot = content.rindex((2 << 16 | 1).to_bytes(8, "little"))
    content[slot + 3] ^= 1
    path.write_bytes(content)
    assert "content" in open_set(path).reason


def test_a_set_that_was_not_filled_begins_anew(tmp_path: Path) -> None:
    own = open_set(tmp_path / "own")
    own.add(u64([1]))
    assert "filled" in open_set(tmp_path / "own").reason


def test_a_set_that_is_doubted_goes_on_and_grows_until_the_next_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "own"
    own = filled(path, 1, 2)
    own.doubt()
    assert own.is_filled
    many = np.unique(np.random.default_rng(1).integers(3, 1 << BITS, 100_000, dtype=np.uint64))
    for start in range(0, len(many), 1000):
        own.add(many[start : start + 1000])
    assert own.growth_failures == own.refused == 0
    assert len(own) == len(many) + 2
    own.mark_filled()
    own.close()
    again = open_set(path)
    assert not again.is_filled
    assert "had not been filled" in again.reason
    assert_has(again, set())
    assert again.epoch > own.epoch


def test_a_full_disk_leaves_out_what_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "own"
    own = filled(path)
    allocate = os.posix_fallocate

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    monkeypatch.setattr(own_counts, "MOST_SPILLED", 100)
    some = u64(number << 16 | 7 for number in range(1, SLOTS + 111))
    own.add(some)
    assert own.refused == 10
    assert len(own) == SLOTS + 100
    followed: set[int] = set()
    follow(own, followed, 0)
    assert_has(own, followed)
    assert not own.is_filled
    many = np.random.default_rng(1).integers(0, 1 << BITS, 60_000, dtype=np.uint64)
    own.add(many)
    assert own.growth_failures > 0
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    grown = path.stat().st_size
    own.add(u64([12345]))
    assert path.stat().st_size > grown
    assert own.holds(u64([12345])).all()
