"""The rows of `requests`: what each flow asks of the mount, and what it may cost."""

import ctypes
import os
import secrets
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks import _call_counter
from benchmarks._call_counter import Counted
from benchmarks._interleave import BEFORE, Group, Row, Target
from benchmarks._load import stat_missing
from benchmarks._systems import Kvfs, System

_HOST: Final = "127.0.0.1"
_BLOCK: Final = bytes(4096)
COUNTED: Final = 200
_AT_FDCWD: Final = -100
_FORCE_SYNC: Final = 0x2000
_BASIC_STATS: Final = 0x7FF
_MICRO: Final = 1e6
_NANO: Final = 1e9
Call = Callable[[str], object]
_clock = time.perf_counter_ns
_libc = ctypes.CDLL(None, use_errno=True)
_statx_buffer = ctypes.create_string_buffer(256)


class Measured(Kvfs):
    """A node whose daemon's calls can be counted; of this checkout, or another."""

    def __init__(
        self, name: str, base: Path, mode: str, checkout: Path | None, *arguments: str
    ) -> None:
        """`arguments`: further ones of `kvfs up`."""
        self.counts = base / "counts"
        port = _free_port()
        self.address = (_HOST, port)
        super().__init__(
            name,
            base,
            mode,
            *("--s3", f"{_HOST}:{port}", "--s3-workers", "1", "--admin", "off", *arguments),
            checkout=checkout,
            environment=_call_counter.environment(self.counts),
            path=self.counts,
        )

    @cached_property
    def keys(self) -> tuple[str, str]:
        """Access key and secret."""
        lines = self.command("s3", "env", "--s3", "{}:{}".format(*self.address)).splitlines()
        told = dict(line.removeprefix("export ").split("=", 1) for line in lines)
        return told["AWS_ACCESS_KEY_ID"], told["AWS_SECRET_ACCESS_KEY"]

    def counted(self, work: Callable[[], object]) -> Counted:
        """The calls of the daemon's main thread meanwhile."""
        pid = self.daemon()
        assert pid is not None
        return self._counted(pid, work)

    def counted_worker(self, work: Callable[[], object]) -> Counted:
        """Those of the worker that serves S3."""
        (pid,) = (pid for pid in self.processes() if _is_worker(pid))
        return self._counted(pid, work)

    def _counted(self, pid: int, work: Callable[[], object]) -> Counted:
        _call_counter.begin(self.counts, pid)
        work()
        return _call_counter.end(self.counts, pid)


def _free_port() -> int:
    with socket.create_server((_HOST, 0)) as server:
        return int(server.getsockname()[1])


def _is_worker(pid: int) -> bool:
    return b".worker" in Path(f"/proc/{pid}/cmdline").read_bytes()


class _Flow(NamedTuple):
    """One kind of request, or several in the order in which a program makes them."""

    name: str
    requests: Sequence[str]
    """Of all that the kernel makes, those whose calls are bounded, by their handlers."""
    call: Call
    makes: Call | None
    """Makes each name, outside what is measured."""
    tidies: Call | None
    calls: float | None
    """The most that it may take, and the most commits: numbers of inodes are taken by one for many,
    and the node looks at the space that is used every 50 ms."""
    commits: float | None


def groups(count: int) -> list[Group]:
    """In the order of the table; each asks so often in a round."""
    return [_group(flow, count) for flow in _FLOWS]


def calls(system: Measured, name: str) -> float:
    """For each time of this flow, those that its requests take."""
    (flow,) = (each for each in _FLOWS if each.name == name)
    return _call_counter.calls(_count(flow, system), flow.requests) / COUNTED


def profile(system: Measured, pattern: str) -> Iterator[tuple[str, Sequence[tuple[str, float]]]]:
    """Of each request of the flows whose name has the pattern in it, which functions are called how
    often for each time of the flow."""
    for flow in _FLOWS:
        if pattern in flow.name:
            for request, functions in _count(flow, system).items():
                shares = [(name, n / COUNTED) for name, n in functions.most_common()]
                yield f"{flow.name}: {request or 'beside requests'}", shares


# ---- measuring


def _group(flow: _Flow, count: int) -> Group:
    label = " + ".join(name.upper() for name in flow.requests)
    calls = Row(f"{flow.name}: calls for {label}", "", False, at_most(flow.calls), BEFORE)
    all_calls = Row(f"{flow.name}: calls for all", "", False, {}, BEFORE)
    commits = Row(f"{flow.name}: commits", "", False, at_most(flow.commits), BEFORE)
    processor = Row(f"{flow.name}: CPU of the daemon", "µs", False, {}, BEFORE)
    all_processor = Row(f"{flow.name}: CPU, with the caller's", "µs", False, {}, BEFORE)
    middle = Row(f"{flow.name}: p50", "µs", False, {}, BEFORE)
    late = Row(f"{flow.name}: p99", "µs", False, {}, BEFORE)

    def measure(system: System) -> Mapping[str, float]:
        assert isinstance(system, Measured)
        counted = _count(flow, system)
        times, daemon_s, own_s = _time(flow, system, count)
        return {
            calls.name: _call_counter.calls(counted, flow.requests) / COUNTED,
            all_calls.name: _call_counter.calls(counted, counted) / COUNTED,
            commits.name: _call_counter.commits(counted) / COUNTED,
            processor.name: _MICRO * daemon_s / count,
            all_processor.name: _MICRO * (daemon_s + own_s) / count,
            middle.name: statistics.median(times) / 1000,
            late.name: statistics.quantiles(times, n=100)[98] / 1000,
        }

    return Group((calls, all_calls, commits, processor, all_processor, middle, late), measure)


def at_most(most: float | None) -> Mapping[str, Sequence[Target]]:
    bounds = () if most is None else (Target("at_most", most),)
    return {"passthrough": bounds, "relay": bounds}


def _count(flow: _Flow, system: Measured) -> Counted:
    names = _names(flow, system, COUNTED)
    counted = system.counted(lambda: [flow.call(name) for name in names])
    _tidy(flow, names)
    return counted


def _time(flow: _Flow, system: Measured, count: int) -> tuple[list[int], float, float]:
    """Nanoseconds of each, and the seconds of processor time of daemon and caller for all."""
    names = _names(flow, system, count)
    pids = system.processes()
    daemon, own = processor_s(pids), time.process_time()
    times = []
    for name in names:
        began = _clock()
        flow.call(name)
        times.append(_clock() - began)
    taken = processor_s(pids) - daemon, time.process_time() - own
    _tidy(flow, names)
    return times, *taken


def processor_s(pids: Sequence[int]) -> float:
    """To the nanosecond, where /proc/PID/stat has hundredths of a second."""
    return sum(_thread_ns(pid) for pid in pids) / _NANO


def _thread_ns(pid: int) -> int:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((each / "schedstat").read_text().split()[0]) for each in threads)


def new_names(directory: str, count: int) -> list[str]:
    """Names that exist nowhere, of one length."""
    tag = secrets.token_hex(8)
    return [f"{directory}/{tag}{number:016x}" for number in range(count)]


def _names(flow: _Flow, system: System, count: int) -> list[str]:
    names = new_names(str(system.root), count)
    if flow.makes is not None:
        for name in names:
            flow.makes(name)
    return names


def _tidy(flow: _Flow, names: Sequence[str]) -> None:
    if flow.tidies is not None:
        for name in names:
            flow.tidies(name)


# ---- what is asked


def _write(name: str) -> None:
    descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    os.write(descriptor, _BLOCK)
    os.close(descriptor)


def _put_block(name: str) -> None:
    _write(name + ".tmp")
    os.rename(name + ".tmp", name)


def _open(name: str) -> None:
    os.close(os.open(name, os.O_RDONLY))


def _write_and_open(name: str) -> None:
    _write(name)
    _open(name)


def _attributes(name: str) -> None:
    """Asks the daemon, whatever the kernel remembers."""
    path = os.fsencode(name)
    if _libc.statx(_AT_FDCWD, path, _FORCE_SYNC, _BASIC_STATS, _statx_buffer):
        raise OSError(ctypes.get_errno(), name)


def _rename(name: str) -> None:
    os.rename(name, name + ".new")


def _unlink_renamed(name: str) -> None:
    os.unlink(name + ".new")


_BLOCK_REQUESTS: Final = ("create", "flush", "rename")
_FLOWS: Final = (
    _Flow("block", _BLOCK_REQUESTS, _put_block, None, os.unlink, 116, 2.1),
    _Flow("absent name", ("lookup",), stat_missing, None, None, None, 0),
    _Flow("first open", ("open", "release"), _open, _write, os.unlink, 38, 0),
    _Flow("kept descriptor", ("open",), _open, _write_and_open, os.unlink, 13, 0),
    _Flow("attributes", ("getattr",), _attributes, _write, os.unlink, None, 0),
    _Flow("rename", ("rename",), _rename, _write, _unlink_renamed, None, 1),
    _Flow("unlink", ("unlink",), os.unlink, _write, None, None, None),
)
