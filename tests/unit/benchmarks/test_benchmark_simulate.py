"""The simulation of a cluster: what it is to show of the policies, at a tenth of its size."""

from typing import Any

import pytest

from benchmarks.simulate import simulate


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
