"""KV blocks by `gds.read_blocks` and `write_blocks`, many at once and one at a time, against plain
files: opened, read by preadv and closed by as many threads; or made, written and renamed."""

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import gds
import kvfs
from benchmarks import _load
from benchmarks._interleave import Group, Row, Target
from benchmarks._systems import System
from kvfs.session.session import WORKERS

_THREADS: Final = WORKERS + 1
"""Those of a client and its caller."""
_ONE: Final = 400
"""Blocks that are read one at a time."""
_KIB: Final = 1 << 10
_SIZES: Final = (64 * _KIB, 256 * _KIB, 1024 * _KIB)
_OF_PLAIN: Final = {64 * _KIB: 0.5, 256 * _KIB: 0.9, 1024 * _KIB: 0.9}
_WRITE_OF_PLAIN: Final = 0.5
_ONE_US: Final = 60.0


class ByName(NamedTuple):
    """A system that is reached by a client."""

    client: kvfs.Client
    key: Callable[[str], str]
    """The path of a name under its root."""


def groups(
    client_name: str, total_bytes: int, by_name: Callable[[System], ByName | None]
) -> list[Group]:
    """`total_bytes`: of all blocks of one measurement. `by_name`: None for one of plain files."""
    return [_Blocks(client_name, size, total_bytes // size, by_name).group() for size in _SIZES]


class _Blocks:
    """Blocks of one size."""

    def __init__(
        self,
        client_name: str,
        size: int,
        count: int,
        by_name: Callable[[System], ByName | None],
    ) -> None:
        self._client_name = client_name
        self._size = size
        self._by_name = by_name
        self._names = [f"kv-{size}-{number}" for number in range(count)]
        self._whole = memoryview(_load.buffer(size * count))
        self._views = [self._whole[at * size : (at + 1) * size] for at in range(count)]
        shown = f"{size >> 10} KiB"
        self._write = f"write {count:,} blocks of {shown} at once"
        self._read = f"read {count:,} blocks of {shown} at once, warm"
        self._read_one = f"read one block of {shown}, p50"

    def group(self) -> Group:
        def row(name: str, unit: str, target: Target) -> Row:
            return Row(name, unit, True, {self._client_name: [target]})

        of_plain = Target("of_native", _OF_PLAIN[self._size])
        rows = [
            row(self._write, "GB/s", Target("of_native", _WRITE_OF_PLAIN)),
            row(self._read, "GB/s", of_plain),
            Row(self._read_one, "us", False, self._of_one()),
        ]
        return Group(rows, self._measure)

    def _of_one(self) -> dict[str, list[Target]]:
        """The largest take longer to be copied."""
        return {self._client_name: [Target("at_most", _ONE_US)]} if self._size == _SIZES[0] else {}

    def _measure(self, system: System) -> dict[str, float | None]:
        named = self._by_name(system)
        if named is None:
            paths = [str(system.root / name) for name in self._names]
            return self._timed(
                lambda: _write_plainly(paths, self._views),
                lambda: _read_plainly(paths, self._views, _THREADS),
                lambda at: _read_plainly(paths[at : at + 1], self._views[at : at + 1], 1),
            )
        client, keys = named.client, [named.key(name) for name in self._names]
        return self._timed(
            lambda: _require(gds.write_blocks(keys, self._views, client=client)),
            lambda: _require(gds.read_blocks(keys, self._views, client=client)),
            lambda at: gds.read_blocks(keys[at : at + 1], self._views[at : at + 1], client=client),
        )

    def _timed(
        self,
        write: Callable[[], object],
        read: Callable[[], object],
        read_one: Callable[[int], object],
    ) -> dict[str, float | None]:
        wrote = _seconds(write)
        read()
        whole = _seconds(read)
        each = [_seconds(lambda at=at: read_one(at % len(self._names))) for at in range(_ONE)]
        return {
            self._write: len(self._whole) / wrote / 1e9,
            self._read: len(self._whole) / whole / 1e9,
            self._read_one: statistics.median(each) * 1e6,
        }


def _seconds(step: Callable[[], object]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def _require(results: Sequence[gds.Block]) -> None:
    if not all(each.ok for each in results):
        raise RuntimeError(f"a block failed: {next(each for each in results if not each.ok)}")


def _write_plainly(paths: Sequence[str], views: Sequence[memoryview]) -> None:
    for path, view in zip(paths, views, strict=True):
        draft = f"{path}.draft"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.pwrite(fd, view, 0)
        os.close(fd)
        os.rename(draft, path)


def _read_plainly(paths: Sequence[str], views: Sequence[memoryview], threads: int) -> None:
    def part(first: int) -> None:
        for at in range(first, len(paths), threads):
            fd = os.open(paths[at], os.O_RDONLY)
            os.preadv(fd, [views[at]], 0)
            os.close(fd)

    others = [threading.Thread(target=part, args=(first,)) for first in range(1, threads)]
    for thread in others:
        thread.start()
    part(0)
    for thread in others:
        thread.join()
