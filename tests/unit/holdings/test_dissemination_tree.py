"""The trees along which changes spread: everyone is reached once, whoever is dead, in few steps."""

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvfs.holdings.dissemination_tree import FAN_OUT, DisseminationTree

members = st.sets(st.integers(1, 1 << 64), min_size=1, max_size=60)


def spread(tree: DisseminationTree, origin: int, dead: frozenset[int]) -> tuple[Counter[int], int]:
    """How often each member is told, and in how many steps the last one."""
    told: Counter[int] = Counter()
    steps, level = 0, [origin]
    while level:
        level = [child for node in level for child in tree.children(origin, node, dead)]
        told.update(level)
        steps += bool(level)
    return told, steps


@given(members, st.integers(1, 4), st.randoms())
def test_every_live_member_is_told_once(
    nodes: set[int], fan_out: int, chance: random.Random
) -> None:
    tree = DisseminationTree(nodes, fan_out)
    origin = chance.choice(sorted(nodes))
    dead = frozenset(each for each in nodes - {origin} if chance.random() < 0.3)
    told, _ = spread(tree, origin, dead)
    assert told == Counter(nodes - dead - {origin})


def test_nodes_that_know_the_members_in_another_order_agree() -> None:
    some = random.Random(1).sample(range(1 << 40), 100)
    tree, other = DisseminationTree(some), DisseminationTree(reversed(some))
    assert len(tree) == 100
    for me in some:
        assert tree.children(some[0], me) == other.children(some[0], me)


def test_a_thousand_nodes_are_reached_in_three_steps() -> None:
    tree = DisseminationTree(range(1, 1001))
    for origin in (1, 500, 1000):
        assert spread(tree, origin, frozenset())[1] == 3


def test_all_nodes_pass_on_as_much() -> None:
    some = range(1, 201)
    tree = DisseminationTree(some)
    sent = Counter[int]()
    for origin in some:
        for me in some:
            sent[me] += len(tree.children(origin, me))
    assert set(sent.values()) == {199}


def test_a_node_hears_from_few_whatever_the_origin() -> None:
    some = range(1, 1001)
    tree = DisseminationTree(some)
    senders = {me for me in some if any(7 in tree.children(origin, me) for origin in some)}
    assert len(senders) == 27


def test_few_nodes_tell_all_others_themselves() -> None:
    some = range(FAN_OUT + 1)
    tree = DisseminationTree(some)
    assert sorted(tree.children(3, 3)) == [each for each in some if each != 3]


def test_who_is_no_member_is_passed_nothing() -> None:
    tree = DisseminationTree([1, 2, 3])
    assert tree.children(9, 1) == tree.children(1, 9) == []
    assert DisseminationTree([1]).children(1, 1) == []
