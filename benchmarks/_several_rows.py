"""The rows of the table of several nodes on one machine."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks import _load as load
from benchmarks._interleave import Group, Row, Target
from benchmarks._load import MIB
from benchmarks._processes import together
from benchmarks._several import FAR, NODES, STRICT, Level, Nodes, Plain, round_trips
from benchmarks._systems import JuiceFs, Kvfs, System, settle
from gds.probe.machine_limits import back_memory
from kvfs.meta.replica.recalls import PAUSE_S

_KEYS: Final = 10_000
_THREADS: Final = 8
_READ_S: Final = 120.0
_SETTLE_S: Final = 20.0


class Scale(NamedTuple):
    limit_s: float
    large_bytes: int
    times: int
    """Of what is too short to be measured once."""


QUICK: Final = Scale(1.0, 256 * MIB, 20)
FULL: Final = Scale(3.0, 1024 * MIB, 100)


def groups(scale: Scale) -> list[Group]:
    return [
        _first_byte(scale),
        _remote(64 * MIB),
        _remote(scale.large_bytes),
        _creates(scale),
        _removals(scale),
        _exists(scale),
        _misses(scale),
        _trips(scale),
    ]


# --- content of another node ---------------------------------------------------------------------


def _remote(size: int) -> Group:
    row = Row(
        f"read of {size // MIB} MiB from one remote holder",
        "GB/s",
        True,
        {NODES: (Target("of_native", 0.7),)},
    )

    def measure(system: System) -> Mapping[str, float]:
        source = Path(load.new_names(system.root, 1)[0])
        load.write_file(source, size)
        try:
            return {row.name: size / _transfer_s(system, source) / 1e9}
        finally:
            source.unlink()

    return Group((row,), measure, applies=lambda system: isinstance(system, Plain | Nodes))


def _transfer_s(system: System, source: Path) -> float:
    size = source.stat().st_size
    if isinstance(system, Plain):
        target = source.with_suffix(".copy")
        back_memory(2 * size)
        try:
            return system.sender.transfer(source, target)
        finally:
            target.unlink()
    assert isinstance(system, Nodes)
    settle([system], _SETTLE_S)
    other = system.read_by_other(source)
    back_memory(2 * size)
    return load.read_whole(other, size, _READ_S)


def _first_byte(scale: Scale) -> Group:
    """From the end of close() on one host to the first byte on the other."""
    row = Row(
        "2 MiB written on A, first byte on B, after close",
        "ms",
        False,
        {name: (Target("of_native", 1 / 3),) for name in (NODES, STRICT)},
    )
    data = load.buffer(2 * MIB)

    def measure(system: System) -> Mapping[str, float]:
        names = load.new_names(system.root, scale.times)
        times = sorted(_first_byte_s(system, Path(name), data) for name in names)
        return {row.name: times[len(times) // 2] * 1e3}

    def applies(system: System) -> bool:
        return isinstance(system, Plain | Nodes | Level)

    return Group((row,), measure, applies=applies)


def _first_byte_s(system: System, path: Path, data: object) -> float:
    with path.open("wb", buffering=0) as file:
        file.write(data)  # type: ignore[arg-type]
    try:
        if isinstance(system, Plain):
            copy = path.with_suffix(".copy")
            trip = system.server.round_trip(system.connection)
            took = trip + system.sender.transfer(path, copy)
            copy.unlink()
            return took
        nodes = system.nodes if isinstance(system, Level) else system
        assert isinstance(nodes, Nodes)
        other = nodes.reader.mountpoint / path.relative_to(nodes.writer.mountpoint)
        began = time.perf_counter()
        while not _first_byte_of(other):
            pass  # a cache may believe for a moment that it is not there
        return time.perf_counter() - began
    finally:
        path.unlink()


def _first_byte_of(path: Path) -> bytes:
    try:
        with path.open("rb", buffering=0) as file:
            return file.read(1) or b""
    except FileNotFoundError:
        return b""


# --- names ------------------------------------------------------------------------------------


def _creates(scale: Scale) -> Group:
    """By processes, each in the same directory; with O_EXCL the name is everybody's at once."""
    exclusive = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    kinds = {"create + close": exclusive & ~os.O_EXCL, "exclusive create + close": exclusive}
    target = {NODES: (Target("of_juicefs", 2),)}
    rows = {
        (kind, count): Row(
            f"{kind}, {count} process{'es' * (count > 1)}", "files/s", True, target, "juicefs"
        )
        for kind in kinds
        for count in (1, _THREADS)
    }

    def measure(system: System) -> Mapping[str, float]:
        return {
            row.name: _created(system, kinds[kind], count, scale.limit_s)
            for (kind, count), row in rows.items()
        }

    def applies(system: System) -> bool:
        return isinstance(system, Nodes | Level | JuiceFs)

    return Group(tuple(rows.values()), measure, applies=applies, weight=3)


def _created(system: System, flags: int, processes: int, limit_s: float) -> float:
    """Files a second."""

    def create(name: str) -> None:
        os.close(os.open(name, flags, 0o644))

    def prepare() -> Callable[[], float]:
        names = load.new_names(system.root, 20_000)
        return lambda: 1 / load.per_name(names, limit_s, create)[0]

    return float(sum(together([prepare] * processes)))


def _removals(scale: Scale) -> Group:
    """Of empty directories: where nobody has to be asked, and where the other node has just made
    files beside."""
    quiet = Row("rmdir", "ms", False, {})
    asking = Row("rmdir after the other node made files beside it", "ms", False, {})
    times = scale.times // 2

    def measure(system: System) -> Mapping[str, float]:
        nodes = system.nodes if isinstance(system, Level) else system
        assert isinstance(nodes, Nodes)
        names = [Path(name) for name in load.new_names(system.root, 2 * times)]
        for path in names:
            path.mkdir()
        beside = nodes.reader.mountpoint / system.root.relative_to(nodes.writer.mountpoint)
        settle([nodes], _SETTLE_S)
        asked = [_removed_s(path, beside) for path in names[:times]]
        alone = [_removed_s(path) for path in names[times:]]
        return {quiet.name: _median_ms(alone), asking.name: _median_ms(asked)}

    def applies(system: System) -> bool:
        return isinstance(system, Nodes | Level)

    return Group((quiet, asking), measure, applies=applies)


def _removed_s(directory: Path, beside: Path | None = None) -> float:
    if beside is not None:
        time.sleep(2 * PAUSE_S)  # else the other node has nothing that it could be asked for
        for name in load.new_names(beside, 2):
            load.create(name)
    began = time.perf_counter()
    directory.rmdir()
    return time.perf_counter() - began


def _median_ms(times: Sequence[float]) -> float:
    return sorted(times)[len(times) // 2] * 1e3


def _exists(scale: Scale) -> Group:
    """Half of the keys exist, made on the other node; in a process without the mount."""
    row = Row(
        f"Client.exists, {_KEYS:,} keys",
        "keys/s",
        True,
        {NODES: (Target("at_least", 200_000),)},
    )
    made: dict[str, list[str]] = {}

    def prepare(system: System) -> None:
        folder = system.root / "keys"
        folder.mkdir()
        made[system.name] = load.new_names(folder, _KEYS // 2)
        for name in made[system.name]:
            load.create(name)

    def measure(system: System) -> Mapping[str, float]:
        from kvfs.client import Client  # not needed by the other rows

        nodes = system.nodes if isinstance(system, Level) else system
        assert isinstance(nodes, Nodes)
        absent = load.new_names(system.root / "keys", _KEYS // 2)
        keys = [nodes.writer.inside(name) for name in made[system.name] + absent]
        with Client(nodes.reader.store) as client:
            client.exists(keys[:1])
            began = time.perf_counter()
            answers = [client.exists(keys) for _ in range(scale.times // 10)]
            elapsed = time.perf_counter() - began
        if any(sum(answer) != _KEYS // 2 for answer in answers):
            raise FileNotFoundError("exists() misses names that are there")
        return {row.name: len(answers) * _KEYS / elapsed}

    return Group((row,), measure, prepare, applies=lambda system: isinstance(system, Nodes | Level))


def _misses(scale: Scale) -> Group:
    row = Row(
        f"stat of new missing names, {_THREADS} processes",
        "names/s",
        True,
        {name: (Target("at_least", 20_000),) for name in (NODES, FAR)},
    )

    def measure(system: System) -> Mapping[str, float]:
        return {row.name: 1 / load.stat_storm(system.root, _THREADS, scale.limit_s)}

    return Group((row,), measure, applies=lambda system: not isinstance(system, Plain))


# --- round trips ------------------------------------------------------------------------------


def _trips(scale: Scale) -> Group:
    """Requests to the metadata server for one of many, one after the other."""
    bounds = {"a warm open": 0, "a cold open": 1, "the close of a new file": 1}
    rows = {
        what: Row(
            f"requests to the engine for {what}", "", False, {NODES: (Target("at_most", bound),)}
        )
        for what, bound in bounds.items()
    }

    def measure(system: System) -> Mapping[str, float]:
        nodes = system.nodes if isinstance(system, Level) else system
        assert isinstance(nodes, Nodes)
        paths = [Path(name) for name in load.new_names(system.root, scale.times)]
        others = [
            nodes.reader.mountpoint / path.relative_to(nodes.writer.mountpoint) for path in paths
        ]
        closes = _counted(nodes.writer, lambda: [_write(path) for path in paths])
        settle([nodes], _SETTLE_S)
        nodes.read_by_other(paths[-1])
        cold = _counted(nodes.reader, lambda: [_first_byte_of(path) for path in others])
        settle([nodes], _SETTLE_S)
        warm = _counted(nodes.reader, lambda: [_first_byte_of(path) for path in others])
        for path in paths:
            path.unlink()
        counts = zip(rows.values(), (warm, cold, closes), strict=True)
        return {row.name: count / len(paths) for row, count in counts}

    def applies(system: System) -> bool:
        return isinstance(system, Nodes | Level)

    return Group(tuple(rows.values()), measure, applies=applies, rounds=1)


def _counted(node: Kvfs, work: Callable[[], object]) -> int:
    before = round_trips(node)
    work()
    return round_trips(node) - before


def _write(path: Path) -> None:
    path.write_bytes(b"x" * 4096)
