"""What changed is as good as all leases; reports that change all the time are told seldom."""

from hypothesis import given
from hypothesis import strategies as st

from kvfs.cluster.failure_detector import RENEWAL_S, TERM_S, Sightings
from kvfs.cluster.node_records import CHANGES_PER_S, NodeRecord, Reports, Words
from kvfs.cluster.placement_view import PlacementView
from kvfs.cluster.roster import Roster
from kvfs.meta.node_leases import Lease, LeaseNews

NODES = range(1, 5)


def whole(leases: dict[int, Lease]) -> LeaseNews:
    return LeaseNews(leases, {}, (), is_whole=True)


def news(before: dict[int, Lease], leases: dict[int, Lease]) -> LeaseNews:
    """What the engine tells whoever looked at `before`."""
    changed = {
        node: lease
        for node, lease in leases.items()
        if node not in before
        or (lease.incarnation, lease.words) != (before[node].incarnation, before[node].words)
    }
    silent = {
        node: lease.beat
        for node, lease in leases.items()
        if node in before and lease.beat == before[node].beat
    }
    return LeaseNews(changed, silent, before.keys() - leases.keys(), is_whole=False)


@given(
    st.lists(
        st.tuples(
            st.floats(min_value=0, max_value=20),
            st.lists(st.sampled_from(["renew", "say", "restart", "leave", "hang"]), min_size=4),
            st.booleans(),
        ),
        max_size=30,
    )
)
def test_what_changed_tells_who_lives_as_all_leases_do(
    looks: list[tuple[float, list[str], bool]],
) -> None:
    """Also where all are told in between: somebody is then dead no earlier, and later by no more
    than a look."""
    plain, hearing = Sightings(), Sightings()
    leases: dict[int, Lease] = {}
    heard: dict[int, Lease] = {}
    now_s, beat, wholes = 0.0, 0, 0
    for pause_s, actions, is_told_all in looks:
        now_s += pause_s
        for node, action in zip(NODES, actions, strict=False):
            beat += 1
            old = leases.get(node, Lease(0, 0, 0.0, b""))
            if action == "leave":
                leases.pop(node, None)
            elif action != "hang":
                incarnation = old.incarnation + (action == "restart" or node not in leases)
                words = b"%d" % beat if action == "say" else old.words
                leases[node] = Lease(incarnation, beat, 0.0, words)
        plain.look(leases, now_s)
        wholes += is_told_all and bool(heard)
        hearing.hear(whole(dict(leases)) if is_told_all else news(heard, leases), now_s)
        heard = dict(leases)
        for node in NODES:
            if wholes:
                assert hearing.lives(node) or not plain.lives(node)
            else:
                assert hearing.lives(node) == plain.lives(node)
                assert hearing.silent_s(node) == plain.silent_s(node)


def test_a_killed_node_stays_dead_when_all_is_told_again() -> None:
    sightings, leases = Sightings(), {1: Lease(1, 1, 0.0, b""), 2: Lease(1, 2, 0.0, b"")}
    sightings.hear(whole(leases), 0.0)
    now_s = 0.0
    while sightings.lives(2):
        now_s += RENEWAL_S
        sightings.hear(LeaseNews({}, {2: 7}, (), is_whole=False), now_s)
    assert sightings.lives(1)
    again = {1: Lease(1, 50, 0.0, b""), 2: Lease(1, 7, 0.0, b"")}
    assert sightings.hear(whole(again), now_s + RENEWAL_S) == {1, 2}
    assert (sightings.lives(1), sightings.lives(2)) == (True, False)
    assert now_s >= TERM_S


def test_placement_draws_the_nodes_anew_when_they_change() -> None:
    roster = Roster(1)
    roster.read(NodeRecord(number=n, name=f"n{n}", store="", incarnation=1) for n in (1, 2))
    view = PlacementView(roster)
    roster.hear(whole({1: Lease(1, 1, 0.0, b""), 2: Lease(1, 1, 0.0, b"")}), 0.0)
    before = view.snapshot()
    assert view.snapshot() is before
    roster.hear(LeaseNews({}, {}, [2], is_whole=False), 1.0)
    assert [host.alive for host in view.snapshot()] == [True, False]


def words(free_bytes: int, obstacle: str = "") -> Words:
    return Words(name="a", protocol=2, version="", boot=1, free_bytes=free_bytes, obstacle=obstacle)


def test_figures_are_told_the_more_seldom_the_more_nodes_hear_them() -> None:
    for members in (10, 1000):
        reports, told, now_s = Reports(0.5), [], 0.0
        while now_s < 1000:
            said = reports.tell(words(round(now_s)), members, now_s)
            told.append(said.free_bytes)
            assert now_s - said.free_bytes <= 1 + members / CHANGES_PER_S
            now_s += RENEWAL_S
        assert len(set(told)) * members <= 1.01 * max(CHANGES_PER_S * now_s, len(told) * members)


def test_what_matters_at_once_is_told_at_once() -> None:
    reports = Reports(0.5)
    first = reports.tell(words(1), 1000, 0.0)
    assert reports.tell(words(2), 1000, 1.0) == first
    assert reports.tell(words(2, "it has the last copy"), 1000, 2.0).free_bytes == 2
    assert reports.tell(words(3, "it has the last copy"), 1000, 3.0).free_bytes == 2
    reports.forget()
    assert reports.tell(words(3), 1000, 4.0).free_bytes == 3


def test_what_did_not_change_for_long_is_told_as_soon_as_it_does() -> None:
    reports = Reports(0.5)
    reports.tell(words(1), 1000, 0.0)
    wait_s = 1000 / CHANGES_PER_S
    for now_s in (wait_s / 2, wait_s):
        reports.tell(words(1), 1000, now_s)
    assert reports.tell(words(2), 1000, wait_s + 1).free_bytes == 2
