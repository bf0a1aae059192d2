"""The way of a benchmark's program: a place made, systems started, data prepared, the report
printed."""

import argparse
import json
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks import _report
from benchmarks._guard import Guard
from benchmarks._interleave import Group, Results, Row
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


class Place(NamedTuple):
    """Where a benchmark runs."""

    base: Path
    """The directory of all that it stores."""
    guard: Guard
    stack: ExitStack
    """What is stopped at the end."""


@contextmanager
def place(directory: str, say: Callable[[str], None]) -> Iterator[Place]:
    """All of it is taken away at the end, however that comes: SIGINT ends the program with 130,
    SIGTERM with 143."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    base = Path(tempfile.mkdtemp(prefix="kvfs-bench-", dir=directory))
    try:
        with ExitStack() as stack:
            guard = stack.enter_context(Guard())
            guard.directory(base)
            yield Place(base, guard, stack)
    except KeyboardInterrupt:
        say("interrupted; all is taken away")
        sys.exit(130)


def start(
    wanted: Sequence[System], place: Place, say: Callable[[str], None]
) -> tuple[list[System], dict[str, str]]:
    """What runs, and why the rest does not."""
    systems, absent = [], {}
    for system in wanted:
        place.stack.callback(system.stop)
        try:
            system.start(place.guard)
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


def rows_of(groups: Sequence[Group], pattern: str | None) -> list[Row]:
    return [row for group in groups for row in group.rows if matches(row, pattern)]


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


def conclude(
    name: str,
    options: argparse.Namespace,
    rows: Sequence[Row],
    names: Sequence[str],
    results: Results,
    left_out: Mapping[str, str],
    *,
    conditions: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
    **said: object,
) -> None:
    """Print what was measured of the systems of these names. `conditions`: beyond those of every
    benchmark; `notes`: lines below the table; `said`: what else the JSON object has."""
    report = {
        "benchmark": name,
        "quick": options.quick,
        "conditions": {**_report.conditions(Path(options.dir)), **(conditions or {})},
        **said,
        "left_out": left_out,
        "rows": _report.as_json(rows, names, results),
    }
    print("\n".join([_report.table(rows, names, results), *notes]))
    for system, error in report["left_out"].items():
        print(f"{system} was left out: {error}")
    for row in report["rows"]:
        for system, measured in row["systems"].items():
            if measured["error"]:
                print(f"{row['row']}: {system} failed: {measured['error']}")
    print_json(report, options.json)


def print_json(report: Mapping[str, Any], file: Path | None) -> None:
    """`file` is where it goes too."""
    print(json.dumps(report, ensure_ascii=False))
    if file:
        file.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
