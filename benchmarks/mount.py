"""The mount against the native directory and JuiceFS, interleaved: throughput, names, memory,
start.

Each mode of KVFS is a node of its own, beside a plain directory on the same filesystem and a
JuiceFS with its local metadata engine. Everything lies in one scratch directory that is removed at
the end, with the mounts and daemons, however the run ends. Prints a table of medians and ratios
with each target, then one JSON object.
"""

import argparse
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks import _mount_rows, _node_rows, _report
from benchmarks._cold import can_drop_globally
from benchmarks._guard import Guard
from benchmarks._interleave import NATIVE, Group, Results, Row, run
from benchmarks._systems import JUICEFS_RELEASE, JuiceFs, Kvfs, System, Unavailable, settle

_MODES: Final = ("passthrough", "relay", "libfuse")
_QUICK_S: Final = 46.0  # then one more round of a group, and the end of all systems
_FULL_S: Final = 3600.0
_QUICK_LAST_S: Final = 8.0
_FULL_LAST_S: Final = 300.0
_QUICK_ROUNDS: Final = 3
_FULL_ROUNDS: Final = 7
_PREPARE_S: Final = 300.0


def main() -> int:
    began = time.monotonic()
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    base = Path(tempfile.mkdtemp(prefix="kvfs-bench-", dir=options.dir))
    try:
        with ExitStack() as stack:
            guard = stack.enter_context(Guard())
            guard.directory(base)
            systems, left_out = _start(_wanted(options, base), guard, stack)
            rows, results = _measure(options, systems, guard, began)
    except KeyboardInterrupt:
        _say("interrupted; everything is unmounted")
        return 130
    names = [system.name for system in systems]
    report = {
        "benchmark": "mount",
        "quick": options.quick,
        "conditions": _report.conditions(Path(options.dir)),
        "cold_by": "drop_caches" if can_drop_globally() else "fadvise on the backing files",
        "juicefs": f"{JUICEFS_RELEASE}, {options.juicefs_engine}",
        "left_out": left_out,
        "rows": _report.as_json(rows, names, results),
    }
    _print(options, report, _report.table(rows, names, results))
    return 0


def _measure(
    options: argparse.Namespace, systems: Sequence[System], guard: Guard, began: float
) -> tuple[list[Row], Results]:
    deadline = began + (_QUICK_S if options.quick else _FULL_S)
    scale = _mount_rows.QUICK if options.quick else _mount_rows.FULL
    rounds = options.rounds or (_QUICK_ROUNDS if options.quick else _FULL_ROUNDS)
    results = Results()
    first = _chosen(_node_rows.first_groups(), options.rows)
    middle = _chosen(_mount_rows.groups(scale), options.rows)
    last = _chosen(_node_rows.last_groups(scale), options.rows)

    def measure(groups: Sequence[Group], until: float) -> None:
        run(groups, systems, results, rounds=rounds, deadline=until, watch=guard.watch, say=_say)

    measure(first, deadline)
    _prepare([*middle, *last], systems, guard, 4.0 if options.quick else 60.0)
    reserved = (_QUICK_LAST_S if options.quick else _FULL_LAST_S) if last else 0.0
    measure(middle, deadline - reserved)
    measure(last, deadline)
    rows = [row for group in (*first, *middle, *last) for row in group.rows]
    return [row for row in rows if _matches(row, options.rows)], results


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev bench mount", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small amounts, ends within 60 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON object there too")
    parser.add_argument("--rounds", type=int, metavar="N", help="default 7, quick 3")
    parser.add_argument(
        "--mode",
        choices=(*_MODES, "all"),
        help="only this mode of the mount; default passthrough and relay",
    )
    parser.add_argument("--rows", metavar="PATTERN", help="only rows whose name matches (a regex)")
    parser.add_argument("--no-peers", action="store_true", help="without JuiceFS")
    parser.add_argument(
        "--juicefs-engine", choices=("sqlite3", "badger"), default="sqlite3", help="default sqlite3"
    )
    parser.add_argument("--dir", default="/var/tmp", help="where all is stored; default /var/tmp")
    return parser.parse_args()


def _wanted(options: argparse.Namespace, base: Path) -> list[System]:
    modes: Sequence[str] = _MODES[:2]
    if options.mode:
        modes = _MODES if options.mode == "all" else (options.mode,)
    systems: list[System] = [System(NATIVE, base / "native")]
    systems += [Kvfs(mode, base / mode, mode) for mode in modes]
    if not options.no_peers:
        systems.append(JuiceFs(base / "juicefs", options.juicefs_engine))
    return systems


def _start(
    wanted: Sequence[System], guard: Guard, stack: ExitStack
) -> tuple[list[System], dict[str, str]]:
    """What runs, and why the rest does not."""
    systems, absent = [], {}
    for system in wanted:
        stack.callback(system.stop)
        try:
            system.start(guard)
        except (Unavailable, OSError) as error:
            absent[system.name] = str(error)
            _say(f"{system.name} is left out: {error}")
        else:
            systems.append(system)
    return systems, absent


def _matches(row: Row, pattern: str | None) -> bool:
    return pattern is None or re.search(pattern, row.name, re.IGNORECASE) is not None


def _chosen(groups: Sequence[Group], pattern: str | None) -> list[Group]:
    return [group for group in groups if any(_matches(row, pattern) for row in group.rows)]


def _prepare(
    groups: Sequence[Group], systems: Sequence[System], guard: Guard, settle_s: float
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
                _say(f"{system.name}: no data for {group.rows[0].name}: {error}")
    guard.watch(_PREPARE_S)
    settle(systems, settle_s)


def _print(options: argparse.Namespace, report: dict[str, Any], table: str) -> None:
    print(table)
    for system, error in report["left_out"].items():
        print(f"{system} was left out: {error}")
    for row in report["rows"]:
        for system, measured in row["systems"].items():
            if measured["error"]:
                print(f"{row['row']}: {system} failed: {measured['error']}")
    print(json.dumps(report, ensure_ascii=False))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")


def _say(text: str) -> None:
    print(f"bench mount: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
