"""The rows of the mount's table: what each does to a directory, and what it is to reach."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks import _load as load
from benchmarks._cold import make_cold
from benchmarks._interleave import Group, Row, Target
from benchmarks._load import MIB
from benchmarks._systems import JuiceFs, System

_KIB: Final = 1024
_MICRO: Final = 1e6
_THREADS: Final = (1, 8)
_STORM_PROCESSES: Final = 8
_BUSY_PROCESSES: Final = 3 * (os.cpu_count() or 1)
_LONE_PAUSE_S: Final = 0.004
PREPARE_S: Final = 120.0


@dataclass(frozen=True)
class Scale:
    """How much is done in one measurement."""

    limit_s: float
    block_set_bytes: int
    file_bytes: int
    names: int
    peer_names: int
    many_files: int


QUICK: Final = Scale(0.08, 48 * MIB, 256 * MIB, 4_000, 400, 4_000)
FULL: Final = Scale(0.5, 256 * MIB, 2048 * MIB, 10_000, 10_000, 100_000)


def _targets(passthrough: float, relay: float) -> Mapping[str, Sequence[Target]]:
    return {
        "passthrough": (Target("of_native", passthrough),),
        "relay": (Target("of_native", relay),),
    }


def same_target(*targets: Target) -> Mapping[str, Sequence[Target]]:
    """For both modes that the table is about."""
    return {"passthrough": targets, "relay": targets}


def groups(scale: Scale) -> list[Group]:
    """In the order of the table."""
    return [
        *(_write(scale, 2 * MIB, 0.80, direct=direct) for direct in (False, True)),
        *(_write(scale, 16 * MIB, 0.90, direct=direct) for direct in (False, True)),
        *_read(scale, 2 * MIB, 0.85),
        *_read(scale, 16 * MIB, 0.95),
        _large_file(scale),
        _small_blocks(scale),
        *_names(scale),
        _create_rename_unlink(scale),
        _beside_busy_processes(scale),
    ]


# --- blocks -------------------------------------------------------------------------------------


def _write(scale: Scale, size: int, target: float, *, direct: bool) -> Group:
    row = Row(
        f"write + rename {size // MIB} MiB{', O_DIRECT' if direct else ''}",
        "MB/s",
        True,
        _targets(target, 0.4),
    )
    data = load.buffer(size)

    def measure(system: System) -> Mapping[str, float]:
        count = max(4, scale.block_set_bytes // size)
        speed, names = load.write_blocks(system.root, data, count, 2 * scale.limit_s, direct=direct)
        _remove(names)
        return {row.name: speed / 1e6}

    return Group((row,), measure)


def _remove(names: Sequence[str]) -> None:
    """At once, so that their dirty pages are not written back during what is measured next."""
    for name in names:
        os.unlink(name)


class _BlockSet:
    """Blocks to be read, written once into each system."""

    def __init__(self, scale: Scale, size: int) -> None:
        self.size = size
        self._count = max(8, scale.block_set_bytes // size)
        self._paths: dict[str, list[str]] = {}

    def write(self, system: System) -> None:
        if system.name not in self._paths:
            data = load.buffer(self.size)
            _, names = load.write_blocks(system.root, data, self._count, PREPARE_S)
            self._paths[system.name] = names

    def of(self, system: System) -> list[str]:
        return self._paths[system.name]


def _read(scale: Scale, size: int, target: float) -> list[Group]:
    blocks = _BlockSet(scale, size)
    return [_read_by(scale, blocks, threads, target) for threads in _THREADS]


def _read_by(scale: Scale, blocks: _BlockSet, threads: int, target: float) -> Group:
    """Cold, then warm, from the same files."""
    what, by = f"read {blocks.size // MIB} MiB", f"{threads} thread{'s' * (threads > 1)}"
    cold = Row(f"{what} cold, {by}", "MB/s", True, _targets(target, 0.5))
    warm = Row(f"{what} warm, {by}", "MB/s", True, _targets(target, 0.8))

    def measure(system: System) -> Mapping[str, float]:
        paths, size = blocks.of(system), blocks.size
        make_cold(system.backing(map(Path, paths)))
        first = load.read_blocks(paths, size, threads, 8 * scale.limit_s, once=True)
        load.read_blocks(paths, size, 1, PREPARE_S, once=True)
        again = load.read_blocks(paths, size, threads, scale.limit_s)
        return {cold.name: first / 1e6, warm.name: again / 1e6}

    return Group((cold, warm), measure, blocks.write, weight=2)


def _small_blocks(scale: Scale) -> Group:
    size = 256 * _KIB
    write = Row("write + rename 256 KiB", "µs", False, _targets(0.35, 0.35))
    read = Row("read 256 KiB warm", "µs", False, _targets(0.5, 0.5))
    data = load.buffer(size)

    def measure(system: System) -> Mapping[str, float]:
        written, names = load.write_blocks(system.root, data, 256, scale.limit_s)
        load.read_blocks(names, size, 1, scale.limit_s, once=True)
        got = load.read_blocks(names, size, 1, scale.limit_s)
        _remove(names)
        return {write.name: _MICRO * size / written, read.name: _MICRO * size / got}

    return Group((write, read), measure)


# --- one large file -----------------------------------------------------------------------------


def _large_file(scale: Scale) -> Group:
    size = scale.file_bytes
    label = f"{size // MIB} MiB file" if size < 1024 * MIB else f"{size // (1024 * MIB)} GiB file"
    rows = {
        (way, state): Row(f"{label} {way}, {state}", "MB/s", True, _targets(0.95, relay))
        for way in ("sequential", "mmap")
        for state, relay in (("cold", 0.5), ("warm", 0.8))
    }
    limit_s = 40 * scale.limit_s

    def path(system: System) -> Path:
        return system.root / "large.safetensors"

    def prepare(system: System) -> None:
        load.write_file(path(system), size)

    def measure(system: System) -> Mapping[str, float]:
        values = {}
        for way, read in (("sequential", load.read_file), ("mmap", load.read_mapping)):
            make_cold(system.backing([path(system)]))
            values[rows[way, "cold"].name] = read(path(system), limit_s) / 1e6
            values[rows[way, "warm"].name] = read(path(system), limit_s) / 1e6
        return values

    return Group(tuple(rows.values()), measure, prepare, weight=4)


# --- names --------------------------------------------------------------------------------------


class Folder:
    """A directory of empty files, made once in each system; the peer has its own count."""

    def __init__(self, name: str, count: int, peer_count: int) -> None:
        self._name = name
        self._count, self._peer_count = count, peer_count

    def make(self, system: System) -> None:
        if not self.path(system).exists():
            self.path(system).mkdir()
            load.create_files(self.names(system), PREPARE_S)

    def path(self, system: System) -> Path:
        return system.root / self._name

    def names(self, system: System) -> list[str]:
        count = self._peer_count if isinstance(system, JuiceFs) else self._count
        return [f"{self.path(system)}/{number:032x}.bin" for number in range(count)]


def _names(scale: Scale) -> list[Group]:
    folder = Folder("names", scale.names, scale.peer_names)
    return [
        _stat_again(scale, folder),
        _stat_missing(scale, folder),
        _list(scale, folder),
    ]


def _stat_again(scale: Scale, folder: Folder) -> Group:
    row = Row("stat of existing names, again", "µs", False, _targets(0.5, 0.5))

    def measure(system: System) -> Mapping[str, float]:
        names = folder.names(system)
        load.per_name(names, PREPARE_S, os.stat)
        seconds, _ = load.per_name(names, scale.limit_s, os.stat)
        return {row.name: seconds * _MICRO}

    return Group((row,), measure, folder.make)


def _stat_missing(scale: Scale, folder: Folder) -> Group:
    peer = Target("of_juicefs", 3)
    storm = Row(
        f"stat of new missing names, {_STORM_PROCESSES} processes",
        "µs",
        False,
        same_target(Target("of_native", 0.15), peer),
    )
    alone = same_target(Target("of_native", 0.08), peer)
    row = Row("stat of new missing names, one process", "µs", False, alone)
    lone = Row("stat of a new missing name, daemon at rest", "µs", False, alone)

    def measure(system: System) -> Mapping[str, float]:
        place = folder.path(system)
        one, _ = load.per_name(load.new_names(place, 30_000), scale.limit_s, load.stat_missing)
        return {
            storm.name: load.stat_storm(place, _STORM_PROCESSES, scale.limit_s) * _MICRO,
            row.name: one * _MICRO,
            lone.name: load.lone_stats(place, 25, _LONE_PAUSE_S) * _MICRO,
        }

    return Group((storm, row, lone), measure, folder.make, weight=2)


def _list(scale: Scale, folder: Folder) -> Group:
    """After a file was made and removed there, which is the daily life of a cache, and again."""
    what = f"readdir + stat of {scale.names:,}"
    changed = Row(f"{what} after a change, per name", "µs", False, _targets(0.4, 0.4))
    again = Row(f"{what} again, per name", "µs", False, _targets(0.4, 0.4))

    def measure(system: System) -> Mapping[str, float]:
        load.create(f"{folder.path(system)}/change")
        os.unlink(f"{folder.path(system)}/change")
        expected = len(folder.names(system))
        first = load.list_folder(folder.path(system), expected)
        second = load.list_folder(folder.path(system), expected)
        return {changed.name: first * _MICRO, again.name: second * _MICRO}

    return Group((changed, again), measure, folder.make)


def _create_rename_unlink(scale: Scale) -> Group:
    rows = [
        Row(name, "µs", False, same_target(Target("of_juicefs", 5)))
        for name in ("create + close", "rename", "unlink")
    ]

    def measure(system: System) -> Mapping[str, float]:
        names = load.new_names(system.root, 2_000)
        create, made = load.per_name(names, scale.limit_s, load.create)
        rename, _ = load.per_name(names[:made], PREPARE_S, lambda name: os.rename(name, name + "r"))
        unlink, _ = load.per_name(names[:made], PREPARE_S, lambda name: os.unlink(name + "r"))
        seconds = (create, rename, unlink)
        return {row.name: value * _MICRO for row, value in zip(rows, seconds, strict=True)}

    return Group(rows, measure)


def _beside_busy_processes(scale: Scale) -> Group:
    """What a program waits for while others keep every CPU busy."""
    near = same_target(Target("of_native", 0.1))
    what = f"beside {_BUSY_PROCESSES} busy processes"
    create = Row(f"create + close {what}", "µs", False, near)
    unlink = Row(f"unlink {what}", "µs", False, near)

    def measure(system: System) -> Mapping[str, float]:
        names = load.new_names(system.root, 500)
        with load.busy(_BUSY_PROCESSES):
            created, made = load.per_name(names, 4 * scale.limit_s, load.create)
            unlinked, _ = load.per_name(names[:made], PREPARE_S, os.unlink)
        return {create.name: created * _MICRO, unlink.name: unlinked * _MICRO}

    return Group((create, unlink), measure)
