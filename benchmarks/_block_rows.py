"""The rows of KV blocks: many read into one buffer of the CPU from a warm cache, against copying as
many bytes within memory with as many threads."""

import ctypes
import functools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import gds
import kvfs
from benchmarks._interleave import NATIVE, Group, Row, Target
from benchmarks._load import MIB
from benchmarks._loader_rows import GDS, Way
from benchmarks._systems import Kvfs, System, settle
from gds.io.memory import allocate
from kvfs.session.session import WORKERS

_BLOCK_BYTES: Final = 2 * MIB
_THREADS: Final = WORKERS + 1
"""That a client reads with: its own, and the caller's."""


@dataclass(frozen=True)
class Scale:
    """How much is done in one measurement."""

    blocks: int
    turns: int


QUICK: Final = Scale(64, 3)
FULL: Final = Scale(256, 3)


def groups(scale: Scale) -> list[Group]:
    targets = {GDS: [Target("of_native", 0.8)]}
    what = f"{scale.blocks} x {_BLOCK_BYTES // MIB} MiB, warm"
    return [
        _group(Row(f"read_blocks {what}", "GB/s", True, targets), scale, verify=False),
        _group(Row(f"read_blocks {what}, verified", "GB/s", True), scale, verify=True),
    ]


def _group(row: Row, scale: Scale, *, verify: bool) -> Group:
    def measure(system: System) -> Mapping[str, float]:
        if system.name == NATIVE:
            return {row.name: _copy(scale)}
        assert isinstance(system, Way)
        return {row.name: _read(system.checkpoint.node, scale, verify=verify)}

    return Group([row], measure, applies=lambda each: each.name in (NATIVE, GDS))


@functools.cache
def _memory(size: int, _which: str) -> memoryview:
    """That the machine has given already."""
    found = allocate(size)
    ctypes.memset(_address(found), 1, size)
    return found


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _copy(scale: Scale) -> float:
    size = scale.blocks * _BLOCK_BYTES
    target, source = (_address(_memory(size, which)) for which in ("target", "source"))

    def work(_: int) -> None:
        for at in rest:
            ctypes.memmove(target + at, source + at, _BLOCK_BYTES)

    with ThreadPoolExecutor(_THREADS) as pool:

        def copy() -> None:
            nonlocal rest
            rest = iter(range(0, size, _BLOCK_BYTES))
            list(pool.map(work, range(_THREADS)))

        rest = iter(range(0))
        return _speed(copy, scale)


def _read(node: Kvfs, scale: Scale, *, verify: bool) -> float:
    keys = [node.inside(node.root / f"block-{number}") for number in range(scale.blocks)]
    size = scale.blocks * _BLOCK_BYTES
    buffer = _memory(size, "target")
    with kvfs.Client(node.store) as client:
        if not all(client.exists(keys)):
            _require_all(gds.write_blocks(keys, _memory(size, "source"), client=client))
            settle([node], 30.0)  # until they have checksums
        return _speed(
            lambda: _require_all(gds.read_blocks(keys, buffer, client=client, verify=verify)), scale
        )


def _require_all(found: list[gds.Block]) -> None:
    for each in found:
        if not each.ok:
            raise RuntimeError(f"a block was no hit: {each.outcome} {each.error}")


def _speed(step: Callable[[], object], scale: Scale) -> float:
    """GB/s; the first turn, which starts threads, does not count."""
    step()
    began = time.perf_counter()
    for _ in range(scale.turns):
        step()
    seconds = time.perf_counter() - began
    return scale.blocks * _BLOCK_BYTES * scale.turns / seconds / 1e9
