"""The rows of the S3 table: what each asks of a server, and what a node is to reach."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import _load, _s3_load
from benchmarks._interleave import BEST_PEER, JUICEFS, NGINX, RCLONE, SEAWEEDFS, Group, Row, Target
from benchmarks._load import MIB
from benchmarks._s3_systems import CACHE, DURABLE, Server
from benchmarks._systems import System

_KIB: Final = 1024
_GIB: Final = 1024 * MIB
_RANGE: Final = 8 * MIB
_SMALL_PUTS_A_SECOND: Final = 10_000
_LARGE_PUTS_A_SECOND: Final = 1_000
"""More than any server here takes: how many keys are signed for."""
_EACH_WAY: Final = 32
_TRANSFER: Final = 64 * MIB
_ANSWERS_S3: Final = (CACHE, SEAWEEDFS, JUICEFS, RCLONE)
_WRITES: Final = (CACHE, DURABLE, SEAWEEDFS, JUICEFS, RCLONE)
_READS: Final = (NGINX, *_ANSWERS_S3)


@dataclass(frozen=True)
class Scale:
    """How much is done in one measurement."""

    get_s: int
    limit_s: float
    """Of PUTs and of lists."""
    set_bytes: int
    large_bytes: int
    transfer_bytes: int
    names: int
    memory_s: int
    memory_of: Sequence[str]
    """The systems that this is asked of: some answer late to so many transfers."""


QUICK: Final = Scale(1, 0.4, 64 * MIB, 128 * MIB, 64 * MIB, 2_000, 2, (CACHE,))
FULL: Final = Scale(4, 3.0, 256 * MIB, _GIB, _GIB, 10_000, 6, _ANSWERS_S3)


def groups(scale: Scale, scratch: Path) -> list[Group]:
    """In the order of the table. `scratch` is for files of the clients."""
    large = scale.large_bytes
    return [
        _get(scale, 2 * MIB),
        _get(scale, _TRANSFER),
        _get_ranges(scale, large),
        _get_small(scale),
        _put_small(scale),
        _put_large(scale, 2 * MIB),
        _put_large(scale, 64 * MIB),
        _transfers(scale, scratch),
        _list(scale),
        _memory(scale),
    ]


def _group(
    rows: Sequence[Row],
    measure: Callable[[Server], Sequence[float]],
    systems: Sequence[str],
    prepare: Callable[[Server], None] = lambda _server: None,
    *,
    rounds: int | None = None,
    weight: float = 1.0,
) -> Group:
    """`measure` gives the rows' values in their order."""

    def values(system: System) -> Mapping[str, float]:
        assert isinstance(system, Server)
        found = measure(system)
        return {row.name: value for row, value in zip(rows, found, strict=True)}

    def ready(system: System) -> None:
        assert isinstance(system, Server)
        prepare(system)

    def applies(system: System) -> bool:
        return system.name in systems

    return Group(rows, values, ready, applies, rounds, weight)


def _faster(name: str, unit: str, target: Target, base: str, *systems: str) -> Row:
    """The target is for the cache bucket, or for `systems`."""
    return Row(name, unit, True, dict.fromkeys(systems or (CACHE,), (target,)), base)


def _size(size: int) -> str:
    for unit, name in ((_GIB, "GiB"), (MIB, "MiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size // _KIB} KiB"


# --- GET ----------------------------------------------------------------------------------------


def _get(scale: Scale, size: int) -> Group:
    """Speed, and the server's part of the processors."""
    what = f"GET {_size(size)}, {_s3_load.CONNECTIONS} connections"
    speed = _faster(what, "MB/s", Target("of_nginx", 0.8), NGINX)
    bound = {CACHE: (Target("at_most_of_nginx", 2),)}
    cost = Row(f"processor per GB, GET {_size(size)}", "s", False, bound, NGINX)
    keys = [f"get-{size}/{number}" for number in range(max(4, scale.set_bytes // size))]
    data = _load.buffer(size)

    def measure(server: Server) -> Sequence[float]:
        got = _s3_load.get(server, keys, size, scale.get_s)
        return got.bytes_per_s / 1e6, got.processor_s_per_gb

    return _group((speed, cost), measure, _READS, lambda server: server.store(keys, data))


def _get_ranges(scale: Scale, large: int) -> Group:
    row = _faster(
        f"GET {_size(_RANGE)} ranges of {_size(large)}", "MB/s", Target("of_nginx", 0.8), NGINX
    )
    data = _load.buffer(_TRANSFER)
    key, firsts = "large.safetensors", range(0, large, _RANGE)
    ranges = [f"bytes={first}-{first + _RANGE - 1}" for first in firsts]

    def prepare(server: Server) -> None:
        server.store([key], data, large // _TRANSFER)

    def measure(server: Server) -> Sequence[float]:
        got = _s3_load.get(server, [key], _RANGE, scale.get_s, ranges=ranges)
        return (got.bytes_per_s / 1e6,)

    return _group((row,), measure, _READS, prepare)


def _get_small(scale: Scale) -> Group:
    """GETs by presigned URLs that are used again and again, and ones signed anew in the header."""
    size, target = 4 * _KIB, Target("of_best_peer", 4)
    what = f"GET {_size(size)}, {_s3_load.CONNECTIONS} connections"
    rows = (
        _faster(what, "requests/s", target, BEST_PEER),
        _faster(f"{what}, signed anew", "requests/s", target, BEST_PEER),
    )
    keys = [f"small/{number:032x}.bin" for number in range(scale.names // 10)]
    data = _load.buffer(size)

    def measure(server: Server) -> Sequence[float]:
        return [
            _s3_load.get(server, keys, size, scale.get_s, anew=anew).requests_per_s
            for anew in (False, True)
        ]

    return _group(rows, measure, _READS, lambda server: server.store(keys, data))


# --- PUT and DELETE -----------------------------------------------------------------------------


def _put_small(scale: Scale) -> Group:
    """And then half of what was put is deleted in one way, half in the other."""
    by, size = f"{_s3_load.CONNECTIONS} connections", 4 * _KIB
    rows = (
        _faster(f"PUT {_size(size)}, {by}", "requests/s", Target("of_best_peer", 2), BEST_PEER),
        _faster(f"DELETE, {by}", "keys/s", Target("of_best_peer", 1), BEST_PEER),
        _faster("DELETE, many in a request", "keys/s", Target("of_best_peer", 1), BEST_PEER),
    )
    data = bytes(_load.buffer(size))

    def measure(server: Server) -> Sequence[float]:
        wanted = _s3_load.new_keys(int(_SMALL_PUTS_A_SECOND * scale.limit_s))
        puts, made = _s3_load.put(server, wanted, data, scale.limit_s)
        deletes = _s3_load.delete(server, [share[::2] for share in made])
        rest = list(itertools.chain.from_iterable(share[1::2] for share in made))
        return puts, deletes, _s3_load.delete_many(server, rest)

    return _group(rows, measure, _WRITES, weight=2)


def _put_large(scale: Scale, size: int) -> Group:
    """With ETags that are MD5s, as the peers have them."""
    row = _faster(
        f"PUT {_size(size)}, {_s3_load.CONNECTIONS} connections",
        "MB/s",
        Target("of_best_peer", 2),
        BEST_PEER,
        CACHE,
        DURABLE,
    )
    data = _load.buffer(size)

    def measure(server: Server) -> Sequence[float]:
        most = _LARGE_PUTS_A_SECOND * 2 * MIB // size
        wanted = _s3_load.new_keys(int(most * scale.limit_s))
        puts, made = _s3_load.put(server, wanted, data, scale.limit_s)
        _s3_load.delete(server, made)  # their pages are not to be written back during the next
        return (puts * size / 1e6,)

    return _group((row,), measure, _WRITES)


# --- transfers of boto3, lists, memory ----------------------------------------------------------


def _transfers(scale: Scale, scratch: Path) -> Group:
    size = scale.transfer_bytes
    rows = tuple(
        _faster(
            f"boto3, {_size(size)} {way}",
            "MB/s",
            Target("of_best_peer", 2),
            BEST_PEER,
            CACHE,
            DURABLE,
        )
        for way in ("up", "down")
    )
    source = scratch / "source"

    def prepare(_server: Server) -> None:
        if not source.exists():
            _load.write_file(source, size)

    def measure(server: Server) -> Sequence[float]:
        return [speed / 1e6 for speed in _s3_load.up_and_down(server, source, scratch / "sink")]

    return _group(rows, measure, _WRITES, prepare, weight=4)


def _list(scale: Scale) -> Group:
    row = _faster(f"LIST {scale.names:,} keys", "keys/s", Target("at_least", 100_000), BEST_PEER)
    keys = [f"list/{number:032x}.bin" for number in range(scale.names)]

    def measure(server: Server) -> Sequence[float]:
        return (_s3_load.list_all(server, "list/", scale.names, scale.limit_s),)

    return _group(
        (row,),
        measure,
        _ANSWERS_S3,
        lambda server: _s3_load.fill(server, keys, b"16 bytes of data"),
    )


def _memory(scale: Scale) -> Group:
    """Half of the transfers up, half down."""
    what = f"{2 * _EACH_WAY} transfers of {_size(_TRANSFER)}"
    bound = {CACHE: (Target("at_most", 200),)}
    resident = Row(f"resident memory, {what}", "MB", False, bound, BEST_PEER)
    proportional = Row("the same, shared pages counted once", "MB", False, base=BEST_PEER)
    keys = [f"memory/{number}" for number in range(4)]
    data: Any = _load.buffer(_TRANSFER)

    def measure(server: Server) -> Sequence[float]:
        peak = _s3_load.memory_under_transfers(server, keys, data, _EACH_WAY, scale.memory_s)
        return peak.resident / 1e6, peak.proportional / 1e6

    return _group(
        (resident, proportional),
        measure,
        scale.memory_of,
        lambda server: server.store(keys, data),
        rounds=1,
    )
