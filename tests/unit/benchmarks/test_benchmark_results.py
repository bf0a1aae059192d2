"""How a benchmark's rounds become figures and verdicts."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks._interleave import BEST_PEER, NGINX, Group, Results, Row, Target, run
from benchmarks._report import table
from benchmarks._systems import System

SPEED = Row("speed", "MB/s", True, {"ours": (Target("of_native", 0.8),)})
TIME = Row("time", "µs", False, {"ours": (Target("of_juicefs", 5), Target("at_most", 30))})


def _results(row: Row, **samples: list[float | None]) -> Results:
    results = Results()
    for system, values in samples.items():
        for value in values:
            results.add(row.name, system, value)
    return results


def test_a_ratio_is_the_median_of_the_ratios_within_the_rounds() -> None:
    results = _results(SPEED, native=[100, 1000, 10], ours=[90, 700, 20])
    assert results.ratio(SPEED, "ours", "native") == pytest.approx(0.9)
    assert results.meets(SPEED, "ours", SPEED.targets["ours"][0]) is True


def test_a_shorter_time_is_a_higher_ratio() -> None:
    results = _results(TIME, juicefs=[100, 120], ours=[25, 20])
    assert results.ratio(TIME, "ours", "juicefs") == pytest.approx(5)
    assert [results.meets(TIME, "ours", target) for target in TIME.targets["ours"]] == [True, True]


def test_a_round_that_failed_in_one_system_is_left_out_of_the_ratio() -> None:
    results = _results(SPEED, native=[100, 100], ours=[None, 50])
    assert results.ratio(SPEED, "ours", "native") == pytest.approx(0.5)


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    results = _results(TIME, ours=[20])
    assert results.meets(TIME, "ours", Target("of_juicefs", 5)) is None
    assert "not measured" in table([TIME], ["native", "ours"], results)


def test_the_best_peer_is_the_fastest_of_each_round() -> None:
    row = Row("gets", "requests/s", True, {"ours": (Target("of_best_peer", 4),)}, BEST_PEER)
    results = _results(row, seaweedfs=[10, 20], juicefs=[30, None], ours=[120, 60])
    assert results.ratio(row, "ours", BEST_PEER) == pytest.approx(3.5)
    assert results.meets(row, "ours", row.targets["ours"][0]) is False
    assert "(3.50)" in table([row], ["ours", "seaweedfs", "juicefs"], results)


def test_the_best_peer_in_a_time_is_the_shortest() -> None:
    row = Row("memory", "MB", False, base=BEST_PEER)
    results = _results(row, seaweedfs=[400], rclone=[200], ours=[100])
    assert results.ratio(row, "ours", BEST_PEER) == pytest.approx(2)


@pytest.mark.parametrize(("ours", "met"), [(0.19, True), (0.21, False)])
def test_a_cost_is_bounded_by_a_multiple_of_anothers(ours: float, met: bool) -> None:
    target = Target("at_most_of_nginx", 2)
    row = Row("processor per GB", "s", False, {"ours": (target,)}, NGINX)
    results = _results(row, nginx=[0.1], ours=[ours])
    assert results.meets(row, "ours", target) is met
    assert str(target) == "≤ 2 × nginx"


@pytest.mark.parametrize(
    ("native", "ours", "word"),
    [(16, 15.5, "met"), (16, 14, "MISSED"), (14, 13, "beyond native")],
)
def test_what_plain_reads_do_not_have_is_not_asked(native: float, ours: float, word: str) -> None:
    row = Row("load", "GB/s", True, {"ours": (Target("of_safetensors", 1.5),)})
    results = _results(row, native=[native], safetensors=[10], ours=[ours])
    assert f"≥ 1.5 × safetensors {word}" in table([row], ["ours"], results)


@pytest.fixture
def systems(tmp_path: Path) -> list[System]:
    return [System(name, tmp_path / name) for name in ("native", "ours")]


def _run(group: Group, systems: list[System], results: Results, deadline: float) -> list[str]:
    """What it says meanwhile."""
    said: list[str] = []
    run(
        [group],
        systems,
        results,
        rounds=3,
        deadline=deadline,
        watch=lambda _seconds: None,
        say=said.append,
    )
    return said


def test_every_round_asks_every_system_and_the_order_rotates(systems: list[System]) -> None:
    asked = []

    def measure(system: System) -> Mapping[str, float]:
        asked.append(system.name)
        return {"speed": 1.0}

    _run(Group((SPEED,), measure), systems, Results(), float("inf"))
    assert asked == ["native", "ours", "ours", "native", "native", "ours"]


def test_after_the_deadline_a_group_still_has_one_round(systems: list[System]) -> None:
    results = Results()
    said = _run(Group((SPEED,), lambda _system: {"speed": 1.0}), systems, results, float("-inf"))
    measured = ["native: speed 1", "ours: speed 1"]  # told at once: the table comes late
    assert said == ["1 of 1: speed", *measured, "the time is over after 1 of 3 rounds"]
    assert results.samples["speed"] == {"native": [1.0], "ours": [1.0]}


def test_a_system_that_fails_does_not_stop_the_others(systems: list[System]) -> None:
    def measure(system: System) -> Mapping[str, float]:
        if system.name == "ours":
            raise OSError("the mount has gone")
        return {"speed": 2.0}

    results = Results()
    said = _run(Group((SPEED,), measure), systems, results, float("inf"))
    assert "ours failed: OSError: the mount has gone" in said
    assert results.median("speed", "native") == 2.0
    assert "the mount has gone" in results.failures["speed"]["ours"]
    assert "failed" in table([SPEED], ["native", "ours"], results)


def test_rows_that_are_measured_together_are_told_by_what_they_share() -> None:
    rows = [Row(f"block, peer: {what}", "", True) for what in ("files", "CPU of the server")]
    assert Group(rows, lambda _system: {}).name == "block, peer"
    assert Group([*rows, SPEED], lambda _system: {}).name.endswith("server, speed")
