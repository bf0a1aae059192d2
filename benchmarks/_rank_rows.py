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
_TOGETHER: Final = _row("4 ranks of one host, cold: bytes from the disk", 1.05)


class _Cost(NamedTuple):
    seconds: float
    read: float
    """Bytes from the disk."""


def groups() -> list[Group]:
    return [
        Group((_TIME, _BYTES, _STRIDED_TIME, _STRIDED_BYTES), _one_rank, applies=_is_gds),
        Group((_TOGETHER,), _together, applies=_is_gds),
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
    checkpoint.make_cold(checkpoint.shards)
    read = system.ask(
        "together", files=_names(checkpoint.shards), small=str(checkpoint.small), ranks=_RANKS
    )
    return {_TOGETHER.name: read / sum(shard.stat().st_size for shard in checkpoint.shards)}


def _names(shards: Sequence[Path]) -> list[str]:
    return list(map(str, shards))
