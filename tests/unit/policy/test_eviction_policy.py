"""The pure decisions of eviction."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvfs.policy.eviction import choose, coldest, excess, headroom, share

GIB = 1 << 30
capacities = st.integers(min_value=0, max_value=1 << 60)


def test_headroom_is_one_gib_or_five_percent_but_never_over_a_quarter() -> None:
    assert headroom(4 * GIB) == GIB
    assert headroom(10 * GIB) == GIB
    assert headroom(100 * GIB) == 5 * GIB
    assert headroom(GIB) == GIB // 4
    assert headroom(0) == 0


@given(capacities, capacities)
def test_what_is_left_after_an_eviction_is_outside_the_headroom(used: int, capacity: int) -> None:
    need = excess(used, capacity)
    assert 0 <= need <= max(0, used)
    assert used - need <= capacity - headroom(capacity)
    assert excess(used - need, capacity) == 0


@given(capacities, capacities)
def test_nothing_is_evicted_outside_the_headroom(used: int, capacity: int) -> None:
    if used <= capacity - headroom(capacity):
        assert excess(used, capacity) == 0


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 1 << 50)))), st.integers(0, 20)
)
def test_coldest_is_the_least_recently_used_of_all(
    orders: list[list[tuple[int, int]]], limit: int
) -> None:
    expected = sorted(itertools.chain.from_iterable(orders))[:limit]
    assert coldest([sorted(order) for order in orders], limit) == [ino for _, ino in expected]


@given(
    st.lists(
        st.tuples(st.integers(1, 1 << 50), st.integers(0, 100)), unique_by=lambda each: each[0]
    ),
    st.integers(-5, 1000),
)
def test_choose_takes_the_shortest_sufficient_run(
    candidates: list[tuple[int, int]], need: int
) -> None:
    sizes = dict(candidates)
    chosen = list(choose(candidates, need))
    with_bytes = [ino for ino, size in candidates if size]
    assert chosen == with_bytes[: len(chosen)]
    if len(chosen) < len(with_bytes):
        assert sum(sizes[ino] for ino in chosen) >= need
    if chosen:
        assert sum(sizes[ino] for ino in chosen[:-1]) < need


def test_choose_draws_no_more_candidates_than_it_needs() -> None:
    candidates = iter([(ino, 10) for ino in range(100)])
    assert list(choose(candidates, 25)) == [0, 1, 2]
    assert next(candidates) == (3, 10)


def test_each_node_evicts_its_part_of_a_full_namespace() -> None:
    assert share(100, 50, 200) == 25
    assert share(10, 1, 1000) == 1
    assert share(10, 0, 1000) == 0
    assert share(100, 70, 70) == share(100, 80, 70) == 100
    assert share(0, 1, 2) == 0
