"""For how long names are kept to their node, by the lives of temporary ones."""

import random

import pytest

from kvfs.policy.name_delay import NameDelay

MOST_S = 1.0


def after(*lives_s: float) -> float:
    """The delay after files got other names, one each tenth of a second."""
    delay = NameDelay()
    now = 100.0
    for each in lives_s:
        now += 0.1
        delay.gave_up(each, now)
    return delay.seconds(now, MOST_S)


@pytest.mark.parametrize(
    ("lives_s", "wanted_s"),
    [
        ([], 0),
        ([0.001], 0.05),
        ([0.001] * 100, 0.05),
        ([0.001, 0.06], 0.1),
        ([0.2] * 10, 0.39),
        ([5.0] * 10, MOST_S),
        ([3600.0] * 10, 0),
        ([-5.0] * 10, 0),
        ([0.001, *[3600.0] * 10], 0.05),
        ([*[0.2] * 10, *[0.001] * 1000], 0.05),
    ],
)
def test_it_follows_the_lives_of_temporary_names(lives_s: list[float], wanted_s: float) -> None:
    assert after(*lives_s) == pytest.approx(wanted_s, rel=0.05)


def test_about_one_in_a_hundred_lives_for_longer() -> None:
    chance, delay = random.Random(1), NameDelay()
    longer, now = 0, 0.0
    for count in range(20_000):
        now += 0.01
        lived = chance.lognormvariate(-2.5, 1)  # a tenth of a second, some of them one
        longer += count > 1000 and lived > delay.seconds(now, 10)
        delay.gave_up(lived, now)
    assert 0.002 < longer / 19_000 < 0.02


def test_it_ends_with_the_temporary_names() -> None:
    delay = NameDelay()
    for second in range(10):
        delay.gave_up(0.5, second)
    assert delay.seconds(10, MOST_S) > 0.5
    assert delay.seconds(20, MOST_S) == 0
    delay.gave_up(0.5, 21)
    assert delay.seconds(21, MOST_S) == 0.05


def test_a_cluster_that_leaves_no_time_has_the_least() -> None:
    delay = NameDelay()
    for second in range(10):
        delay.gave_up(0.5, second)
    assert delay.seconds(10, 0.0) == 0.05
