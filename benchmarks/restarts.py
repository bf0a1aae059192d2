"""What programs wait for while the daemon of a mount that outlives it is replaced, or killed.

A node in each mode, in whose mount the kernel knows 100,000 files and has 1,000 open. Beside calls
on names, reads and faults of mappings, `kvfs restart` has another daemon go on, and `kill -9` ends
the running one, in turn. A call that fails fails the row. Prints a table of medians with each
target, then one JSON object with every sample.
"""

import argparse
import sys
import time
from typing import Final

from benchmarks import _program, _restart_rows
from benchmarks._interleave import Results, run
from benchmarks._systems import Kvfs

_MODES: Final = ("passthrough", "relay")
_OUTLIVES: Final = ("--takeover-s", "60")
_QUICK_ROUNDS: Final = 1
_FULL_ROUNDS: Final = 7
_LIMIT_S: Final = 3_600.0
_SETTLE_S: Final = 30.0
_QUICK: Final = _restart_rows.Scale(2_000, 100)
_FULL: Final = _restart_rows.Scale(100_000, 1_000)
_say: Final = _program.teller("restarts")


def main() -> int:
    options = _options()
    with _program.place(options.dir, _say) as place:
        wanted = [Kvfs(mode, place.base / mode, mode, *_OUTLIVES) for mode in _MODES]
        systems, left_out = _program.start(wanted, place, _say)
        scale = _QUICK if options.quick else _FULL
        groups = _program.chosen(_restart_rows.groups(scale), options.rows)
        results = Results()
        _program.prepare(groups, systems, place.guard, _SETTLE_S, _say)
        run(
            groups,
            systems,
            results,
            rounds=options.rounds or (_QUICK_ROUNDS if options.quick else _FULL_ROUNDS),
            deadline=time.monotonic() + _LIMIT_S,
            watch=place.guard.watch,
            say=_say,
        )
    _program.conclude(
        "restarts",
        options,
        _program.rows_of(groups, options.rows),
        [each.name for each in systems],
        results,
        left_out,
        known=scale.known,
        opened=scale.opened,
    )
    return 0


def _options() -> argparse.Namespace:
    return _program.parser(
        "restarts",
        __doc__,
        quick="2,000 files, 100 open",
        rounds="default 7, quick 1",
    ).parse_args()


if __name__ == "__main__":
    sys.exit(main())
