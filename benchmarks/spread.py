"""Writers in one, two and four namespaces on one metadata server, and on namespaces that are spread
over four.

Each system is a node with its mount on a Redis cluster of its own: of one server, which has all
namespaces in one log, and of four, after `kvfs engine spread`. Eight writers make files of 4 KiB.
All of it shares this host's processors, so what a file costs the servers says more than its rate.
Prints a table of medians and ratios, then one JSON object. With `--join`, instead of all that: what
it takes a node to join beside a namespace of so many files.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Final

from benchmarks import _join_rows, _program, _report, _spread_rows
from benchmarks._interleave import Results, run

_QUICK_S: Final = 240.0
_FULL_S: Final = 900.0
_say: Final = _program.teller("spread")


def main() -> int:
    began = time.monotonic()
    options = _options()
    if options.join:
        return _join(options)
    extent = _spread_rows.QUICK if options.quick else _spread_rows.FULL
    groups = _program.chosen(_spread_rows.groups(extent), options.rows)
    results = Results()
    with _program.place(options.dir, _say) as place:
        wanted = [
            _spread_rows.Site(_spread_rows.ONE, place.base / "one", 1),
            _spread_rows.Site(_spread_rows.SPREAD, place.base / "spread", 4),
        ]
        systems, left_out = _program.start(wanted, place, _say)
        run(
            groups,
            systems,
            results,
            rounds=options.rounds or (1 if options.quick else 5),
            deadline=began + (_QUICK_S if options.quick else _FULL_S),
            watch=place.guard.watch,
            say=_say,
        )
    _program.conclude(
        "spread",
        options,
        _program.rows_of(groups, options.rows),
        [each.name for each in systems],
        results,
        left_out,
    )
    return 0


def _join(options: argparse.Namespace) -> int:
    with _program.place(options.dir, _say) as place:
        figures = _join_rows.measure(place.base / "join", place.guard, options.join, _say)
    for name, value in figures.items():
        print(f"{name:52} {value:10.2f}")
    conditions = _report.conditions(Path(options.dir))
    report = {"benchmark": "spread", "join": options.join, "conditions": conditions}
    _program.print_json({**report, "figures": figures}, options.json)
    return 0


def _options() -> argparse.Namespace:
    parser = _program.parser(
        "spread",
        __doc__,
        quick="few files, ends within 5 minutes",
        rounds="default 5, quick 1",
    )
    parser.add_argument("--join", type=int, metavar="FILES", help="a node joins beside so many")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
