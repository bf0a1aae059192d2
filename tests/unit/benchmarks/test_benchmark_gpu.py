"""How the benchmark of loads into GPUs counts."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks import _gpu_rows
from benchmarks._interleave import NATIVE, Group, Results, run
from benchmarks._systems import System

FAST = [1e9, 8e9, 8e9, 8e9]
"""Bytes a second, of the warm-up first."""
SLOW = [9e9, 2e9, 3e9, 4e9]


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _gpu_rows.Plain:
    """Two forms of reads that were made up, and one that fails."""
    fast, slow = iter(FAST), iter(SLOW)

    def fails(_path: Path) -> float:
        raise ImportError("kvikio is not installed")

    forms = [("fast", lambda _path: next(fast)), ("slow", lambda _path: next(slow)), ("no", fails)]
    monkeypatch.setattr(_gpu_rows, "_forms", lambda: iter(forms))
    monkeypatch.setattr(_gpu_rows, "copy_rate", lambda: 20.0)
    monkeypatch.setattr(f"{_gpu_rows.__name__}._cold.make_cold", lambda _paths: None)
    (tmp_path / "a").write_bytes(b"x")
    return _gpu_rows.Plain(tmp_path / "a")


def measured(plain: _gpu_rows.Plain, rows: str) -> Results:
    """Three rounds of the groups whose rows' names contain `rows`, after a warm-up."""
    results = Results()
    groups = [each for each in _gpu_rows.groups() if rows in each.rows[0].name]
    plain.warm_up()
    ours = _Ours(plain.root)
    asked = [Group(each.rows, lambda way, g=each: _measure(g, way)) for each in groups]
    run(
        asked,
        [plain, ours],
        results,
        rounds=3,
        deadline=float("inf"),
        watch=lambda _seconds: None,
        say=lambda _text: None,
    )
    return results


class _Ours(System):
    """4 GB/s in each round."""

    def __init__(self, directory: Path) -> None:
        super().__init__(_gpu_rows.GDS, directory)


def _measure(group: Group, system: System) -> Mapping[str, float | None]:
    if isinstance(system, _Ours):
        return {row.name: 4.0 for row in group.rows}
    return group.measure(system)


@pytest.mark.parametrize("rows", ["cold", "warm"])
def test_the_form_with_the_best_median_is_the_native_speed_of_each_round(
    plain: _gpu_rows.Plain, rows: str
) -> None:
    results = measured(plain, rows)
    found = plain.settle(results)
    row = next(each for group in _gpu_rows.groups() for each in group.rows if rows in each.name)
    assert results.samples[row.name][NATIVE] == [8.0, 8.0, 8.0]
    assert results.ratio(row, _gpu_rows.GDS, NATIVE) == 0.5
    assert found == {row.name: {"fast": 8.0, "slow": 3.0, "no": None}}


@pytest.mark.parametrize(
    ("copies", "seconds"),
    [
        ([], 0),
        ([(1, 2), (3, 5)], 3),
        ([(3, 5), (1, 4)], 4),
        ([(1, 9), (2, 3), (4, 5)], 8),
    ],
)
def test_time_in_which_copies_overlap_counts_once(
    copies: list[tuple[float, float]], seconds: float
) -> None:
    assert _gpu_rows.busy_s(copies) == seconds
