"""Loads of a checkpoint on a mount, and of KV blocks: against plain reads, memcpy, other loaders.

The checkpoint has four shards. Each way to load it runs in a process of its own, all of them in
each round, in turn. Prints a table of medians and ratios with each target, then one JSON object.
"""

import argparse
import sys
import time
from typing import Final

from benchmarks import _block_rows, _loader_rows, _program, _rank_rows, _wheels
from benchmarks._interleave import Results, run
from benchmarks._systems import Kvfs, System, settle

_QUICK_S: Final = 60.0
_FULL_S: Final = 600.0
_say: Final = _program.teller("gds")


def main() -> int:
    began = time.monotonic()
    options = _options()
    blocks = _block_rows.QUICK if options.quick else _block_rows.FULL
    groups = [*_loader_rows.groups(), *_rank_rows.groups(), *_block_rows.groups(blocks)]
    groups = _program.chosen(groups, options.rows)
    results = Results()
    with _program.place(options.dir, _say) as place:
        systems, left_out = _start(place, options)
        run(
            groups,
            systems,
            results,
            rounds=options.rounds or (3 if options.quick else 7),
            deadline=began + (_QUICK_S if options.quick else _FULL_S),
            watch=place.guard.watch,
            say=_say,
        )
    plain = next(system for system in systems if isinstance(system, _loader_rows.Raw))
    plain.settle(results)
    if plain.best:
        _say(f"native, cold: {plain.best}")
    _program.conclude(
        "gds",
        options,
        _program.rows_of(groups, options.rows),
        [each.name for each in systems],
        results,
        left_out,
        loaders=_wheels.LOADERS,
        plain_reads=plain.forms(),
    )
    return 0


def _start(
    place: _program.Place, options: argparse.Namespace
) -> tuple[list[System], dict[str, str]]:
    node = Kvfs("kvfs", place.base / "kvfs", "auto", "--no-s3")
    place.stack.callback(node.stop)
    node.start(place.guard)
    scale = _loader_rows.QUICK if options.quick else _loader_rows.FULL
    checkpoint = _loader_rows.Checkpoint(node, scale)
    checkpoint.write()
    settle([node], 30.0)
    wanted = _loader_rows.ways(checkpoint, peers=not options.no_peers)
    return _program.start(wanted, place, _say)


def _options() -> argparse.Namespace:
    return _program.parser(
        "gds",
        __doc__,
        quick="a checkpoint of 1 GiB, ends within two minutes",
        rounds="default 7, quick 3",
        peers="without the other loaders",
    ).parse_args()


if __name__ == "__main__":
    sys.exit(main())
