"""Two nodes of one cluster against bare processes and JuiceFS on the same metadata server.

All of it runs on this host, over its loopback. Each round measures all systems, in turn. Prints a
table of medians and ratios with each target, then one JSON object.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Final

from benchmarks import _program, _several, _several_rows, _wheels
from benchmarks._interleave import Results, run
from benchmarks._systems import JuiceFs, System

_QUICK_S: Final = 45.0
_FULL_S: Final = 900.0
_FAR_S: Final = 0.02
_say: Final = _program.teller("nodes")


def main() -> int:
    began = time.monotonic()
    options = _options()
    scale = _several_rows.QUICK if options.quick else _several_rows.FULL
    groups = _program.chosen(_several_rows.groups(scale), options.rows)
    results = Results()
    with _program.place(options.dir, _say) as place:
        server = place.stack.enter_context(_several.running(place.base, place.guard))
        wanted = _wanted(place.base, server, peers=not options.no_peers)
        systems, left_out = _program.start(wanted, place, _say)
        _program.prepare(groups, systems, place.guard, 10.0, _say)
        run(
            groups,
            systems,
            results,
            rounds=options.rounds or (3 if options.quick else 7),
            deadline=began + (_QUICK_S if options.quick else _FULL_S),
            watch=place.guard.watch,
            say=_say,
        )
    _program.conclude(
        "nodes",
        options,
        _program.rows_of(groups, options.rows),
        [each.name for each in systems],
        results,
        left_out,
        server=server.name,
        far_s=_FAR_S,
        juicefs=_wheels.RELEASES["juicefs"],
    )
    return 0


def _wanted(base: Path, server: _several.Server, *, peers: bool) -> list[System]:
    nodes = _several.Nodes(base, server)
    systems: list[System] = [
        _several.Plain(base / "plain", server),
        nodes,
        _several.Level(_several.STRICT, nodes, "strict"),
        _several.Far(base, server, _FAR_S),
    ]
    if peers:
        systems.append(JuiceFs(base / "juicefs", server.url(1)))
    return systems


def _options() -> argparse.Namespace:
    return _program.parser(
        "nodes",
        __doc__,
        quick="small amounts, ends within 90 s",
        rounds="default 7, quick 3",
        peers="without JuiceFS",
    ).parse_args()


if __name__ == "__main__":
    sys.exit(main())
