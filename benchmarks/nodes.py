"""Two nodes of one cluster against bare processes and JuiceFS on the same metadata server.

All of it runs on this host, over its loopback. Each round measures all systems, in turn. Prints a
table of medians and ratios with each target, then one JSON object.
"""

import argparse
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from benchmarks import _program, _report, _several, _several_rows, _wheels
from benchmarks._guard import Guard
from benchmarks._interleave import Results, run
from benchmarks._systems import JuiceFs, System

_QUICK_S: Final = 45.0
_FULL_S: Final = 900.0
_FAR_S: Final = 0.02
_say: Final = _program.teller("nodes")


def main() -> int:
    began = time.monotonic()
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    base = Path(tempfile.mkdtemp(prefix="kvfs-bench-", dir=options.dir))
    scale = _several_rows.QUICK if options.quick else _several_rows.FULL
    groups = _program.chosen(_several_rows.groups(scale), options.rows)
    results = Results()
    try:
        with ExitStack() as stack:
            guard = stack.enter_context(Guard())
            guard.directory(base)
            server = stack.enter_context(_several.running(base, guard))
            wanted = _wanted(base, server, peers=not options.no_peers)
            systems, left_out = _program.start(wanted, guard, stack, _say)
            _program.prepare(groups, systems, guard, 10.0, _say)
            run(
                groups,
                systems,
                results,
                rounds=options.rounds or (3 if options.quick else 7),
                deadline=began + (_QUICK_S if options.quick else _FULL_S),
                watch=guard.watch,
                say=_say,
            )
    except KeyboardInterrupt:
        _say("interrupted; everything is unmounted")
        return 130
    rows = [row for group in groups for row in group.rows]
    rows = [row for row in rows if _program.matches(row, options.rows)]
    names = [system.name for system in systems]
    report = {
        "benchmark": "nodes",
        "quick": options.quick,
        "conditions": _report.conditions(Path(options.dir)),
        "server": server.name,
        "far_s": _FAR_S,
        "juicefs": _wheels.RELEASES["juicefs"],
        "left_out": left_out,
        "rows": _report.as_json(rows, names, results),
    }
    _program.print_report(report, _report.table(rows, names, results), options.json)
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
