"""What the nodes of a namespace may fill together never exceeds its capacity, and each gets an
equal part in the end if all want it."""

import random

import pytest

from kvfs.policy.capacity_grants import CapacityShare, next_share

MIB = 1 << 20
CAPACITY = 6400 * MIB
PORTION = 200 * MIB
NONE = CapacityShare(0, 0, 0)


def granted(*sizes: int) -> list[CapacityShare]:
    return [CapacityShare(size, size, size) for size in sizes]


@pytest.mark.parametrize(
    ("mine", "others", "expected"),
    [
        # the first grant: a portion, or an equal part of all members if that is less
        (NONE, [], PORTION),
        (NONE, granted(CAPACITY - 50 * MIB), 50 * MIB),
        # more in time
        (CapacityShare(0, PORTION, PORTION), [], PORTION),
        (CapacityShare(MIB, PORTION, PORTION), [], 2 * PORTION),
        (CapacityShare(9 * PORTION, 0, 0), [], 10 * PORTION),
        # unused ones go back
        (CapacityShare(0, 4 * PORTION, 4 * PORTION), [], 2 * PORTION),
        (CapacityShare(PORTION, 4 * PORTION, 4 * PORTION), [], 4 * PORTION),
        # all is given out
        (CapacityShare(PORTION, PORTION, PORTION), granted(CAPACITY - PORTION), PORTION),
    ],
)
def test_it_is_granted(mine: CapacityShare, others: list[CapacityShare], expected: int) -> None:
    assert next_share(CAPACITY, mine, others, 2).granted == expected


def test_one_that_has_much_empties_it_before_it_gives_it_back() -> None:
    all_ = CapacityShare(CAPACITY, CAPACITY, CAPACITY)
    newcomer = next_share(CAPACITY, NONE, [all_], 2)
    assert newcomer == NONE._replace(lacks=True)
    half = next_share(CAPACITY, all_, [newcomer], 2)
    assert half == CapacityShare(CAPACITY, CAPACITY, CAPACITY // 2)
    emptied = half._replace(used=CAPACITY // 2 - MIB)
    assert next_share(CAPACITY, emptied, [newcomer], 2).granted == CAPACITY // 2


def test_a_lowered_capacity_is_kept_in_the_end() -> None:
    before = granted(CAPACITY // 2, CAPACITY // 2)
    after = [next_share(CAPACITY // 2, before[n], [before[1 - n]], 2) for n in (0, 1)]
    assert [each.keeps for each in after] == [CAPACITY // 4] * 2


@pytest.mark.parametrize("seed", range(20))
def test_grants_never_exceed_the_capacity(seed: int) -> None:
    chance = random.Random(seed)
    capacity = chance.randrange(1, CAPACITY)
    shares = [NONE] * chance.randrange(1, 9)
    for _ in range(500):
        node = chance.randrange(len(shares))
        mine = shares[node]
        used = min(mine.keeps, max(0, mine.used + chance.randrange(-PORTION, 2 * PORTION)))
        others = [each for number, each in enumerate(shares) if number != node]
        shares[node] = next_share(capacity, mine._replace(used=used), others, len(shares))
        assert sum(each.granted for each in shares) <= capacity
        assert all(each.keeps <= each.granted for each in shares)


@pytest.mark.parametrize("count", [2, 5])
def test_each_gets_an_equal_part_if_all_fill_theirs(count: int) -> None:
    shares = [NONE] * count
    for turn in range(400 * count):
        node = turn % count
        full = shares[node]._replace(used=shares[node].keeps)
        others = [each for number, each in enumerate(shares) if number != node]
        shares[node] = next_share(CAPACITY, full, others, count)
    equal = CAPACITY // count
    assert all(abs(each.granted - equal) <= PORTION for each in shares)
