"""Whether there are homes of names, and which nodes they are."""

import pytest

from kvfs.policy.home_nodes import AWAY_S, MOST_CHANGES_PER_S, ChangeRate, Presence, wanted

THERE = {1: "a", 2: "a", 3: "b"}
LARGE, SMALL, BETWEEN = 1001, 499, 700
MOST = 1000


@pytest.mark.parametrize("names", [SMALL, BETWEEN, MOST])
def test_each_node_knows_all_of_few_names(names: int) -> None:
    assert wanted({}, THERE, names, 0.0, MOST) == {}


def test_many_names_or_many_changes_have_homes() -> None:
    assert wanted({}, THERE, LARGE, 0.0, MOST) == THERE
    assert wanted({}, THERE, SMALL, MOST_CHANGES_PER_S + 1, MOST) == THERE


def test_homes_stay_until_there_is_half_of_both() -> None:
    assert wanted(THERE, THERE, BETWEEN, 0.0, MOST) == THERE
    assert wanted(THERE, THERE, SMALL, MOST_CHANGES_PER_S * 0.6, MOST) == THERE
    assert wanted(THERE, THERE, None, 0.0, MOST) == THERE
    assert wanted(THERE, THERE, SMALL, MOST_CHANGES_PER_S * 0.4, MOST) == {}


def test_what_is_not_known_changes_nothing() -> None:
    assert wanted({}, THERE, None, 0.0, MOST) == {}


def test_homes_are_the_nodes_that_are_there() -> None:
    assert wanted(THERE, {**THERE, 4: ""}, LARGE, 0.0, MOST) == {**THERE, 4: ""}
    assert wanted(THERE, {1: "a", 2: "a"}, LARGE, 0.0, MOST) == {}
    assert wanted(THERE, {}, LARGE, 0.0, MOST) == {}


def test_a_node_that_is_away_for_a_moment_is_there() -> None:
    presence = Presence()
    assert presence.look(THERE.items(), 0.0) == THERE
    assert presence.look([(1, "a")], AWAY_S) == THERE
    assert presence.look([(1, "a")], AWAY_S + 1) == {1: "a"}
    assert presence.look([(1, "c"), (2, "a")], AWAY_S + 2) == {1: "c", 2: "a"}


def test_a_rate_is_an_average_of_a_minute() -> None:
    rate = ChangeRate()
    assert rate.look(1000, 0.0) == 0.0
    assert 0 < rate.look(2000, 1.0) < 100
    for second in range(2, 600):
        found = rate.look(1000 + 1000 * second, float(second))
    assert found == pytest.approx(1000, rel=0.01)
