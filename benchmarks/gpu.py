"""Loads of a file into a GPU: against plain reads with copies, kvikio and safetensors.

On a plain directory: a load reads the data file, not the mount. Prints a table of medians and
ratios with each target, then one JSON object; without a GPU, that nothing was measured.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, Final

from benchmarks import _gpu_rows, _program
from benchmarks._interleave import Results, run
from benchmarks._load import MIB
from gds.probe.capability import Capability, probe

_QUICK_S: Final = 60.0
_FULL_S: Final = 300.0
_QUICK_TENSORS: Final = 16
_FULL_TENSORS: Final = 64
"""Of 64 MiB."""
_say: Final = _program.teller("gpu")


def main() -> int:
    began = time.monotonic()
    options = _options()
    machine = probe(options.dir)
    why_not = _missing(machine)
    if why_not:
        print(f"not measured: no CUDA device: {why_not}")
        print(json.dumps({"benchmark": "gpu", "not_measured": why_not, "rows": []}))
        return 0
    groups = _program.chosen(_gpu_rows.groups(), options.rows)
    results = Results()
    with _program.place(options.dir, _say) as place:
        file = place.base / "model.safetensors"
        _write(file, _QUICK_TENSORS if options.quick else _FULL_TENSORS)
        ways = _gpu_rows.ways(file)
        _warm_up(ways)
        run(
            groups,
            ways,
            results,
            rounds=options.rounds or (3 if options.quick else 5),
            deadline=began + (_QUICK_S if options.quick else _FULL_S),
            watch=place.guard.watch,
            say=_say,
        )
        size = file.stat().st_size
    (plain,) = (way for way in ways if isinstance(way, _gpu_rows.Plain))
    plain_reads = plain.settle(results)
    _program.conclude(
        "gpu",
        options,
        _program.rows_of(groups, options.rows),
        [each.name for each in ways],
        results,
        {},
        conditions=_conditions(machine),
        file_bytes=size,
        plain_reads=plain_reads,
    )
    return 0


def _missing(machine: Capability) -> str:
    """Why nothing can be measured; empty where it can."""
    if not machine.cuda.gpus:
        return machine.cuda.reason
    try:
        import torch
    except ImportError as error:
        return str(error)
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} finds none"


def _write(file: Path, tensors: int) -> None:
    """Random bytes, as bf16."""
    import torch

    import gds

    blocks = [torch.randint(0, 256, (64 * MIB,), dtype=torch.uint8) for _ in range(tensors)]
    gds.save_file({f"t{n}": block.view(torch.bfloat16) for n, block in enumerate(blocks)}, file)


def _warm_up(ways: list[_gpu_rows.Way]) -> None:
    """Contexts, pinned memory and the allocator's are made by the first load of a process."""
    for way in ways:
        try:
            way.warm_up()
        except Exception as error:
            _say(f"{way.name}: {error}")


def _conditions(machine: Capability) -> dict[str, Any]:
    import torch

    return {
        "gpu": machine.cuda.gpus[0].name,
        "driver": machine.driver,
        "cuda": machine.cuda.cuda,
        "torch": str(torch.__version__),
        "kvikio": machine.kvikio.version,
        "cufile_mode": machine.mode.value,
        "cufile_reason": machine.mode_reason,
    }


def _options() -> argparse.Namespace:
    return _program.parser(
        "gpu", __doc__, quick="a file of 1 GiB instead of 4", rounds="default 5, quick 3"
    ).parse_args()


if __name__ == "__main__":
    sys.exit(main())
