"""The S3 API against nginx, SeaweedFS, JuiceFS's gateway and rclone, interleaved: GET, PUT, DELETE,
lists, transfers by boto3, processor, memory.

One node with a cache bucket and a durable one, beside the others, all on the loopback interface and
with their data in one scratch directory; the load shares the processors with them. All of it is
removed at the end, with the processes, however the run ends. Prints a table of medians and ratios
(to nginx where it serves files, else to the best peer) with each target, then one JSON object.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Final

from benchmarks import _program, _s3_rows, _wheels
from benchmarks._interleave import JUICEFS, RCLONE, SEAWEEDFS, Results, Row, run
from benchmarks._s3_systems import (
    DurableBucket,
    JuiceFsGateway,
    KvfsServer,
    Nginx,
    RcloneServer,
    SeaweedFs,
)
from benchmarks._systems import System

_QUICK_S: Final = 32.0  # then one more round of a group, and the end of all systems
_FULL_S: Final = 900.0
_QUICK_ROUNDS: Final = 2
_FULL_ROUNDS: Final = 3
_PEERS: Final = {SEAWEEDFS: SeaweedFs, JUICEFS: JuiceFsGateway, RCLONE: RcloneServer}
_QUICK_PEERS: Final = (SEAWEEDFS,)
_say: Final = _program.teller("s3")


def main() -> int:
    began = time.monotonic()
    options = _options()
    load_before = os.getloadavg()[0]
    with _program.place(options.dir, _say) as place:
        systems, left_out = _program.start(_wanted(options, place.base), place, _say)
        rows, results = _measure(options, systems, place, began)
    _program.conclude(
        "s3",
        options,
        rows,
        [each.name for each in systems],
        results,
        left_out | _not_quick(options),
        conditions={"load_average_before": load_before},
        peers=sorted(_wheels.RELEASES.values()),
    )
    return 0


def _measure(
    options: argparse.Namespace, systems: list[System], place: _program.Place, began: float
) -> tuple[list[Row], Results]:
    scale = _s3_rows.QUICK if options.quick else _s3_rows.FULL
    groups = _program.chosen(_s3_rows.groups(scale, place.base), options.rows)
    _program.prepare(groups, systems, place.guard, 2.0 if options.quick else 30.0, _say)
    results = Results()
    run(
        groups,
        systems,
        results,
        rounds=options.rounds or (_QUICK_ROUNDS if options.quick else _FULL_ROUNDS),
        deadline=began + (_QUICK_S if options.quick else _FULL_S),
        watch=place.guard.watch,
        say=_say,
    )
    return _program.rows_of(groups, options.rows), results


def _options() -> argparse.Namespace:
    return _program.parser(
        "s3",
        __doc__,
        quick="small amounts, one peer, ends within 60 s",
        rounds="default 3, quick 2",
        peers="only nginx beside the node",
    ).parse_args()


def _wanted(options: argparse.Namespace, base: Path) -> list[System]:
    node = KvfsServer(base / "node")
    systems: list[System] = [node, DurableBucket(node), Nginx(base / "nginx")]
    if not options.no_peers:
        chosen = _QUICK_PEERS if options.quick else _PEERS
        systems += [_PEERS[name](base / name) for name in chosen]
    return systems


def _not_quick(options: argparse.Namespace) -> dict[str, str]:
    if not options.quick or options.no_peers:
        return {}
    return {name: "a quick run has one peer" for name in _PEERS if name not in _QUICK_PEERS}


if __name__ == "__main__":
    sys.exit(main())
