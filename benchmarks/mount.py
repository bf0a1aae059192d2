"""The mount against the native directory and JuiceFS, interleaved: throughput, names, memory,
start.

Each mode of KVFS is a node of its own, beside a plain directory on the same filesystem and a
JuiceFS with its local metadata engine. Everything lies in one scratch directory that is removed at
the end, with the mounts and daemons, however the run ends. Prints a table of medians and ratios
with each target, then one JSON object.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks import _mount_rows, _node_rows, _program, _wheels
from benchmarks._cold import can_drop_globally
from benchmarks._guard import Guard
from benchmarks._interleave import NATIVE, Group, Results, Row, run
from benchmarks._systems import JuiceFs, Kvfs, System

_MODES: Final = ("passthrough", "relay", "libfuse")
_QUICK_S: Final = 46.0  # then one more round of a group, and the end of all systems
_FULL_S: Final = 3600.0
_QUICK_LAST_S: Final = 8.0
_FULL_LAST_S: Final = 300.0
_QUICK_ROUNDS: Final = 3
_FULL_ROUNDS: Final = 7
_say: Final = _program.teller("mount")


def main() -> int:
    began = time.monotonic()
    options = _options()
    with _program.place(options.dir, _say) as place:
        systems, left_out = _program.start(_wanted(options, place.base), place, _say)
        rows, results = _measure(options, systems, place.guard, began)
    _program.conclude(
        "mount",
        options,
        rows,
        [each.name for each in systems],
        results,
        left_out,
        cold_by="drop_caches" if can_drop_globally() else "fadvise on the backing files",
        juicefs=f"{_wheels.RELEASES['juicefs']}, {options.juicefs_engine}",
    )
    return 0


def _measure(
    options: argparse.Namespace, systems: Sequence[System], guard: Guard, began: float
) -> tuple[list[Row], Results]:
    deadline = began + (_QUICK_S if options.quick else _FULL_S)
    scale = _mount_rows.QUICK if options.quick else _mount_rows.FULL
    rounds = options.rounds or (_QUICK_ROUNDS if options.quick else _FULL_ROUNDS)
    results = Results()
    first = _program.chosen(_node_rows.first_groups(), options.rows)
    middle = _program.chosen(_mount_rows.groups(scale), options.rows)
    last = _program.chosen(_node_rows.last_groups(scale), options.rows)

    def measure(groups: Sequence[Group], until: float) -> None:
        run(groups, systems, results, rounds=rounds, deadline=until, watch=guard.watch, say=_say)

    measure(first, deadline)
    settle_s = 4.0 if options.quick else 60.0
    _program.prepare([*middle, *last], systems, guard, settle_s, _say)
    reserved = (_QUICK_LAST_S if options.quick else _FULL_LAST_S) if last else 0.0
    measure(middle, deadline - reserved)
    measure(last, deadline)
    return _program.rows_of([*first, *middle, *last], options.rows), results


def _options() -> argparse.Namespace:
    parser = _program.parser(
        "mount",
        __doc__,
        quick="small amounts, ends within 60 s",
        rounds="default 7, quick 3",
        peers="without JuiceFS",
    )
    parser.add_argument(
        "--mode",
        choices=(*_MODES, "all"),
        help="only this mode of the mount; default passthrough and relay",
    )
    parser.add_argument(
        "--juicefs-engine", choices=("sqlite3", "badger"), default="sqlite3", help="default sqlite3"
    )
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


if __name__ == "__main__":
    sys.exit(main())
