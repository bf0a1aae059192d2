"""The holder table against sets by node, full rows and popular names included."""

import errno
import mmap
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.base.errors import Invalid, NoSpace
from kvfs.holdings import holder_numbers
from kvfs.holdings.fingerprints import BITS, NONE, RANGES
from kvfs.holdings.holder_numbers import HolderNumbers
from kvfs.holdings.holder_rows import ROW_BYTES
from kvfs.holdings.holder_table import HolderTable
from kvfs.holdings.row_address import SLOTS
from kvfs.holdings.spilled_claims import SpilledClaims
from tests.unit.holdings.claim_model import ClaimModel, add_to_all, u64

SMALL = 0
"""A limit of which the least rows are made."""
ROW = 7


def in_row(count: int, row: int = ROW) -> list[int]:
    """Fingerprints of one row of a table that has not grown."""
    return [(number + 1) << 16 | row for number in range(count)]


FEW = in_row(70) + in_row(3, row=RANGES + ROW) + in_row(3, row=1)
changes = st.tuples(
    st.sampled_from(["add", "remove", "drop", "step", "replace", "many"]),
    st.integers(1, 12),
    st.lists(st.sampled_from(FEW), max_size=80),
)


def test_ends_of_two_names_that_look_like_a_third_are_not_one() -> None:
    table = HolderTable(SMALL)
    tags = np.array([0x11223344, 0x55667788], np.uint32)
    table.apply(1, u64([int(tag) << 16 | ROW for tag in tags]), NONE)
    between = int.from_bytes(tags.tobytes()[2:6], sys.byteorder)
    assert table.holders_of(between << 16 | ROW) == []
    assert table.holders_of(int(tags[1]) << 16 | ROW) == [1]


def change(table: HolderTable, model: ClaimModel, verb: str, node: int, some: list[int]) -> None:
    """Does the same to both."""
    if verb == "add":
        table.apply(node, u64(some), NONE)
        model.apply(node, some, ())
    elif verb == "remove":
        table.apply(node, NONE, u64(some))
        model.apply(node, (), some)
    elif verb == "drop":
        table.drop_node(node)
        model.claims.pop(node, None)
    elif verb == "step":
        table.step()
    else:
        assert verb == "replace"
        own = {each for each in some if each % RANGES == ROW}
        table.replace_range(node, ROW, u64(own))
        former = {each for each in model.claims[node] if each % RANGES == ROW}
        model.apply(node, own, former - own)


@given(st.lists(changes, max_size=20))
def test_any_changes_leave_what_sets_would_hold(steps: list[tuple[str, int, list[int]]]) -> None:
    table, model = HolderTable(SMALL), ClaimModel()
    for verb, node, some in steps:
        if verb == "many":
            add_to_all(table, (node, node + 1), sorted(some))
            model.apply(node, some, ())
            model.apply(node + 1, some, ())
        else:
            change(table, model, verb, node, some)
    model.assert_same(table, FEW)


def test_growth_keeps_every_claim_and_makes_few_false_ones() -> None:
    table = HolderTable()
    rng = np.random.default_rng(1)
    batches = [rng.integers(0, 1 << BITS, 50_000, dtype=np.uint64) for _ in range(64)]
    empty = table.size_bytes
    crowded = u64(in_row(200))
    for number, batch in enumerate(batches):
        table.apply(number % 5 + 1, batch, NONE)
        if number == 10:
            table.apply(9, crowded, NONE)
    while table.step():
        pass
    assert table.size_bytes > 1.9 * empty
    assert table.size_bytes / table.counters.claims < 17
    for number, batch in enumerate(batches):
        found = table.probe(batch[:500])
        assert len(found) == 500
        assert all(number % 5 + 1 in nodes for nodes in found.values())
    assert table.probe(crowded) == {position: [9] for position in range(200)}
    assert table.fingerprints_of(9, ROW).tolist() == sorted(crowded.tolist())
    own = np.concatenate(batches[0::5])
    ranged = np.unique(own[own % np.uint64(RANGES) == 3])
    assert table.fingerprints_of(1, 3).tolist() == ranged.tolist()
    # 3.2 million claims of 2**48 fingerprints: 1 in 88 million names is claimed by mistake.
    assert table.probe(rng.integers(0, 1 << BITS, 200_000, dtype=np.uint64)) == {}


def test_claims_that_are_there_or_not_there_are_counted() -> None:
    table = HolderTable(SMALL)
    some = u64(in_row(100))
    table.apply(1, some, NONE)
    table.apply(1, np.concatenate((some, some)), NONE)
    assert table.counters.duplicates == 200
    table.apply(2, NONE, some)
    assert table.counters.missing == 100
    table.apply(1, NONE, np.concatenate((some, some)))
    assert table.counters.missing == 200
    assert (table.counters.claims, table.spilled, table.digest(1)) == (0, 0, 0)
    assert table.load == 0


def test_a_popular_name_leaves_room_for_others_and_names_different_holders() -> None:
    tables = [HolderTable(SMALL, salt=salt) for salt in (0xABCDEF123457, 0x123456789ABD)]
    popular = in_row(1)[0]
    for table in tables:
        add_to_all(table, range(1, 1001), [popular])
        assert table.spilled == 1000 - 8
        assert table.count(1000) == 1
        assert len(set(table.holders_of(popular, most=2000))) == 1000
        table.apply(5000, u64(in_row(SLOTS - 8 + 1)[1:]), NONE)
        assert table.spilled == 1000 - 8
    first, second = (table.holders_of(popular, most=8) for table in tables)
    assert len(set(first)) == len(set(second)) == 8
    assert not set(first) & set(second)


def test_many_nodes_that_tell_the_same_names_together_are_all_kept() -> None:
    table, model = HolderTable(SMALL), ClaimModel()
    some = [number << 16 | number for number in range(30)] + in_row(5)
    for first in (1, 81):  # the second time they begin with names that are beside their rows
        nodes = range(first, first + 100)
        add_to_all(table, nodes, some)
        for node in nodes:
            model.apply(node, some, ())
    assert table.counters.duplicates == 20 * len(some)
    model.assert_same(table, some)


def test_the_ninth_holder_of_a_name_takes_no_slot() -> None:
    table = HolderTable(SMALL)
    some = u64(in_row(3))
    for node in range(1, 21):
        table.apply(node, some, NONE)
    assert table.spilled == 3 * 12
    assert {tuple(sorted(nodes)) for nodes in table.probe(some, 99).values()} == {
        tuple(range(1, 21))
    }


def test_a_dropped_node_is_gone_at_once_and_may_return_before_its_slots_are_free() -> None:
    table = HolderTable(SMALL)
    some = u64(in_row(100))
    table.apply(1, some, NONE)
    table.apply(2, some, NONE)
    table.drop_node(1)
    assert table.count(1) == 0
    assert table.counters.claims == 100
    assert set(map(tuple, table.probe(some).values())) == {(2,)}
    table.apply(1, some[:50], NONE)
    while table.step():
        pass
    assert table.count(1) == 50
    assert table.fingerprints_of(1, ROW).tolist() == some[:50].tolist()
    assert [1 in nodes for nodes in table.probe(some).values()] == [True] * 50 + [False] * 50
    table.drop_node(77)
    assert not table.step()


def test_slots_of_dropped_nodes_are_used_again() -> None:
    table = HolderTable(SMALL)
    some = u64(in_row(SLOTS))
    for node in range(1, 50):
        table.apply(node, some, NONE)
        table.drop_node(node)
        while table.step():
            pass
        assert table.load == 0
    table.apply(100, NONE, some)
    assert table.digest(100) == 0
    table.apply(100, some, NONE)
    assert table.spilled == 0
    assert table.nodes() == [100]


def test_claims_beside_a_row_are_counted_until_they_are_taken() -> None:
    spilled = SpilledClaims()
    for fingerprint in (1, 2):
        for holder in (3, 4):
            spilled.add(ROW, fingerprint, holder)
    spilled.remove_holders(ROW, 1 << 3)
    assert (spilled.fingerprints, spilled.claims) == (2, 2)
    assert spilled.remove(ROW, 1, 4)
    assert not spilled.remove(ROW, 1, 4)
    assert spilled.take(ROW) == {2: 1 << 4}
    assert (spilled.fingerprints, spilled.claims) == (0, 0)
    assert ROW not in spilled


def test_numbers_of_nodes_that_left_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holder_numbers, "_MOST", 1 << 8)
    numbers = HolderNumbers()
    for node in range(1, 300):
        assert numbers.of(node) == 1
        numbers.retire(node)
        numbers.release(tuple(numbers.retired))
    assert numbers.of(1) == 1
    for node in range(1, 1 << 8):
        numbers.of(node)
    with pytest.raises(NoSpace, match="255 nodes"):
        numbers.of(1 << 8)


def test_a_full_table_refuses_and_keeps_what_it_has() -> None:
    table = HolderTable(SMALL)
    rng = np.random.default_rng(1)
    some = rng.integers(0, 1 << BITS, 2_937_000, dtype=np.uint64)
    table.apply(1, some[:2_900_000], NONE)
    assert not table.is_full
    table.apply(1, some[2_900_000:], NONE)
    assert table.is_full
    kept = table.counters.claims
    crowded = u64(in_row(70_000))
    table.apply(2, crowded, NONE)
    assert table.size_bytes == ROW_BYTES << 16
    assert table.counters.refused > 0
    assert table.counters.claims - kept + table.counters.refused == 70_000
    assert table.count(1) == kept
    assert len(table.probe(some[:1000])) == 1000
    assert table.count(2) == len(table.probe(crowded)) == 70_000 - table.counters.refused
    assert not table.step()


def test_a_kernel_without_huge_pages_or_address_space(monkeypatch: pytest.MonkeyPatch) -> None:
    class SmallPages(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", SmallPages)
    table = HolderTable(SMALL)
    table.apply(1, u64([5]), NONE)
    assert table.holders_of(5) == [1]

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(NoSpace, match="ulimit -v"):
        HolderTable(SMALL)


def test_a_fingerprint_of_another_range_is_refused() -> None:
    with pytest.raises(Invalid, match="range 3"):
        HolderTable(SMALL).replace_range(1, 3, u64([4]))


SHARE = [ROW, RANGES - 1]
turned_changes = st.tuples(
    st.sampled_from(["add", "remove", "drop", "step", "replace", "lose"]),
    st.integers(1, 12),
    st.lists(st.sampled_from([each * RANGES + r for each in range(30) for r in SHARE])),
)


@given(st.lists(turned_changes, max_size=20))
def test_a_turned_table_holds_what_sets_would(steps: list[tuple[str, int, list[int]]]) -> None:
    table, model = HolderTable(SMALL, is_turned=True), ClaimModel()
    asked = [each * RANGES + r for each in range(30) for r in SHARE]
    for verb, node, some in steps:
        if verb == "lose":
            lost = np.zeros(RANGES, np.bool_)
            lost[SHARE[node % 2]] = True
            table.lose(lost)
            assert table.is_losing
            while table.step():
                pass
            assert not table.is_losing
            for held in model.claims.values():
                held -= {each for each in held if lost[each % RANGES]}
        else:
            change(table, model, verb, node, some)
    model.assert_same(table, asked)


def test_a_turned_table_of_few_ranges_takes_no_more_memory() -> None:
    table = HolderTable(is_turned=True)
    rng = np.random.default_rng(2)
    batches = [
        rng.integers(0, 1 << BITS - 10, 50_000, dtype=np.uint64) << np.uint64(10)
        | rng.choice(u64(SHARE), 50_000)
        for _ in range(64)
    ]
    for number, batch in enumerate(batches):
        table.apply(number % 5 + 1, batch, NONE)
    assert table.size_bytes / table.counters.claims < 17
    assert table.spilled < 1000
    for number, batch in enumerate(batches):
        found = table.probe(batch[:500])
        assert all(number % 5 + 1 in found[at] for at in range(500))
