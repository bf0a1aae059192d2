"""The rows of `spread`: files made in one, two and four namespaces at a time, and what each costs
the metadata servers."""

import os
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks import _load as load
from benchmarks import _several
from benchmarks._guard import Guard
from benchmarks._interleave import Group, Row
from benchmarks._processes import Task, together
from benchmarks._systems import Kvfs, System, Unavailable, processor_s, settle
from kvfs.meta.redis.slots import slot_of
from tests.contract.redis_servers import RedisCluster, RedisServer

ONE: Final = "one server"
SPREAD: Final = "spread over 4"
_SERVERS: Final = 4
_NAMESPACES: Final = 4
_SIZES: Final = (1, 2, 4)
_WRITERS: Final = 8
_BLOCK: Final = bytes(4096)
_MICRO: Final = 1e6
_SETTLE_S: Final = 10.0
_REST_S: Final = 5.0
_FIRST: Final = 3
"""The number of the first namespace that is made here: two are there from the start."""
KINDS: Final = {"strict": ("durable", "strict"), "cache": ("cache", "cache")}
"""The namespaces' kinds and coherences, by what rows call them."""


class Extent(NamedTuple):
    files: int
    """Files that all writers make together in one measurement."""


QUICK: Final = Extent(800)
FULL: Final = Extent(4_000)


class Site(System):
    """A node with its mount, on a Redis cluster of some servers; with more than one the namespaces
    are spread, those of one measurement each on a server of its own."""

    def __init__(self, name: str, base: Path, servers: int) -> None:
        self._base, self._count = base, servers
        self._cluster: RedisCluster | None = None
        self._node: Kvfs | None = None
        super().__init__(name, base / "n" / "mount")

    def start(self, guard: Guard) -> None:
        if shutil.which("redis-server") is None:
            raise Unavailable("redis-server is not installed")
        self._base.mkdir(parents=True)
        settings = ("--appendonly", "yes")
        self._cluster = RedisCluster(self._base / "servers", servers=self._count, settings=settings)
        for server in self.servers:
            guard.process(server.pid)
        url = f"{self._cluster.url}?prefix={self._prefix(self._cluster)}"
        self._node = _several.member(self._base, "n", url)
        self._node.start(guard)
        if self._count > 1:
            self._node.command("engine", "spread")
        for kind, coherence in KINDS.values():
            for number in range(_NAMESPACES):
                flags = ("--kind", kind, "--coherence", coherence)
                self._node.command("namespace", "create", f"{coherence}{number}", *flags)

    def _prefix(self, cluster: RedisCluster) -> str:
        """Returns one by which the namespaces of each kind are on a server each."""
        kinds = [range(first, first + _NAMESPACES) for first in (_FIRST, _FIRST + _NAMESPACES)]
        wanted = min(_NAMESPACES, self._count)
        return next(
            prefix
            for prefix in map(str, range(1 << 20))
            if all(
                len({cluster.owner(slot_of(prefix, number)).port for number in kind}) == wanted
                for kind in kinds
            )
        )

    @property
    def servers(self) -> Sequence[RedisServer]:
        return () if self._cluster is None else self._cluster.servers

    def stop(self) -> None:
        if self._node is not None:
            self._node.stop()
        if self._cluster is not None:
            self._cluster.kill()

    def processes(self) -> list[int]:
        return [] if self._node is None else self._node.processes()

    def used(self) -> list[float]:
        """Returns seconds of processor time of each server."""
        return [processor_s([server.pid]) for server in self.servers]


def groups(extent: Extent) -> list[Group]:
    """Returns them in the order of the table."""
    return [_group(name, size, extent) for name in KINDS for size in _SIZES]


def _group(kind: str, size: int, extent: Extent) -> Group:
    name = f"{kind}, {size} namespace{'s' if size > 1 else ''}"
    speed = Row(f"{name}: creates", "/s", True, {}, ONE)
    others = {
        what: Row(f"{name}: {what}", unit, False, {}, ONE)
        for what, unit in (
            ("create + close, p50", "ms"),
            ("create + close, p99", "ms"),
            ("CPU of all servers", "µs"),
            ("CPU of the busiest server", "µs"),
        )
    }

    def measure(system: System) -> Mapping[str, float | None]:
        assert isinstance(system, Site)
        found = _measure(system, KINDS[kind][1], size, extent.files)
        return {speed.name: found.pop("creates")} | {others[w].name: v for w, v in found.items()}

    return Group((speed, *others.values()), measure)


def _measure(system: Site, coherence: str, size: int, files: int) -> dict[str, float]:
    """What each file costs, without what the servers use in that time at rest."""
    tasks = []
    for number in range(_WRITERS):
        folder = system.root / f"{coherence}{number % size}"
        tasks.append(_writer(load.new_names(folder, files // _WRITERS)))
    settle([system], _SETTLE_S)
    rest, began = system.used(), time.monotonic()
    time.sleep(_REST_S)
    rest_s = time.monotonic() - began
    before, began = system.used(), time.monotonic()
    rates = [(late - early) / rest_s for early, late in zip(rest, before, strict=True)]
    took = [each for some in together(tasks) for each in some]
    elapsed = time.monotonic() - began
    settle([system], _SETTLE_S)
    whole = time.monotonic() - began
    after = system.used()
    cuts = statistics.quantiles(took, n=100)
    server = [
        _MICRO * (late - early - whole * rate) / len(took)
        for early, late, rate in zip(before, after, rates, strict=True)
    ]
    return {
        "creates": len(took) / elapsed,
        "create + close, p50": 1e3 * cuts[49],
        "create + close, p99": 1e3 * cuts[98],
        "CPU of all servers": sum(server),
        "CPU of the busiest server": max(server),
    }


def _writer(names: Sequence[str]) -> Task:
    """Makes files; returns the seconds that each took."""

    def work() -> list[float]:
        took = []
        for name in names:
            began = time.monotonic()
            descriptor = os.open(name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            os.write(descriptor, _BLOCK)
            os.close(descriptor)
            took.append(time.monotonic() - began)
        return took

    return lambda: work
