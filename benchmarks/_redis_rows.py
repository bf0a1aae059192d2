"""The Redis engine, on a server of its own on a socket: tasks of one event loop, as a node has.

Figures are of this process and the server together, on the same cores: units a second, the CPU time
of this process for one, and requests to the server.
"""

import contextlib
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import trio

from kvfs.meta.engine import Transaction
from kvfs.meta.redis.engine import RedisEngine

PROGRAMS: Final = ("redis-server", "valkey-server")
_BATCH: Final = 256
_TASKS: Final = 32
_NAMES: Final = 52_000
_VALUE: Final = b"v" * 100
"""As long as a file's record."""


class Sample(NamedTuple):
    """One measurement."""

    per_second: float
    cpu_us: float
    requests: float
    """Each of them for one unit."""


def measure(directory: Path, rounds: int) -> list[dict[str, Any]]:
    """Rows as the report has them; none where no server is installed."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        return []
    with _server(program, directory) as url:
        engine = RedisEngine(url)
        try:
            samples = trio.run(_measure, engine, rounds)
        finally:
            engine.close()
    return [
        {"row": name, "systems": {Path(program).name: _medians(each)}}
        for name, each in samples.items()
    ]


def table(measured: list[dict[str, Any]]) -> str:
    """A line for each row."""
    lines = []
    for row in measured:
        for system, each in row["systems"].items():
            lines.append(
                f"{system}: {row['row']:<42} {each['per_second']:>11,.0f}/s"
                f"  {each['cpu_us']:>8,.2f} us of CPU  {each['requests']:.3f} requests"
            )
    return "\n".join(lines)


class Row(NamedTuple):
    """One figure: what each of several tasks does, so often, and how many units each time is."""

    name: str
    work: Callable[[RedisEngine, int, int], Awaitable[None]]
    tasks: int
    calls: int
    units: int


@contextlib.contextmanager
def _server(program: str, directory: Path) -> Iterator[str]:
    directory.mkdir()
    socket = directory / "s"
    process = subprocess.Popen(
        [program, "--port", "0", "--unixsocket", socket, "--save", "", "--dir", directory],
        stdout=subprocess.DEVNULL,
    )
    try:
        yield f"unix://{socket}"
    finally:
        process.kill()
        process.wait()


async def _measure(engine: RedisEngine, rounds: int) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {}
    for at in range(0, _NAMES, 1_000):
        names = [_name(number) for number in range(at, at + 1_000)]
        await engine.transact(lambda t, names=names: [t.put(name, _VALUE) for name in names])
    for _ in range(rounds):
        for row in _ROWS:
            # Which knows nothing yet.
            async with engine.within():
                samples.setdefault(row.name, []).append(await _sample(engine, row))
    return samples


async def _sample(engine: RedisEngine, row: Row) -> Sample:
    await row.work(engine, 0, 1)
    requests, used, began = engine.round_trips, _cpu_s(), time.perf_counter()
    async with trio.open_nursery() as nursery:
        for task in range(row.tasks):
            nursery.start_soon(row.work, engine, task, row.calls)
    took = time.perf_counter() - began
    units = row.tasks * row.calls * row.units
    return Sample(
        units / took, (_cpu_s() - used) / units * 1e6, (engine.round_trips - requests) / units
    )


async def _read_known(engine: RedisEngine, _task: int, calls: int) -> None:
    for _ in range(calls):
        await _read(engine, 0)


async def _read_new(engine: RedisEngine, task: int, calls: int) -> None:
    for call in range(calls):
        await _read(engine, 1 + task * calls + call)


async def _read(engine: RedisEngine, batch: int) -> None:
    names = [_name(number) for number in range(batch * _BATCH, (batch + 1) * _BATCH)]
    assert None not in await engine.read(lambda t: t.get_many(names))


async def _increment(engine: RedisEngine, task: int, calls: int) -> None:
    name = b"counter %d" % task

    def increment(t: Transaction) -> None:
        t.put(name, b"%d" % (int(t.get(name) or b"0") + 1))

    for _ in range(calls):
        await engine.transact(increment)


_ROWS: Final = (
    Row(f"key, {_BATCH} in a read, known here", _read_known, 1, 192, _BATCH),
    Row(f"key, {_BATCH} in a read, not known", _read_new, 1, 192, _BATCH),
    Row(f"the same, {_TASKS} tasks", _read_new, _TASKS, 6, _BATCH),
    Row("transaction, one after the other", _increment, 1, 500, 1),
    Row(f"transaction, {_TASKS} tasks", _increment, _TASKS, 200, 1),
)


def _name(number: int) -> bytes:
    return b"name %06d" % number


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _medians(samples: list[Sample]) -> dict[str, float]:
    columns = zip(*samples, strict=True)
    return dict(zip(Sample._fields, map(statistics.median, columns), strict=True))
