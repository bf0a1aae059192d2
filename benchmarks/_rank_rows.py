"""The rows of tensor-parallel ranks.

What one of four reads and how long that takes, of the whole; what four of one host, in processes of
their own, read from the disk together.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks._interleave import Group, Row, Target
from benchmarks._loader_rows import GDS, Way
from benchmarks._systems import System

_RANKS: Final = 4


def _row(name: str, at_most: float | None, unit: str = "of the whole") -> Row:
    return Row(name, unit, False, {GDS: (Target("at_most", at_most),)} if at_most else {})


_TIME: Final = _row("rank 0 of 4, cold: time", 0.6)
_BYTES: Final = _row("rank 0 of 4, cold: bytes from the disk", 0.50)
_STRIDED_TIME: Final = _row("the same, strided: time", None)
_STRIDED_BYTES: Final = _row("the same, strided: bytes from the disk", 0.30)


class _Start(NamedTuple):
    """How the ranks of a host come."""

    apart_s: float
    """Between two of them, as an engine's workers have some."""
    is_whole: bool
    """Each reads all, as vLLM's do."""


_TOGETHER: Final = {
    _Start(0.0, False): _row("4 ranks of one host, cold: bytes from the disk", 1.05),
    _Start(1.0, True): _row("4 ranks of one host, each reads all, 1 s apart: bytes", 1.05),
    _Start(1.0, False): _row("4 ranks of one host, each its part, 1 s apart: bytes", None),
}


class _Cost(NamedTuple):
    seconds: float
    read: float
    """Bytes from the disk."""


def groups() -> list[Group]:
    return [
        Group((_TIME, _BYTES, _STRIDED_TIME, _STRIDED_BYTES), _one_rank, applies=_is_gds),
        Group(tuple(_TOGETHER.values()), _together, applies=_is_gds),
    ]


def _is_gds(system: System) -> bool:
    return system.name == GDS


def _one_rank(system: System) -> Mapping[str, float]:
    assert isinstance(system, Way)
    whole = _cost(system, 1, "auto")
    rank, strided = (_cost(system, _RANKS, strategy) for strategy in ("auto", "strided"))
    size = sum(shard.stat().st_size for shard in system.checkpoint.shards)
    return {
        _TIME.name: rank.seconds / whole.seconds,
        _BYTES.name: rank.read / size,
        _STRIDED_TIME.name: strided.seconds / whole.seconds,
        _STRIDED_BYTES.name: strided.read / size,
    }


def _cost(way: Way, ranks: int, strategy: str) -> _Cost:
    shards = way.checkpoint.shards
    way.checkpoint.make_cold(shards)
    before = way.ask("read_bytes")
    seconds = way.ask("rank", files=_names(shards), rank=0, ranks=ranks, strategy=strategy)
    return _Cost(seconds, way.ask("read_bytes") - before)


def _together(system: System) -> Mapping[str, float]:
    assert isinstance(system, Way)
    checkpoint = system.checkpoint
    files, small = _names(checkpoint.shards), str(checkpoint.small)
    size = sum(shard.stat().st_size for shard in checkpoint.shards)
    found = {}
    for start, row in _TOGETHER.items():
        checkpoint.make_cold(checkpoint.shards)
        read = system.ask("together", files=files, small=small, ranks=_RANKS, **start._asdict())
        found[row.name] = read / size
    return found


def _names(shards: Sequence[Path]) -> list[str]:
    return list(map(str, shards))
