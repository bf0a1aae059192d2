"""What each request of the mount and of S3 costs: Python calls, commits, processor time, latency.

A node of this checkout, beside one of another where that is named, interleaved. Calls are those
of Python functions in the daemon's main thread (a coroutine that goes on counts again), in passes
of their own: what is timed is not counted. Each flow has all requests that the kernel makes for it.
Prints a table of medians and ratios, then one JSON object.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Final

from benchmarks import _program, _request_rows, _s3_request_rows
from benchmarks._interleave import BEFORE, Results, run
from benchmarks._request_rows import Measured
from benchmarks._systems import System

_MODES: Final = ("passthrough", "relay")
_QUICK_S: Final = 40.0
_FULL_S: Final = 600.0
_QUICK_COUNT: Final = 300
_FULL_COUNT: Final = 2_000
_SHOWN: Final = 400
_say: Final = _program.teller("requests")


def main() -> int:
    began = time.monotonic()
    options = _options()
    with _program.place(options.dir, _say) as place:
        systems, left_out = _program.start(_wanted(options, place.base), place, _say)
        if options.profile is not None:
            _print_profiles(systems, options.profile)
            return 0
        count = _QUICK_COUNT if options.quick else _FULL_COUNT
        groups = _program.chosen(
            [*_request_rows.groups(count), *_s3_request_rows.groups(count)], options.rows
        )
        results = Results()
        run(
            groups,
            systems,
            results,
            rounds=options.rounds or (2 if options.quick else 5),
            deadline=began + (_QUICK_S if options.quick else _FULL_S),
            watch=place.guard.watch,
            say=_say,
        )
    _program.conclude(
        "requests",
        options,
        _program.rows_of(groups, options.rows),
        [each.name for each in systems],
        results,
        left_out,
        conditions={"against": [str(each) for each in options.against]},
    )
    return 0


def _options() -> argparse.Namespace:
    parser = _program.parser(
        "requests", __doc__, quick="few requests, ends within 60 s", rounds="default 5, quick 2"
    )
    parser.add_argument(
        "--mode", choices=_MODES, default=_MODES[0], help=f"of the mount; default {_MODES[0]}"
    )
    parser.add_argument(
        "--against",
        type=Path,
        action="append",
        default=[],
        metavar="CHECKOUT",
        help="another checkout of the project, with its .venv (./dev kvfs there makes it); the"
        " first is what others are compared with, further ones are named by their directories",
    )
    parser.add_argument(
        "--profile",
        metavar="FLOW",
        help="instead: which functions are called how often in flows with this in their name",
    )
    return parser.parse_args()


def _wanted(options: argparse.Namespace, base: Path) -> list[System]:
    mode = options.mode
    others: dict[str, Path] = {}
    for checkout in options.against:
        others[checkout.resolve().name if others else BEFORE] = checkout
    return [
        *(Measured(name, base / name, mode, checkout) for name, checkout in others.items()),
        Measured(mode, base / mode, mode, None),
    ]


def _print_profiles(systems: Sequence[System], pattern: str) -> None:
    for system in systems:
        assert isinstance(system, Measured)
        flows = (_request_rows.profile, _s3_request_rows.profile)
        for name, functions in chain.from_iterable(each(system, pattern) for each in flows):
            total = sum(times for _, times in functions)
            print(f"{system.name}, {name}: {total:.1f} calls")
            for function, times in functions[:_SHOWN]:
                print(f"  {times:6.2f}  {function}")


if __name__ == "__main__":
    sys.exit(main())
