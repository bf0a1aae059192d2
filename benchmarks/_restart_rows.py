"""What programs wait for while a node's daemon is replaced (`kvfs restart`) or killed, beside many
files that the kernel knows and many that are open.

Each kind of call has a process of its own: one that waits holds up no other. They pause between
calls, so that they do not take the processors from the daemon that begins.
"""

import contextlib
import errno
import itertools
import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks._bulk_files import fill_store
from benchmarks._interleave import Group, Row, Target
from benchmarks._processes import Task, together
from benchmarks._several import wait_for
from benchmarks._systems import Kvfs, System, Unavailable
from kvfs.base import control
from kvfs.base.errors import KvfsError
from kvfs.client import Client

NAMESPACE: Final = "models"
_PAUSE_S: Final = 0.002
_BEFORE_S: Final = 0.3
_AFTER_S: Final = 0.5
_BYTES: Final = 64 << 10
_PAGE: Final = mmap.PAGESIZE
_OPENED: Final = "opened-"
_SEAL_S: Final = 0.5
_SET_UID: Final = 0o4644
"""The mode of a file that is relayed also where others are not: its writes clear the bit."""
_CALLS: Final = "longest call on names, s"
_RELAYED: Final = "longest relayed read, s"
_PASSED: Final = "longest passthrough read, ms"
_MAPPED: Final = "longest fault of a mapping, ms"
_BAR_S: Final = 1.0
Step = Callable[[], object]


@dataclass(frozen=True)
class Scale:
    """How much there is."""

    known: int
    """Files that the kernel knows."""
    opened: int
    """Files that are open."""


def groups(scale: Scale) -> list[Group]:
    """One of `kvfs restart`, one of a kill."""
    data = _Data(scale)
    return [_group("kvfs restart", data, _restart), _group("kill -9", data, _kill)]


def _group(name: str, data: "_Data", replace: Callable[[Kvfs], object]) -> Group:
    bar = (Target("at_most", _BAR_S),)
    bars = {"passthrough": bar, "relay": bar}
    rows = {
        _CALLS: Row(f"{name}: {_CALLS}", "", False, bars),
        _RELAYED: Row(f"{name}: {_RELAYED}", "", False, bars),
        _PASSED: Row(f"{name}: {_PASSED}", "", False),
        _MAPPED: Row(f"{name}: {_MAPPED}", "", False),
    }

    def measure(system: System) -> Mapping[str, float | None]:
        assert isinstance(system, Kvfs)
        found = _measured(system, data, replace)
        return {row.name: found.get(what) for what, row in rows.items()}

    return Group(list(rows.values()), measure, data.make)


class _Data:
    """The files of a node."""

    def __init__(self, scale: Scale) -> None:
        self.scale = scale
        self._made: set[str] = set()

    def make(self, system: System) -> None:
        """Makes them, once for each node, which is stopped and started again for that."""
        if system.name in self._made:
            return
        assert isinstance(system, Kvfs)
        top = system.mountpoint / NAMESPACE
        sample = top / "sample"
        sample.write_bytes(bytes(_PAGE))
        with Client(system.store) as client:
            wait_for(lambda: client.stat(f"/{NAMESPACE}/sample").checksum, "the seal", _SEAL_S)
        number = sample.stat().st_ino
        system.stop()
        fill_store(system.store, NAMESPACE, number, self.scale.known)
        system.up()
        system.root.mkdir(exist_ok=True)
        for each, (path, mode) in enumerate(self._opened(system)):
            path.write_bytes(_content(each))
            path.chmod(mode)
        self._made.add(system.name)

    def _opened(self, system: System) -> Iterator[tuple[Path, int]]:
        for number in range(self.scale.opened):
            mode = _SET_UID if number % 3 == 0 else 0o644
            yield system.root / f"{_OPENED}{number}", mode

    def relayed(self, system: System) -> list[Path]:
        """The files that the daemon reads also in passthrough mode."""
        return [path for path, mode in self._opened(system) if mode == _SET_UID]

    def others(self, system: System) -> list[Path]:
        """The files that the kernel reads by itself in passthrough mode."""
        return [path for path, mode in self._opened(system) if mode != _SET_UID]

    def know(self, system: System) -> None:
        """Has the kernel know every file."""
        assert isinstance(system, Kvfs)
        found = 0
        for directory, _, names in os.walk(system.mountpoint / NAMESPACE):
            for name in names:
                os.stat(f"{directory}/{name}")
                found += 1
        if found < self.scale.known:
            raise FileNotFoundError(f"{found} of {self.scale.known} files are there")


def _measured(
    node: Kvfs, data: _Data, replace: Callable[[Kvfs], object]
) -> Mapping[str, float | None]:
    """Returns the longest that each kind of call took while the daemon was replaced. Raises
    TaskFailed where a call fails, or a read finds other bytes."""
    data.know(node)
    others = data.others(node)
    half = len(others) // 2
    kinds: dict[str, Callable[[], Step]] = {
        _CALLS: lambda: _names(node.root),
        _RELAYED: lambda: _reads(data.relayed(node), os.O_DIRECT),
        _MAPPED: lambda: _faults(others[half:]),
    }
    if node.mode != "relay":
        kinds[_PASSED] = lambda: _reads(others[:half], 0)
    with contextlib.closing(mmap.mmap(-1, 1)) as is_over:
        tasks = [_calls(begin, is_over) for begin in kinds.values()]
        longest = together([*tasks, lambda: lambda: _replaced(node, replace, is_over)])
    found = dict(zip(kinds, longest, strict=False))
    return {what: s * (1e3 if what in (_PASSED, _MAPPED) else 1) for what, s in found.items()}


def _calls(begin: Callable[[], Step], is_over: mmap.mmap) -> Task:
    """Returns a task that calls again and again until all is over, and returns the longest time."""

    def task() -> Callable[[], float]:
        step = begin()
        return lambda: _longest(step, is_over)

    return task


def _longest(step: Step, is_over: mmap.mmap) -> float:
    longest = 0.0
    while not is_over[0]:
        began = time.perf_counter()
        step()
        longest = max(longest, time.perf_counter() - began)
        time.sleep(_PAUSE_S)
    return longest


def _names(top: Path) -> Step:
    """Calls on names in turn: a new file, another name, a look at it, a listing, the removal."""
    made, renamed = top / "made", top / "renamed"
    for each in (made, renamed):  # the last measurement ended between two calls
        each.unlink(missing_ok=True)
    calls: Sequence[Step] = (
        lambda: os.close(os.open(made, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)),
        lambda: os.rename(made, renamed),
        lambda: os.stat(renamed),
        lambda: os.listdir(top),
        lambda: os.unlink(renamed),
    )
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def _reads(paths: Sequence[Path], flags: int) -> Step:
    """Reads of files that stay open, in turn."""
    opened = [(os.open(path, os.O_RDONLY | flags), _number_of(path)) for path in paths]
    turns, into = itertools.cycle(opened), mmap.mmap(-1, _BYTES)

    def step() -> None:
        fd, number = next(turns)
        if os.preadv(fd, [into], 0) != _BYTES:
            raise OSError(errno.EIO, "a short read")
        _compare(into, number)

    return step


def _faults(paths: Sequence[Path]) -> Step:
    """Looks at pages of mapped files, which have to be found again each time."""
    mapped = []
    for path in paths:
        with path.open("rb") as file:
            mapped.append((mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), _number_of(path)))
    turns = itertools.cycle(mapped)

    def step() -> None:
        pages, number = next(turns)
        pages.madvise(mmap.MADV_DONTNEED)
        _compare(pages, number)

    return step


def _content(number: int) -> bytes:
    return number.to_bytes(8, "little") * (_BYTES // 8)


def _number_of(path: Path) -> int:
    return int(path.name.removeprefix(_OPENED))


def _compare(found: mmap.mmap, number: int) -> None:
    if found[:_PAGE] != _content(number)[:_PAGE]:
        raise OSError(errno.EIO, "other bytes")


# --- the daemon ---------------------------------------------------------------------------------


def _replaced(node: Kvfs, replace: Callable[[Kvfs], object], is_over: mmap.mmap) -> None:
    """Returns when another daemon serves and some calls have been made of it."""
    try:
        before = node.daemon()
        time.sleep(_BEFORE_S)
        replace(node)
        wait_for(lambda: _serves(node, before), "the next daemon", _PAUSE_S)
        time.sleep(_AFTER_S)
    finally:
        is_over[0] = 1


def _serves(node: Kvfs, before: int | None) -> bool:
    try:
        status = control.call(node.store / "run" / "control.sock", "status")
    except KvfsError:
        return False
    return bool(status["mount"]) and status["pid"] != before


def _restart(node: Kvfs) -> None:
    node.command("restart")


def _kill(node: Kvfs) -> None:
    pid = node.daemon()
    if pid is None:
        raise Unavailable(f"{node.name} does not run")
    os.kill(pid, signal.SIGKILL)
