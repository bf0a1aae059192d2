"""Who lives, whatever clocks do."""

from hypothesis import given
from hypothesis import strategies as st

from kvfs.cluster.failure_detector import RENEWAL_S, TERM_S, Sightings, Tenure
from kvfs.meta.node_leases import Lease

A, B = 1, 2


def lease(beat: int, *, incarnation: int = 1, age_s: float = 0.0) -> Lease:
    return Lease(incarnation, beat, age_s, b"")


def looks(sightings: Sightings, start_s: float, beats: list[int]) -> float:
    """Look at the beats of B, a renewal's time between them; when it was done."""
    now_s = start_s
    for beat in beats:
        now_s += RENEWAL_S
        sightings.look({A: lease(int(now_s * 1000)), B: lease(beat)}, now_s)
    return now_s


def test_a_node_whose_number_stands_still_for_a_term_is_dead_until_it_grows() -> None:
    sightings = Sightings()
    now_s = looks(sightings, 0, [1, 2, 3, 3, 3, 3])
    assert sightings.lives(B)
    now_s = looks(sightings, now_s, [3])
    assert not sightings.lives(B)
    assert sightings.silent_s(B) >= TERM_S
    looks(sightings, now_s, [4])
    assert sightings.lives(B)


def test_one_that_left_in_order_is_dead_at_once() -> None:
    sightings = Sightings()
    looks(sightings, 0, [1, 2])
    sightings.look({}, 6.0)
    assert not sightings.lives(B)
    assert sightings.lease(B) is None


def test_a_new_incarnation_lives_whatever_its_beat() -> None:
    sightings = Sightings()
    now_s = looks(sightings, 0, [7] * 6)
    assert not sightings.lives(B)
    sightings.look({B: lease(7, incarnation=2)}, now_s + 1)
    assert sightings.lives(B)


@given(st.floats(min_value=0, max_value=1e9))
def test_no_time_in_which_nobody_looked_kills(gap_s: float) -> None:
    """The engine was away, or this host slept: the others get time to be seen."""
    sightings = Sightings()
    now_s = looks(sightings, 0, [1, 2, 3])
    sightings.look({B: lease(3)}, now_s + gap_s)
    assert sightings.lives(B)


@given(st.lists(st.floats(min_value=-1e9, max_value=1e9), min_size=8, max_size=20))
def test_the_clock_of_the_engine_may_say_what_it_likes(ages_s: list[float]) -> None:
    """After one renewal of each, it is their numbers that count."""
    sightings = Sightings()
    for number, age_s in enumerate(ages_s):
        now_s = number * RENEWAL_S
        sightings.look({A: lease(number, age_s=age_s), B: lease(1, age_s=age_s)}, now_s)
        assert number == 0 or sightings.lives(A)
    assert not sightings.lives(B)


def test_who_starts_takes_the_word_of_the_engine_for_who_is_dead() -> None:
    sightings = Sightings()
    sightings.look({A: lease(5, age_s=1.0), B: lease(5, age_s=3600.0)}, 0)
    assert sightings.lives(A)
    assert not sightings.lives(B)


def test_our_own_lease_counts_from_when_it_was_asked_for() -> None:
    tenure = Tenure(100.0)
    assert not tenure.holds(100.0)
    tenure.renewed(100.0, 100.0)
    assert tenure.holds(100.0 + TERM_S / 2)
    assert not tenure.holds(100.0 + TERM_S)
    tenure.renewed(99.0, 101.0)
    assert tenure.holds(100.0 + TERM_S / 2)
    tenure.end()
    assert not tenure.holds(100.0)


def test_a_lapse_of_our_lease_counts_once() -> None:
    tenure = Tenure(0.0)
    tenure.renewed(0.0, 0.1)
    before = tenure.lapses(1.0)
    tenure.renewed(2.0, 2.1)
    assert tenure.lapses(3.0) == before
    late = 2.0 + 3 * TERM_S
    assert tenure.lapses(late) == before + 1
    tenure.renewed(late, late + 0.1)
    assert tenure.lapses(late + 0.2) == before + 1


@given(st.floats(min_value=0, max_value=20), st.floats(min_value=0, max_value=20))
def test_nobody_is_thought_dead_while_he_may_act(answered_s: float, asked_again_s: float) -> None:
    """A renews at 0 for the last time, and is answered whenever; B looks at least each renewal."""
    tenure, sightings = Tenure(0.0), Sightings()
    tenure.renewed(0.0, 0.0)
    looked_s = 0.0
    while sightings.lives(A) or looked_s == 0.0:
        sightings.look({A: lease(1)}, looked_s + answered_s / 1e3)
        looked_s += RENEWAL_S + asked_again_s / 10
    assert not tenure.holds(looked_s - (RENEWAL_S + asked_again_s / 10) + answered_s / 1e3)
