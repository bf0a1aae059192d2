"""What the rows of `scale` say together."""

import pytest

from benchmarks._interleave import Results, Row
from benchmarks._scale_bars import bars, compared

FLOW = "block, peer"
TOTAL = Row(f"{FLOW}: CPU of all nodes and the server", "µs", False)
OTHER = Row(f"{FLOW}: CPU of each other node", "µs", False)
SPEED = Row(f"{FLOW}: files", "/s", True)


def _results(*samples: tuple[Row, dict[str, list[float]]]) -> Results:
    results = Results()
    for row, systems in samples:
        for system, values in systems.items():
            for value in values:
                results.add(row.name, system, value)
    return results


@pytest.mark.parametrize(("measured", "word"), [(1449, "met"), (1451, "MISSED")])
def test_a_cluster_may_cost_a_tenth_more_than_its_nodes(measured: float, word: str) -> None:
    results = _results(
        (TOTAL, {"1 nodes": [1000], "8 nodes": [measured]}), (OTHER, {"8 nodes": [50]})
    )
    (bar,) = bars([SPEED, TOTAL, OTHER], [8, 1], results)
    assert bar.most == pytest.approx(1450)
    assert str(bar).endswith(f"7 × 50 of a receiver): {word}")


def test_without_a_lone_node_nothing_is_said() -> None:
    results = _results((TOTAL, {"2 nodes": [1000]}), (OTHER, {"2 nodes": [50]}))
    assert bars([TOTAL, OTHER], [2], results) == []


def test_a_program_is_compared_with_the_one_before_round_by_round() -> None:
    results = _results(
        (SPEED, {"2 nodes": [100, 900], "2 nodes, before": [50, 600]}),
        (TOTAL, {"2 nodes": [500, 50], "2 nodes, before": [1000, 75]}),
    )
    (line,) = compared([SPEED, TOTAL, OTHER], [2], results)
    assert line == (
        "block, peer, 2 nodes, times as good as before: files 1.75,"
        " CPU of all nodes and the server 1.75"
    )
