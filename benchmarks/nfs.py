"""The NFS door against the same NFS-Ganesha on a plain directory, interleaved.

Both serve on the loopback, with the same settings; the client is libnfs, two connections. The page
cache is warm for reads, WRITEs are committed at the end. Prints a table of medians and ratios with
each target, then one JSON object.
"""

import argparse
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks import _libnfs, _program, _raw_v4
from benchmarks._guard import Guard
from benchmarks._interleave import NATIVE, Group, Results, Row, Target, run
from benchmarks._libnfs import Client
from benchmarks._systems import Kvfs, System, Unavailable
from gateway.nfs import requirements
from tests.nfs import ganesha
from tests.ports import free_port

_GIB: Final = 1 << 30
_FILES: Final = 1_000
_CONNECTIONS: Final = 2
_SETTINGS: Final = """MDCACHE { LRU_Run_Interval = 1; FD_LWMark_Percent = 0; FD_HWMark_Percent = 90;
    Reaper_Work_Per_Lane = 100000; }
"""
_say: Final = _program.teller("nfs")
Step = Callable[[], object]
Ended = Callable[[], None]


class Served(System):
    """What a client reaches by NFS."""

    port = mount_port = 0
    export = "/bench"
    weights = "/weights"
    """Read-only."""

    def directory(self, export: str) -> Path:
        """Of one of both."""
        return self.root if export == self.export else self.root.with_name("weights")

    def clients(self, version: int, count: int, export: str = "/bench") -> list[Client]:
        library = _libnfs.load()
        assert library is not None
        made = [Client(library, version, self.port, self.mount_port) for _ in range(count)]
        for each in made:
            each.mount(export)
        return made

    def writers(self, version: int, count: int) -> Sequence[Client | _raw_v4.Writer]:
        """Clients that write."""
        if version == 3:
            return self.clients(version, count)
        return [_raw_v4.Writer(self.port, self.export) for _ in range(count)]


class Plain(Served):
    """Ganesha on a directory."""

    def __init__(self, base: Path) -> None:
        super().__init__(NATIVE, base / "exported")
        self._base = base
        self._stack = ExitStack()
        self._pid = 0

    def start(self, guard: Guard) -> None:
        super().start(guard)
        _open_to_all(self.root)
        exports = {"bench": self.root, "weights": self.directory(self.weights)}
        exports["weights"].mkdir()
        place = self._base / "ganesha"
        place.mkdir()
        found = self._stack.enter_context(ganesha.serving(place, exports, more=_SETTINGS))
        guard.process(found.process.pid)
        self.port, self.mount_port = found.port, found.mount_port
        self._pid = found.process.pid

    def stop(self) -> None:
        self._stack.close()

    def daemon(self) -> int | None:
        return self._pid


class Door(Kvfs, Served):
    """A node that serves NFS."""

    def __init__(self, base: Path) -> None:
        self.port, self.mount_port = free_port(), free_port()
        flags = ("--nfs", f"127.0.0.1:{self.port}", "--nfs-v3", "--s3", "off")
        mount_port = ("--nfs-mount-port", str(self.mount_port))
        super().__init__("passthrough", base, "passthrough", *flags, *mount_port)
        self.root = self.mountpoint / "bench"

    def start(self, guard: Guard) -> None:
        super().start(guard)
        _open_to_all(self.root)
        self.command("nfs", "export", "bench")
        self.directory(self.weights).mkdir()
        self.command("nfs", "export", "weights", "--read-only")


def main() -> int:
    options = _options()
    lacking = ganesha.why_not() or "; ".join(each.what for each in requirements.lacks())
    if lacking or _libnfs.load() is None:
        _say(lacking or "libnfs is not installed: apt-get install libnfs-utils")
        return 69
    size = _GIB // 8 if options.quick else _GIB
    with _program.place(options.dir, _say) as place:
        wanted = [Plain(place.base / "native"), Door(place.base / "kvfs")]
        systems, left_out = _program.start(wanted, place, _say)
        groups = _program.chosen(_groups(size), options.rows)
        _program.prepare(groups, systems, place.guard, 2.0, _say)
        results = Results()
        deadline = time.monotonic() + (60.0 if options.quick else 900.0)
        rounds = options.rounds or (3 if options.quick else 7)
        run(
            groups,
            systems,
            results,
            rounds=rounds,
            deadline=deadline,
            watch=place.guard.watch,
            say=_say,
        )
    rows = _program.rows_of(groups, options.rows)
    names = [each.name for each in systems]
    _program.conclude("nfs", options, rows, names, results, left_out)
    return 0


def _groups(size: int) -> list[Group]:
    groups = []
    for version in (3, 4):
        what = "1 GiB" if size == _GIB else f"{size >> 20} MiB"
        own = Row(f"v{version} read {what}", "MB/s", True, _targets(0.9))
        own_cpu = Row(f"v{version} read, CPU", "s/GiB", False)
        weights = Row(f"v{version} read {what}, read-only", "MB/s", True, _targets(0.9))
        weights_cpu = Row(f"v{version} read, read-only, CPU", "s/GiB", False)
        write = Row(f"v{version} write {what}", "MB/s", True, _targets(0.9))
        write_cpu = Row(f"v{version} write, CPU", "s/GiB", False)
        create = Row(f"v{version} create + close", "µs", False, _targets(0.5))
        unlink = Row(f"v{version} unlink", "µs", False)
        stat = Row(f"v{version} stat", "µs", False)
        groups += [
            Group(
                [own, own_cpu],
                _moving([own, own_cpu], version, size, partial(_reading, Served.export)),
                partial(_prepare, Served.export, size, _libnfs.USER),
            ),
            Group(
                [weights, weights_cpu],
                _moving([weights, weights_cpu], version, size, partial(_reading, Served.weights)),
                partial(_prepare, Served.weights, size, 0),
            ),
            Group([create, unlink], _making(create, unlink, version)),
            Group([stat], _asking(stat, version), _knowing),
            Group([write, write_cpu], _moving([write, write_cpu], version, size, _writing)),
        ]
    return groups


def _targets(bound: float) -> Mapping[str, Sequence[Target]]:
    return {"passthrough": [Target("of_native", bound)]}


def _prepare(export: str, size: int, owner: int, system: System) -> None:
    assert isinstance(system, Served)
    path = system.directory(export) / "read"
    with path.open("wb") as file:
        for _ in range(size >> 20):
            file.write(os.urandom(1 << 20))
    os.chown(path, owner, owner)


def _reading(export: str, system: "Served", version: int, part: int) -> tuple[list[Step], Ended]:
    clients = system.clients(version, _CONNECTIONS, export)
    steps: list[Step] = [
        partial(each.read, "/read", at * part, part) for at, each in enumerate(clients)
    ]
    return steps, lambda: _close(clients)


def _writing(system: "Served", version: int, part: int) -> tuple[list[Step], Ended]:
    writers = system.writers(version, _CONNECTIONS)
    steps: list[Step] = [
        partial(each.write, f"/written-{at}", part) for at, each in enumerate(writers)
    ]

    def end() -> None:
        (client,) = system.clients(version, 1)
        for at in range(_CONNECTIONS):
            client.unlink(f"/written-{at}")
        _close([*writers, client])

    return steps, end


def _moving(
    rows: Sequence[Row],
    version: int,
    size: int,
    moving: Callable[["Served", int, int], tuple[list[Step], Ended]],
) -> Callable[[System], Mapping[str, float]]:
    """`rows`: speed and CPU. `moving` makes the steps of all connections, each of which moves a
    part of as many bytes, and what ends them."""
    speed, cpu = rows

    def measure(system: System) -> Mapping[str, float]:
        assert isinstance(system, Served)
        steps, end = moving(system, version, size // _CONNECTIONS)
        try:
            seconds, used = _together(system, steps)
        finally:
            end()
        return {speed.name: size / seconds / 1e6, cpu.name: used * _GIB / size}

    return measure


def _making(create: Row, unlink: Row, version: int) -> Callable[[System], Mapping[str, float]]:
    def measure(system: System) -> Mapping[str, float]:
        assert isinstance(system, Served)
        directory = system.root / "many"
        _open_to_all(directory)
        try:
            (client,) = system.clients(version, 1)
            began = time.perf_counter()
            for number in range(_FILES):
                client.create(f"/many/{number}")
            made = time.perf_counter()
            for number in range(_FILES):
                client.unlink(f"/many/{number}")
            ended = time.perf_counter()
            client.close()
        finally:
            shutil.rmtree(directory)
        each = 1e6 / _FILES
        return {create.name: (made - began) * each, unlink.name: (ended - made) * each}

    return measure


def _knowing(system: System) -> None:
    (system.root / "known").touch()


def _asking(stat: Row, version: int) -> Callable[[System], Mapping[str, float]]:
    def measure(system: System) -> Mapping[str, float]:
        assert isinstance(system, Served)
        (client,) = system.clients(version, 1)
        began = time.perf_counter()
        for _ in range(_FILES):
            client.stat("/known")
        ended = time.perf_counter()
        client.close()
        return {stat.name: (ended - began) * 1e6 / _FILES}

    return measure


def _open_to_all(directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    directory.chmod(0o777)


def _together(system: System, steps: Sequence[Step]) -> tuple[float, float]:
    """Seconds that they take, and seconds of CPU that the servers took meanwhile."""
    failures: list[BaseException] = []

    def step(work: Step) -> None:
        try:
            work()
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=step, args=(each,)) for each in steps]
    before, began = _cpu_s(system), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    if failures:
        raise Unavailable(str(failures[0]))
    return seconds, _cpu_s(system) - before


def _cpu_s(system: System) -> float:
    ticks = 0
    for pid in system.processes():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _close(clients: Sequence[Client | _raw_v4.Writer]) -> None:
    for each in clients:
        each.close()


def _options() -> argparse.Namespace:
    return _program.parser(
        "nfs", __doc__, quick="128 MiB, three rounds", rounds="rounds of each row (7; --quick: 3)"
    ).parse_args()


if __name__ == "__main__":
    sys.exit(main())
