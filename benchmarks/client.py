"""The Python client against the mount of the same node and a native directory, interleaved.

The client reaches the store itself, so it pays neither FUSE nor a system call for each look-up; in
exchange each put tells the node. Blocks are written as whole files that appear at once: native and
on the mount by write and rename, by the client with `put`. Prints a table of medians and ratios to
the native directory with each target, then one JSON object.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple

import kvfs
from benchmarks import _load, _many_rows, _program
from benchmarks._guard import Guard
from benchmarks._interleave import NATIVE, Group, Results, Row, Target, run
from benchmarks._systems import Kvfs, System, Unavailable, settle

_MOUNT: Final = "mount"
_CLIENT: Final = "client"
_KEYS: Final = 1_000
_CHAIN: Final = 512
_QUICK_S: Final = 40.0
_FULL_S: Final = 600.0
_MIB: Final = 1 << 20
_TURNS: Iterator[int] = count()
_say: Final = _program.teller("client")


class Scale(NamedTuple):
    """How much one measurement moves."""

    repeats: int
    block_bytes: int
    """Of all blocks of one measurement."""
    small_files: int
    rounds: int
    many_bytes: int
    """Of all blocks that are read or written at once."""


_QUICK: Final = Scale(20, 64 * _MIB, 200, 3, 64 * _MIB)
_FULL: Final = Scale(100, 512 * _MIB, 1_000, 7, 256 * _MIB)


class ByClient(System):
    """The client on the store of a node that another system has started."""

    def __init__(self, node: Kvfs) -> None:
        super().__init__(_CLIENT, node.root)
        self._node = node
        self._client: kvfs.Client | None = None

    def start(self, _guard: Guard) -> None:
        if self._node.daemon() is None:
            raise Unavailable("the node did not start")
        self._client = kvfs.Client(self._node.store)

    def stop(self) -> None:
        if self._client is not None:
            self._client.close()

    @property
    def client(self) -> kvfs.Client:
        """Only while started."""
        assert self._client is not None
        return self._client

    def key(self, name: str) -> str:
        """Of a name under the root."""
        return self._node.inside(self.root / name)


def main() -> int:
    options = _options()
    scale = _QUICK if options.quick else _FULL
    results, groups = Results(), _program.chosen(_groups(scale), options.rows)
    with _program.place(options.dir, _say) as place:
        systems = _start(place)
        _prepare(systems)
        run(
            groups,
            systems,
            results,
            rounds=options.rounds or scale.rounds,
            deadline=time.monotonic() + (_QUICK_S if options.quick else _FULL_S),
            watch=place.guard.watch,
            say=_say,
        )
    rows = _program.rows_of(groups, options.rows)
    _program.conclude("client", options, rows, [each.name for each in systems], results, {})
    return 0


def _start(place: _program.Place) -> list[System]:
    node = Kvfs(_MOUNT, place.base / _MOUNT, "auto")
    systems: list[System] = [System(NATIVE, place.base / NATIVE), node, ByClient(node)]
    for system in systems:
        place.stack.callback(system.stop)
        system.start(place.guard)
    return systems


def _prepare(systems: Sequence[System]) -> None:
    """The names that are looked up, and the blocks that are read."""
    block = _load.buffer(2 * _MIB)
    for system in systems[:2]:
        for number in range(_KEYS):
            (system.root / f"key-{number}").touch()
        for number in range(16):
            _write(system.root / f"block-{number}", block)
    settle(systems, 10.0)


def _groups(scale: Scale) -> list[Group]:
    return [
        _exists("exists, 1,000 keys that are there", "key-{}", scale),
        _exists("exists, 1,000 keys that are not", "absent-{}", scale),
        _match("match, 512 keys with a lease (others: stat)", scale, os.stat),
        _match("match, 512 keys with a lease (others: access)", scale, _access),
        _group("get 2 MiB, warm, into a buffer", "GB/s", partial(_get, scale)),
        _group("get 16 x 2 MiB at once", "GB/s", partial(_get_many, scale)),
        _group("put 2 MiB", "GB/s", partial(_put, scale, 2 * _MIB)),
        _group("put 16 MiB", "GB/s", partial(_put, scale, 16 * _MIB)),
        _group("put 16 x 2 MiB at once", "GB/s", partial(_put_many, scale, 2 * _MIB)),
        _group("put 4 KiB", "files/s", partial(_put_small, scale)),
        _group("open on the mount, put 4 KiB", "files/s", partial(_put_after_open, scale)),
        _group("put 100 x 4 KiB at once", "files/s", partial(_put_many_small, scale)),
        *_many_rows.groups(_CLIENT, scale.many_bytes, _by_name),
    ]


def _by_name(system: System) -> _many_rows.ByName | None:
    return _many_rows.ByName(system.client, system.key) if isinstance(system, ByClient) else None


def _group(name: str, unit: str, measure: Callable[[System], float]) -> Group:
    return Group([Row(name, unit, True)], lambda system: {name: measure(system)})


def _exists(name: str, pattern: str, scale: Scale) -> Group:
    names = [pattern.format(number) for number in range(_KEYS)]
    row = Row(name, "keys/s", True, {_CLIENT: [Target("at_least", 500_000)]})

    def measure(system: System) -> Mapping[str, float]:
        if isinstance(system, ByClient):
            keys, client = [system.key(name) for name in names], system.client
            return {name: _KEYS * _rate(scale.repeats, lambda: client.exists(keys))}
        paths = [system.root / name for name in names]
        return {name: _KEYS * _rate(scale.repeats // 10, lambda: [p.exists() for p in paths])}

    return Group([row], measure)


def _match(name: str, scale: Scale, look: Callable[[str], object]) -> Group:
    """Measures a chain of the client, its lease taken and released, beside look-ups of the same
    names."""
    names = [f"key-{number}" for number in range(_CHAIN)]
    row = Row(name, "us", False, {_CLIENT: [Target("at_most", 300)]})

    def measure(system: System) -> Mapping[str, float]:
        if isinstance(system, ByClient):
            keys, client = [system.key(name) for name in names], system.client

            def match() -> None:
                with client.match(keys):
                    pass

            match()  # the first opens the table of leases
            return {name: 1e6 / _rate(scale.repeats, match)}
        paths = [str(system.root / name) for name in names]
        return {name: 1e6 / _rate(scale.repeats // 10, lambda: [look(p) for p in paths])}

    return Group([row], measure)


def _access(path: str) -> bool:
    return os.access(path, os.R_OK)


def _rate(repeats: int, step: Callable[[], object]) -> float:
    """Of the step, per second."""
    began = time.perf_counter()
    for _ in range(repeats):
        step()
    return repeats / (time.perf_counter() - began)


def _get(scale: Scale, system: System) -> float:
    buffer = _load.buffer(2 * _MIB)
    names = [f"block-{number % 16}" for number in range(scale.block_bytes // (2 * _MIB))]
    wanted = iter(names)
    if isinstance(system, ByClient):
        client = system.client
        return _gigabytes(names, 2 * _MIB, lambda: client.get(system.key(next(wanted)), buffer))
    return _gigabytes(names, 2 * _MIB, lambda: _read(system.root / next(wanted), buffer))


def _get_many(scale: Scale, system: System) -> float:
    buffers = [_load.buffer(2 * _MIB) for _ in range(16)]
    names = [f"block-{number}" for number in range(16)]
    turns = range(scale.block_bytes // (32 * _MIB))
    if isinstance(system, ByClient):
        client, keys = system.client, [system.key(name) for name in names]
        return _gigabytes(turns, 32 * _MIB, lambda: client.get_many(keys, buffers))

    def one_after_the_other() -> None:
        for name, buffer in zip(names, buffers, strict=True):
            _read(system.root / name, buffer)

    return _gigabytes(turns, 32 * _MIB, one_after_the_other)


def _put(scale: Scale, size: int, system: System) -> float:
    turns = range(scale.block_bytes // size)
    return _gigabytes(turns, size, _putter(system, size))


def _put_small(scale: Scale, system: System) -> float:
    return _rate(scale.small_files, _putter(system, 4096))


def _put_after_open(scale: Scale, system: System) -> float:
    """The node's loop, which looks at the mount for more, is to hear of the put."""
    put, path = _putter(system, 4096), system.root / "block-0"

    def both() -> None:
        os.close(os.open(path, os.O_RDONLY))
        put()

    return _rate(scale.small_files, both)


def _putter(system: System, size: int) -> Callable[[], object]:
    """Puts a new file of this size each time."""
    block, turn = _load.buffer(size), next(_TURNS)
    numbers = count()
    if isinstance(system, ByClient):
        client = system.client
        return lambda: client.put(system.key(f"new-{turn}-{next(numbers)}"), block)
    return lambda: _write(system.root / f"new-{turn}-{next(numbers)}", block)


def _put_many(scale: Scale, size: int, system: System) -> float:
    turns = range(scale.block_bytes // (16 * size))
    return _gigabytes(turns, 16 * size, _many_putter(system, size, 16))


def _put_many_small(scale: Scale, system: System) -> float:
    return 100 * _rate(scale.small_files // 100, _many_putter(system, 4096, 100))


def _many_putter(system: System, size: int, files: int) -> Callable[[], object]:
    block, turn, numbers = _load.buffer(size), next(_TURNS), count()

    def names() -> list[str]:
        number = next(numbers)
        return [f"many-{turn}-{number}-{each}" for each in range(files)]

    if isinstance(system, ByClient):
        client = system.client
        return lambda: client.put_many((system.key(name), block) for name in names())

    def one_after_the_other() -> None:
        for name in names():
            _write(system.root / name, block)

    return one_after_the_other


def _gigabytes(turns: Sequence[object], size: int, step: Callable[[], object]) -> float:
    return size * _rate(len(turns), step) / 1e9


def _read(path: Path, buffer: Any) -> None:
    with open(path, "rb", buffering=0) as file:
        file.readinto(buffer)


def _write(path: Path, block: Any) -> None:
    draft = path.with_name(f".{path.name}")
    with open(draft, "wb", buffering=0) as file:
        file.write(block)
    draft.rename(path)


def _options() -> argparse.Namespace:
    return _program.parser(
        "client", __doc__, quick="small amounts, ends within 60 s", rounds="default 7, quick 3"
    ).parse_args()


if __name__ == "__main__":
    sys.exit(main())
