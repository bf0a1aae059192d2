"""The order of removals and copies of one name, on several hosts whose clocks differ."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.node.names import tombstones
from kvfs.node.names.tombstones import AHEAD_NS, HOUR_NS, KEPT_NS, Tombstone, Tombstones
from tests.contract.tombs import removed

SPACE, PATH = 3, b"dir/block"
NOW = 10**18


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EmbeddedEngine]:
    engine = EmbeddedEngine(tmp_path)
    yield engine
    engine.close()


class Clock:
    def __init__(self) -> None:
        self.ns = NOW

    def __call__(self) -> int:
        return self.ns


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stones(engine: EmbeddedEngine, clock: Clock) -> Tombstones:
    return Tombstones(engine, clock)


def test_a_removal_hides_what_was_there_and_nothing_newer(
    stones: Tombstones, engine: EmbeddedEngine
) -> None:
    assert not stones.hides(SPACE, PATH, NOW)
    (made,) = removed(engine, stones, (SPACE, PATH, NOW - 5), 1)
    assert made == Tombstone(SPACE, PATH, NOW, 1, NOW - 4)
    assert stones.hides(SPACE, PATH, NOW - 5)
    assert stones.hides(SPACE, PATH, NOW - 1)
    assert not stones.hides(SPACE, PATH, NOW)
    assert not stones.hides(SPACE, b"dir/other", NOW - 5)
    assert not stones.hides(SPACE + 1, PATH, NOW - 5)


def test_what_is_written_after_a_removal_is_never_hidden_by_it(
    engine: EmbeddedEngine, tmp_path: Path
) -> None:
    """The kernel stamps files by a clock that stands still for milliseconds."""
    stones = Tombstones(engine)
    for number in range(20):
        path = b"dir/%d" % number
        removed(engine, stones, (SPACE, path, 1), 1)
        file = tmp_path / str(number)
        file.touch()
        assert not stones.hides(SPACE, path, file.stat().st_ctime_ns)


def test_a_copy_of_a_host_whose_clock_is_ahead_is_removed_all_the_same(
    stones: Tombstones, engine: EmbeddedEngine
) -> None:
    (made,) = removed(engine, stones, (SPACE, PATH, NOW + 700), 1)
    assert made.removed_ns == NOW + 701
    assert stones.hides(SPACE, PATH, NOW + 700)


def test_a_name_written_anew_counts_though_its_clock_is_late(
    stones: Tombstones, engine: EmbeddedEngine, clock: Clock
) -> None:
    stones.take([Tombstone(SPACE, PATH, NOW + 1000, 2)])
    stones.renew([(SPACE, PATH)])
    renews = stones.renews(SPACE, PATH)
    assert renews == NOW + 1000
    assert not stones.hides(SPACE, PATH, NOW, renews)
    assert stones.hides(SPACE, PATH, NOW)  # an earlier copy, of a node that knows nothing of it
    clock.ns += 10
    (again,) = removed(engine, stones, (SPACE, PATH, NOW), 1)
    assert again.removed_ns > renews
    assert stones.hides(SPACE, PATH, NOW, renews)


def test_a_clock_that_is_hours_ahead_hides_no_later_names_of_others(
    stones: Tombstones, engine: EmbeddedEngine, clock: Clock
) -> None:
    ahead = Tombstone(SPACE, PATH, NOW + 5 * HOUR_NS, 2, NOW - 4)
    stones.keep(stones.take([ahead]))
    clock.ns += HOUR_NS
    for here in (stones, Tombstones(engine, clock)):
        assert here.hides(SPACE, PATH, NOW)
        assert not here.hides(SPACE, PATH, clock.ns)  # of a node that did not hear of the removal
        assert (here.of(2), here.sum_of(2)) == ([ahead], (1, ahead.sum))
    (again,) = removed(engine, stones, (SPACE, PATH, clock.ns), 1)
    assert again.removed_ns > ahead.removed_ns  # the latest counts everywhere
    assert stones.hides(SPACE, PATH, clock.ns)
    assert not stones.hides(SPACE, PATH, clock.ns + AHEAD_NS + 1)


def test_what_was_written_by_a_clock_hours_ahead_is_removed_on_every_node(
    stones: Tombstones, engine: EmbeddedEngine, clock: Clock, tmp_path: Path
) -> None:
    ahead_ns = NOW + 5 * HOUR_NS
    (first,) = removed(engine, stones, (SPACE, PATH, ahead_ns), 1)
    stones.renew([(SPACE, PATH)])
    renews_ns = stones.renews(SPACE, PATH)
    (second,) = removed(engine, stones, (SPACE, PATH, NOW + 1), 1)
    other_engine = EmbeddedEngine(tmp_path / "other")
    other = Tombstones(other_engine, clock)
    other.take([first])
    assert other.hides(SPACE, PATH, ahead_ns)
    assert not other.hides(SPACE, PATH, NOW + 1, renews_ns)
    other.keep(other.take([second]))
    for here in (other, Tombstones(other_engine, clock)):
        assert here.hides(SPACE, PATH, NOW + 1, renews_ns)
    other_engine.close()


@pytest.mark.parametrize("wrong_h", [40, -40, 24 * 365 * 30])
def test_a_host_whose_clock_is_days_wrong_removes_as_all_others_do(
    engine: EmbeddedEngine, clock: Clock, tmp_path: Path, wrong_h: int
) -> None:
    wrong = Clock()
    wrong.ns += wrong_h * HOUR_NS
    other_engine = EmbeddedEngine(tmp_path / "other")
    right = Tombstones(engine, clock)
    there = Tombstones(other_engine, wrong, cluster_ns=clock)
    (made,) = removed(engine, right, (SPACE, PATH, NOW), 1)
    there.keep(there.take([made]))
    assert there.hides(SPACE, PATH, NOW)
    (own,) = removed(other_engine, there, (SPACE, b"own", wrong.ns), 2)
    assert right.take([own]) == [own]
    assert right.hides(SPACE, b"own", wrong.ns)
    assert right.compared_since() == there.compared_since()
    clock.ns += KEPT_NS - 1
    there.expire()
    assert there.of(1) == [made]
    other_engine.close()


def test_a_removal_has_its_host_s_time_though_the_server_s_is_ahead(
    engine: EmbeddedEngine, clock: Clock
) -> None:
    """By a second ahead it would hide what others write in that second."""
    ahead = Clock()
    ahead.ns += 10**9
    stones = Tombstones(engine, clock, cluster_ns=ahead)
    (made,) = removed(engine, stones, (SPACE, PATH, NOW - 5), 1)
    assert made.removed_ns == NOW


@pytest.mark.parametrize("which", ["own", "cluster"])
def test_a_clock_that_is_set_by_days_is_no_silence(engine: EmbeddedEngine, which: str) -> None:
    clocks = {"own": Clock(), "cluster": Clock()}
    there = Tombstones(engine, clocks["own"], cluster_ns=clocks["cluster"])
    there.heard()
    clocks[which].ns += 2 * KEPT_NS
    for here in (there, Tombstones(engine, clocks["own"], cluster_ns=clocks["cluster"])):
        assert not here.may_lack_some()
    for each in clocks.values():
        each.ns += KEPT_NS + 1
    assert there.may_lack_some()


def test_what_is_known_is_no_news_and_the_latest_counts(
    stones: Tombstones, engine: EmbeddedEngine
) -> None:
    first, second = (Tombstone(SPACE, PATH, NOW + at, 2) for at in (1, 2))
    assert stones.take([second]) == [second]
    assert stones.take([first, second]) == []
    assert removed(engine, stones, (SPACE, PATH, NOW), 1) == []
    assert stones.of(2) == [second]
    assert stones.sum_of(2) == (1, second.sum)
    third = Tombstone(SPACE, PATH, NOW + 2, 3)  # of one moment: by node
    assert stones.take([third]) == [third]
    assert stones.take([second]) == []
    assert stones.sum_of(2) == (0, 0)
    assert stones.sum_of(3) == (1, third.sum)


def test_they_are_kept_for_a_day(stones: Tombstones, engine: EmbeddedEngine, clock: Clock) -> None:
    removed(engine, stones, (SPACE, PATH, NOW), 1)
    stones.renew([(SPACE, PATH)])
    again = Tombstones(engine, clock)
    assert (again.of(1), again.sum_of(1)) == (stones.of(1), stones.sum_of(1))
    assert again.renews(SPACE, PATH) == stones.renews(SPACE, PATH)
    clock.ns += KEPT_NS + 2
    assert again.take([Tombstone(SPACE, b"old", NOW, 2)]) == []
    again.expire()
    assert len(again) == 0
    assert again.sum_of(1) == (0, 0)
    assert len(Tombstones(engine, clock)) == 0


def test_their_number_is_bounded(
    stones: Tombstones, engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tombstones, "MOST", 3)
    for number in range(5):
        removed(engine, stones, (SPACE, b"%d" % number, NOW + number), 1)
    assert [each.path for each in stones.of(1)] == [b"2", b"3", b"4"]


def test_nodes_compare_what_none_of_them_drops_soon(
    stones: Tombstones, engine: EmbeddedEngine, clock: Clock
) -> None:
    (old,) = removed(engine, stones, (SPACE, b"old", NOW), 1)
    clock.ns += KEPT_NS - HOUR_NS
    (late,) = removed(engine, stones, (SPACE, b"late", NOW), 1)
    since_ns = stones.compared_since()
    assert clock.ns - KEPT_NS + HOUR_NS < since_ns < clock.ns
    assert stones.sum_of(1, since_ns) == (1, late.sum)
    assert stones.sum_of(1) == (2, old.sum ^ late.sum)
    assert stones.origins() == [1]


def test_a_node_that_heard_nobody_for_a_day_may_have_missed_some(
    stones: Tombstones, engine: EmbeddedEngine, clock: Clock
) -> None:
    assert not stones.may_lack_some()
    stones.heard()
    clock.ns += KEPT_NS
    assert not stones.may_lack_some()
    stones.heard()
    clock.ns += KEPT_NS + 1
    assert stones.may_lack_some()
    assert Tombstones(engine, clock).may_lack_some()  # a kill before it gave up what it held


def test_a_node_that_heard_others_all_day_knows_that_after_its_restart(
    stones: Tombstones, engine: EmbeddedEngine, clock: Clock
) -> None:
    for _ in range(25 * 3600 // 30):
        clock.ns += 30_000_000_000
        stones.heard()
    assert not Tombstones(engine, clock).may_lack_some()
