"""The simulation of a cluster: what it is to show of the policies, at a tenth of its size."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _simulated_names, _simulated_node
from benchmarks._simulated_cluster import picture, predictions
from benchmarks.simulate import simulate
from kvfs.node.names.name_members import most_delay_s


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    found: dict[str, Any] = simulate(nodes=100, files=2000, copies=2, seed=1)["rows"]
    return found


def test_copies_are_spread_over_zones_and_nodes_fill_alike(rows: dict[str, Any]) -> None:
    assert rows["balance"]["files_in_one_zone"] == 0
    assert rows["balance"]["fullest_of_mean"] < 1.6  # 40 files a node, whose writers are drawn


def test_a_lost_node_is_restored_by_many(rows: dict[str, Any]) -> None:
    assert rows["rebuild"]["files_not_restored"] == 0
    assert rows["rebuild"]["seconds"] < rows["rebuild"]["seconds_if_one_node_did_it"] / 5


def test_after_nodes_were_added_no_more_moves_than_must(rows: dict[str, Any]) -> None:
    assert rows["evening out"]["moved_of_ideal"] <= 1.1
    assert 0.9 < rows["evening out"]["new_nodes_of_mean"] < 1.1


def test_readers_of_one_file_form_a_tree(rows: dict[str, Any]) -> None:
    assert rows["incast"]["times_of_a_single"] <= 2.5


def test_names_of_simulated_nodes_are_known_to_all(tmp_path: Path) -> None:
    found = _simulated_names.run(tmp_path, nodes=4, rate=50, seconds=1)
    window, rest = found.others.busy, found.others.at_rest
    assert window.changes > 100
    assert len(window.ages) == pytest.approx(3 * window.changes, rel=0.5)
    assert max(window.ages) < 2
    assert window.received > rest.received > 0
    assert window.bytes > rest.bytes > 0  # heartbeats, and sums of what was removed
    assert window.cpu_s > rest.cpu_s > 0
    assert picture("staleness", {"in peace": window.ages}).startswith("<svg")


@pytest.mark.parametrize(("nodes", "neighbours", "steps"), [(4, 3, 1), (12, 11, 1), (20, 8, 2)])
def test_names_that_wait_at_their_node_are_known_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, neighbours: int, steps: int
) -> None:
    """Which is busy, so that it keeps them for as long as may be."""
    delay_s = most_delay_s(neighbours, steps)
    monkeypatch.setattr(_simulated_node, "_DELAY_S", delay_s)
    window = _simulated_names.run(tmp_path, nodes=nodes, rate=20, seconds=2).others.busy
    assert len(window.ages) > 100
    assert delay_s < max(window.ages) < 2


def test_of_a_single_writer_the_others_are_told_apart(tmp_path: Path) -> None:
    found = _simulated_names.run(tmp_path, nodes=3, rate=100, seconds=1, writers=1)
    assert found.tellers.busy.applied == 0
    assert found.others.busy.applied == pytest.approx(found.others.busy.changes, rel=0.3)
    assert found.tellers.busy.sent > found.others.busy.sent
    alone = _simulated_names.run(tmp_path / "alone", nodes=1, rate=100, seconds=1, writers=1)
    assert alone.tellers.requests == 0
    assert alone.tellers.cpu_s > 0


def test_homes_are_told_of_their_share(tmp_path: Path) -> None:
    found = _simulated_names.run(tmp_path, nodes=6, rate=50, seconds=1, homes=True)
    window = found.others.busy
    told = 2 / 6 * 5 / 6 * window.changes  # two homes of six, and nobody is told what is its own
    assert window.applied == pytest.approx(told, rel=0.3)
    assert max(window.ages) < 2


def test_halves_that_were_cut_apart_learn_what_they_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_simulated_names, "_OBSERVERS", 4)
    found = _simulated_names.trouble(tmp_path, nodes=7, rate=2, lost=1, cut_s=11)
    assert found.healed_s < 10
    assert found.ages_after


def _scale_file(directory: Path, *sizes: str) -> Path:
    """What `bench scale --json` tells of these; the second round was disturbed. It is far more than
    what the simulation takes itself on a busy machine, which is no request's."""
    samples = {
        "CPU of all nodes and the server": {
            "1 nodes": 100_000,
            "2 nodes": 120_000,
            "3 nodes": 140_000,
        },
        "CPU of each other node": {"2 nodes": 10_000, "3 nodes": 10_000},
        "files": {"1 nodes": 100, "2 nodes": 100, "3 nodes": 100},
    }
    rows = [
        {
            "row": f"block, peer: {what}",
            "systems": {
                size: {"samples": [value, 3 * value, value]}
                for size, value in values.items()
                if size in sizes
            },
        }
        for what, values in samples.items()
    ]
    made = directory / "scale.json"
    made.write_text(json.dumps({"rows": rows}))
    return made


def test_what_was_measured_is_predicted_from_a_lone_node_and_two(tmp_path: Path) -> None:
    found, request_s = predictions(_scale_file(tmp_path, "1 nodes", "2 nodes", "3 nodes"))
    assert request_s > 0
    assert [each.measured for each in found] == [10_000, 120_000, 10_000, 140_000]
    assert found[0].predicted == pytest.approx(10_000)  # by which a request is reckoned
    assert found[3].predicted > found[1].predicted > 100_000
    assert found[1].is_near
    assert found[3].is_near


def test_what_a_measured_file_lacks_is_said_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lacks a cluster of 2; .* bench scale --nodes 1,2,4,8"):
        predictions(_scale_file(tmp_path, "1 nodes", "3 nodes"))
    empty = tmp_path / "empty.json"
    empty.write_text('{"rows": []}')
    with pytest.raises(ValueError, match="lacks the row 'block, peer: CPU of all"):
        predictions(empty)
