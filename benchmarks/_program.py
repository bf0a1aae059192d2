"""The way of a benchmark's program: systems started, data prepared, the report printed."""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks._guard import Guard
from benchmarks._interleave import Group, Row
from benchmarks._systems import System, Unavailable, settle

_PREPARE_S: Final = 300.0


def parser(
    name: str, about: str | None, *, quick: str, rounds: str, peers: str = ""
) -> argparse.ArgumentParser:
    """What all have; `quick`, `rounds` and `peers` (none: it has no peers) say what that means."""
    assert about is not None
    made = argparse.ArgumentParser(prog=f"dev bench {name}", description=about.splitlines()[0])
    made.add_argument("--quick", action="store_true", help=quick)
    made.add_argument("--json", type=Path, metavar="FILE", help="write the JSON object there too")
    made.add_argument("--rounds", type=int, metavar="N", help=rounds)
    made.add_argument("--rows", metavar="PATTERN", help="only rows whose name matches (a regex)")
    if peers:
        made.add_argument("--no-peers", action="store_true", help=peers)
    made.add_argument("--dir", default="/var/tmp", help="where all is stored; default /var/tmp")
    return made


def teller(name: str) -> Callable[[str], None]:
    """Tells how a benchmark goes on, beside its table."""

    def say(text: str) -> None:
        print(f"bench {name}: {text}", file=sys.stderr, flush=True)

    return say


def start(
    wanted: Sequence[System], guard: Guard, stack: ExitStack, say: Callable[[str], None]
) -> tuple[list[System], dict[str, str]]:
    """What runs, and why the rest does not."""
    systems, absent = [], {}
    for system in wanted:
        stack.callback(system.stop)
        try:
            system.start(guard)
        except (Unavailable, OSError) as error:
            absent[system.name] = str(error)
            say(f"{system.name} is left out: {error}")
        else:
            systems.append(system)
    return systems, absent


def matches(row: Row, pattern: str | None) -> bool:
    return pattern is None or re.search(pattern, row.name, re.IGNORECASE) is not None


def chosen(groups: Sequence[Group], pattern: str | None) -> list[Group]:
    return [group for group in groups if any(matches(row, pattern) for row in group.rows)]


def prepare(
    groups: Sequence[Group],
    systems: Sequence[System],
    guard: Guard,
    settle_s: float,
    say: Callable[[str], None],
) -> None:
    """Data sets for all; then waits until the daemons' work on them (checksums, uploads) has ended.

    A system that fails here fails again when it is measured, and is reported there.
    """
    for group in groups:
        for system in filter(group.applies, systems):
            guard.watch(_PREPARE_S)
            try:
                group.prepare(system)
            except Exception as error:
                say(f"{system.name}: no data for {group.rows[0].name}: {error}")
    guard.watch(_PREPARE_S)
    settle(systems, settle_s)


def print_report(report: dict[str, Any], table: str, file: Path | None) -> None:
    """`file` is where the JSON object goes too."""
    print(table)
    for system, error in report["left_out"].items():
        print(f"{system} was left out: {error}")
    for row in report["rows"]:
        for system, measured in row["systems"].items():
            if measured["error"]:
                print(f"{row['row']}: {system} failed: {measured['error']}")
    print(json.dumps(report, ensure_ascii=False))
    if file:
        file.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
