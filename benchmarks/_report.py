"""The table for people, the JSON object for machines, and the conditions both were made under."""

import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._interleave import JUICEFS, Results, Row


def conditions(base: Path) -> dict[str, Any]:
    """Of the machine, and what its filesystem under `base` is."""
    return {
        "kernel": platform.release(),
        "python": platform.python_version(),
        "interpreter": str(Path(sys.executable).resolve()),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "filesystem": filesystem_type(base),
        "load_average": os.getloadavg()[0],
    }


def available_bytes() -> int:
    """Memory that programs may still take."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    told = dict(line.split(":", 1) for line in lines)
    return int(told["MemAvailable"].split()[0]) << 10


def filesystem_type(path: Path) -> str:
    """As /proc/self/mountinfo names it."""
    best, kind = Path("/"), "unknown"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        fields = line.split()
        place = Path(fields[4])
        if path.resolve().is_relative_to(place) and len(place.parts) >= len(best.parts):
            best, kind = place, fields[fields.index("-") + 1]
    return kind


def as_json(rows: Sequence[Row], systems: Sequence[str], results: Results) -> list[dict[str, Any]]:
    return [_row_as_json(row, systems, results) for row in rows]


def _row_as_json(row: Row, systems: Sequence[str], results: Results) -> dict[str, Any]:
    measured = {}
    for system in systems:
        if system not in results.samples.get(row.name, {}):
            continue
        measured[system] = {
            "median": results.median(row.name, system),
            "ratio": results.ratio(row, system, row.base),
            "ratio_to_juicefs": results.ratio(row, system, JUICEFS),
            "targets": [
                {"target": str(target), "met": results.meets(row, system, target)}
                for target in row.targets.get(system, ())
            ],
            "samples": results.samples[row.name][system],
            "error": results.failures.get(row.name, {}).get(system),
        }
    return {"row": row.name, "unit": row.unit, "base": row.base, "systems": measured}


def table(rows: Sequence[Row], systems: Sequence[str], results: Results) -> str:
    """A column for each system: its median, and in brackets its speed relative to the row's base.
    Then each target: met or missed.
    """
    lines = [["", "unit", *systems, "targets"]]
    for row in rows:
        cells = [_cell(row, system, results) for system in systems]
        lines.append([row.name, row.unit, *cells, _verdicts(row, systems, results)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if number in (0, len(line) - 1) else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _cell(row: Row, system: str, results: Results) -> str:
    value = results.median(row.name, system)
    if value is None:
        return "failed" if system in results.failures.get(row.name, {}) else "-"
    ratio = None if system == row.base else results.ratio(row, system, row.base)
    return _figure(value) + (f" ({ratio:.2f})" if ratio is not None else "")


def _figure(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _verdicts(row: Row, systems: Sequence[str], results: Results) -> str:
    """'≥ 0.8: met, missed' in the order of the columns; one text where all say the same."""
    parts = []
    for system in systems:
        for target in row.targets.get(system, ()):
            met = results.meets(row, system, target)
            unjudged = "beyond native" if results.is_beyond(row, target) else "not measured"
            word = {True: "met", False: "MISSED", None: unjudged}[met]
            parts.append(f"{system} {target} {word}")
    return "; ".join(parts)
