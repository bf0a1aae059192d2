"""The pure decisions of placement: where copies go, which are lacking, which may go."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvfs.policy import placement, rendezvous, replica_repair
from kvfs.policy.cluster_snapshot import ClusterSnapshot, Host

TIB = 1 << 40
keys = st.integers(1, (1 << 64) - 1)


def host(number: int, **changes: object) -> Host:
    return Host(number, TIB, TIB)._replace(**changes)  # type: ignore[arg-type]


@st.composite
def clusters(draw: st.DrawFn) -> ClusterSnapshot:
    hosts = [
        host(
            number,
            free=draw(st.integers(0, TIB)),
            zone=draw(st.sampled_from(["a", "b", "c"])),
            rack=draw(st.sampled_from(["1", "2"])),
            load=draw(st.floats(0, 1)),
            state=draw(st.sampled_from(["active", "active", "draining"])),
            alive=draw(st.sampled_from([True, True, False])),
        )
        for number in range(1, draw(st.integers(1, 12)) + 1)
    ]
    return ClusterSnapshot(hosts)


def wins(weights: list[tuple[int, float]], keys: range) -> Counter[int]:
    return Counter(rendezvous.ranked(key, weights)[0] for key in keys)


def test_a_node_wins_keys_in_proportion_to_its_weight() -> None:
    count = wins([(1, 1.0), (2, 2.0), (3, 1.0)], range(8000))
    assert 1800 < count[1] < 2200
    assert 3700 < count[2] < 4300
    assert 1800 < count[3] < 2200


def test_a_node_that_comes_wins_keys_for_itself_alone_and_one_that_goes_loses_only_its_own() -> (
    None
):
    few, more = [(1, 1.0), (2, 1.0)], [(1, 1.0), (2, 1.0), (3, 1.0)]
    for key in range(2000):
        before, after = rendezvous.ranked(key, few)[0], rendezvous.ranked(key, more)[0]
        assert after in (before, 3)


@given(keys)
def test_a_node_without_weight_wins_nothing(key: int) -> None:
    assert rendezvous.ranked(key, [(1, 0.0), (2, 1.0), (3, -1.0)]) == [2]


@given(clusters(), keys, st.integers(0, TIB), st.integers(0, 5))
def test_copies_go_to_different_nodes_that_are_there_and_have_room(
    snapshot: ClusterSnapshot, key: int, size: int, count: int
) -> None:
    chosen = placement.choose(snapshot, key, size, count, holders=[1])
    assert len(set(chosen)) == len(chosen) <= count
    assert 1 not in chosen
    assert all(each.is_open and each.room >= size for each in snapshot.alive(chosen))
    possible = [each for each in snapshot.open if each.number != 1 and each.room >= max(size, 1)]
    assert len(chosen) == min(count, len(possible)) or size == 0


@given(clusters(), keys)
def test_the_same_snapshot_decides_the_same_in_any_order(
    snapshot: ClusterSnapshot, key: int
) -> None:
    turned = ClusterSnapshot(reversed(list(snapshot)))
    assert placement.choose(snapshot, key, 1, 3) == placement.choose(turned, key, 1, 3)


def test_copies_spread_over_zones_and_then_over_racks() -> None:
    snapshot = ClusterSnapshot(
        host(number, zone="ab"[number % 2], rack="12"[number // 2 % 2]) for number in range(1, 9)
    )
    for key in range(100):
        places = snapshot.alive([1, *placement.choose(snapshot, key, 1, 3, holders=[1])])
        assert {(each.zone, each.rack) for each in places} == {
            ("a", "1"),
            ("a", "2"),
            ("b", "1"),
            ("b", "2"),
        }
        assert places[1].zone == "a"  # the writer is in b


def test_a_busy_node_gets_less_and_a_full_one_nothing() -> None:
    snapshot = ClusterSnapshot([host(1), host(2, load=0.75), host(3, free=0)])
    count = Counter(placement.choose(snapshot, key, 1, 1)[0] for key in range(4000))
    assert 650 < count[2] < 950
    assert count[3] == 0


def test_only_nodes_that_lend_the_medium_are_chosen() -> None:
    snapshot = ClusterSnapshot([host(1), host(2, media=frozenset({"ram"})), host(3)])
    assert placement.choose(snapshot, 7, 1, 3, media=["ram"]) == [2]


@given(clusters(), keys, st.sets(st.integers(1, 14)), st.integers(1, 4))
def test_a_file_with_a_live_holder_has_one_actor_which_is_one_of_them(
    snapshot: ClusterSnapshot, key: int, holders: set[int], wanted: int
) -> None:
    verdict = replica_repair.judge(snapshot, key, holders, wanted)
    there = {each.number for each in snapshot.alive(holders)}
    assert (verdict.actor in there) if there else verdict.actor is None
    staying = [each for each in snapshot.alive(holders) if each.is_open]
    if there:
        assert verdict.missing == max(wanted - len(staying), 0)


@given(clusters(), keys, st.sets(st.integers(1, 14)), st.integers(0, 4))
def test_what_may_go_leaves_what_is_wanted_and_never_nothing(
    snapshot: ClusterSnapshot, key: int, holders: set[int], wanted: int
) -> None:
    going = {
        each for each in holders if replica_repair.may_go(snapshot, key, holders, wanted, each)
    }
    staying = {each.number for each in snapshot.alive(holders) if each.is_open} - going
    if going & {each.number for each in snapshot.alive(holders)}:
        assert len(staying) >= max(wanted, 1)


def test_the_copy_that_goes_is_one_whose_zone_has_another() -> None:
    snapshot = ClusterSnapshot([host(1, zone="a"), host(2, zone="b"), host(3, zone="b")])
    for key in range(50):
        assert not replica_repair.may_go(snapshot, key, [1, 2, 3], 2, 1)
        assert replica_repair.may_go(snapshot, key, [1, 2, 3], 2, 2) != replica_repair.may_go(
            snapshot, key, [1, 2, 3], 2, 3
        )


def test_a_draining_node_keeps_its_copy_until_the_others_have_enough() -> None:
    snapshot = ClusterSnapshot([host(1, state="draining"), host(2), host(3)])
    assert replica_repair.judge(snapshot, 5, [1], 1).missing == 1
    assert not replica_repair.may_go(snapshot, 5, [1], 1, 1)
    assert not replica_repair.may_go(snapshot, 5, [1, 2], 2, 1)
    assert replica_repair.may_go(snapshot, 5, [1, 2, 3], 2, 1)


def test_a_copy_on_a_node_that_is_away_is_missing() -> None:
    snapshot = ClusterSnapshot([host(1), host(2, alive=False), host(3)])
    assert replica_repair.judge(snapshot, 5, [1, 2], 2) == replica_repair.Verdict(1, 1)
    assert replica_repair.judge(snapshot, 5, [2], 2).actor is None
