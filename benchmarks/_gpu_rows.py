"""Loads of a file into a GPU: the ways that are compared, and the rows. All in this process, whose
memory of the GPU is kept between them: no way pays for making it."""

import contextlib
import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from benchmarks import _cold
from benchmarks._interleave import NATIVE, SAFETENSORS, Group, Results, Row, Target
from benchmarks._load import MIB
from benchmarks._systems import System, Unavailable
from gds.probe.capability import probe
from gds.probe.machine_limits import timed

if TYPE_CHECKING:
    from gds.device.devices import Mark, Work

GDS: Final = "gds"
_DEVICE: Final = "cuda:0"
_COPIED: Final = 1 << 30
"""Bytes of one measurement of the copies' limit."""
_clock: Final = time.perf_counter

_COLD: Final = Row("into the GPU, cold", "GB/s", True, {GDS: (Target("of_native", 0.9),)})
_WARM: Final = Row("into the GPU, warm", "GB/s", True)
_COPIES: Final = Row("the same, of copies from pinned memory", "GB/s", True)
_STAGE: Final = Row(
    "its copies alone, of copies from pinned memory",
    "GB/s",
    True,
    {GDS: (Target("of_native", 0.9),)},
)


class Way(System):
    """One way to load `file`."""

    def __init__(self, name: str, file: Path, load: Callable[[Path], object]) -> None:
        super().__init__(name, file.parent)
        self.file = file
        self._load = load

    def cold(self) -> Mapping[str, float]:
        """GB/s by row."""
        return {_COLD.name: self._rate()}

    def warm(self) -> Mapping[str, float]:
        """GB/s by row."""
        rate = self._rate()
        return {_WARM.name: rate, _COPIES.name: rate}

    def copies(self) -> Mapping[str, float]:
        """GB/s by row, of a warm load's copies, by which all of it comes. Raises Unavailable."""
        with timed_copies() as copies:
            self._rate()
        if not copies:
            raise Unavailable("the load queued no copies")
        return {_STAGE.name: self.file.stat().st_size / busy_s(copies) / 1e9}

    def warm_up(self) -> None:
        """The first load of a process is like no other."""
        self.warm()

    def _rate(self) -> float:
        import torch

        torch.cuda.synchronize()
        began = _clock()
        found = self._load(self.file)
        torch.cuda.synchronize()
        elapsed = _clock() - began
        del found
        return self.file.stat().st_size / elapsed / 1e9


class Plain(Way):
    """Plain reads in all forms; what counts is the form with the best median (`settle`)."""

    def __init__(self, file: Path) -> None:
        super().__init__(NATIVE, file, lambda _: None)
        self._rates = Results()

    def cold(self) -> Mapping[str, float]:
        return {_COLD.name: self._best(_COLD, lambda: _cold.make_cold([self.file]))}

    def warm(self) -> Mapping[str, float]:
        return {_WARM.name: self._best(_WARM, lambda: None), _COPIES.name: copy_rate()}

    def copies(self) -> Mapping[str, float]:
        return {_STAGE.name: copy_rate()}

    def warm_up(self) -> None:
        super().warm_up()
        self._rates = Results()

    def _best(self, row: Row, prepare: Callable[[], None]) -> float:
        """Of this round; each form has a rate of each round, None where it failed. Raises
        Unavailable: all did."""
        rates = []
        for form, measure in _forms():
            prepare()
            rate = None
            with contextlib.suppress(OSError, RuntimeError, ValueError, ImportError):
                rate = measure(self.file) / 1e9
            self._rates.add(row.name, form, rate)
            rates.append(rate or 0)
        if not any(rates):
            raise Unavailable("no form of plain reads works")
        return max(rates)

    def settle(self, results: Results) -> dict[str, dict[str, float | None]]:
        """The medians of all forms, by row. The best of them is the native speed of each round: the
        best of many in each round would be its luck."""
        found = {}
        for row, forms in self._rates.samples.items():
            found[row] = {form: self._rates.median(row, form) for form in forms}
            best = max(forms, key=lambda form: found[row][form] or 0)
            if found[row][best]:
                results.samples[row][NATIVE] = forms[best]
        return found


def ways(file: Path) -> list[Way]:
    """Raises nothing: what is missing is said when it is measured."""
    return [
        Plain(file),
        Way(GDS, file, _gds("")),
        Way("gds pinned", file, _gds("pinned")),
        Way("gds cufile", file, _gds("cufile")),
        Way(SAFETENSORS, file, _safetensors),
    ]


def groups() -> list[Group]:
    return [
        Group((_COLD,), _measure_cold),
        Group((_WARM, _COPIES), _measure_warm),
        Group((_STAGE,), _measure_copies, applies=lambda way: way.name in (NATIVE, GDS)),
    ]


def _measure_cold(system: System) -> Mapping[str, float]:
    assert isinstance(system, Way)
    _cold.make_cold([system.file])
    return system.cold()


def _measure_warm(system: System) -> Mapping[str, float]:
    assert isinstance(system, Way)
    _make_warm(system.file)
    return system.warm()


def _measure_copies(system: System) -> Mapping[str, float]:
    assert isinstance(system, Way)
    _make_warm(system.file)
    return system.copies()


def _make_warm(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(8 * MIB):
            pass


def _gds(asked: str) -> Callable[[Path], object]:
    def load(file: Path) -> object:
        import gds
        from gds.probe.io_path import ASKED

        os.environ[ASKED] = asked
        return gds.load_file(file, _DEVICE)

    return load


def _safetensors(file: Path) -> object:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise Unavailable(str(error)) from None
    return load_file(file, device=_DEVICE)


# --- limits --------------------------------------------------------------------------------------


def _forms() -> Iterator[tuple[str, Callable[[Path], float]]]:
    """Bytes a second of plain reads into the GPU, by name."""
    for direct, threads in itertools.product((False, True), (4, 8)):
        name = f"{'O_DIRECT' if direct else 'buffered'} and copies, {threads} x 8 MiB"
        yield name, lambda file, d=direct, t=threads: pinned_rate(file, direct=d, threads=t)
    for threads in (4, 8, 16):
        name = f"{_kvikio()}, {threads} x 8 MiB"
        yield name, lambda file, t=threads: kvikio_rate(file, t)


def _kvikio() -> str:
    return "kvikio" if probe().lists_modules else "kvikio's own reads"


def pinned_rate(file: Path, *, direct: bool, threads: int, read_bytes: int = 8 * MIB) -> float:
    """Of preads into two pinned buffers of each thread, one copied while the other is read."""
    import torch

    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
    try:
        total = os.fstat(fd).st_size
        there = torch.empty(total, dtype=torch.uint8, device=_DEVICE)
        lanes = [_Lane(read_bytes) for _ in range(threads)]
        torch.cuda.synchronize()
        began = _clock()
        timed(
            threads,
            range(0, total, read_bytes),
            lambda number, begin: lanes[number].read(fd, there, begin),
        )
        torch.cuda.synchronize()
        return total / (_clock() - began)
    finally:
        os.close(fd)


class _Lane:
    """One thread's buffers."""

    def __init__(self, size: int) -> None:
        import torch

        self._stream = torch.cuda.Stream(_DEVICE)
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied: list[Any] = [torch.cuda.Event() for _ in range(2)]
        self._at = 0

    def read(self, fd: int, there: Any, begin: int) -> None:
        import torch

        self._at = 1 - self._at
        buffer, copied = self._buffers[self._at], self._copied[self._at]
        copied.synchronize()
        wanted = min(len(buffer), len(there) - begin)
        memory = memoryview(buffer.numpy())
        done = 0
        while done < wanted:
            count = os.preadv(fd, [memory[done:]], begin + done)
            if not count:
                raise OSError(f"the file ends at {begin + done}")
            done += count
        with torch.cuda.stream(self._stream):
            there[begin : begin + wanted].copy_(buffer[:wanted], non_blocking=True)
            copied.record()


def kvikio_rate(file: Path, threads: int, task_bytes: int = 8 * MIB) -> float:
    """Of one read of the whole file, which kvikio divides among its threads: by its own reads where
    cuFile would not come back from opening a file."""
    import kvikio
    import kvikio.defaults
    import torch

    there = torch.empty(file.stat().st_size, dtype=torch.uint8, device=_DEVICE)
    settings: dict[str, Any] = {"num_threads": threads, "task_size": task_bytes}
    if not probe().lists_modules:
        settings["compat_mode"] = kvikio.CompatMode.ON
    with kvikio.defaults.set(settings):
        torch.cuda.synchronize()
        with kvikio.CuFile(str(file)) as opened:
            began = _clock()
            count = opened.read(there)
            elapsed = _clock() - began
    return float(count / elapsed)


def copy_rate() -> float:
    """GB/s of copies from pinned memory, as PCI Express (or NVLink) gives them."""
    import torch

    buffer = torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(64 * MIB, dtype=torch.uint8, device=_DEVICE)
    there.copy_(buffer, non_blocking=True)
    torch.cuda.synchronize()
    began = _clock()
    for _ in range(_COPIED // len(buffer)):
        there.copy_(buffer, non_blocking=True)
    torch.cuda.synchronize()
    return _COPIED / (_clock() - began) / 1e9


# --- copies alone --------------------------------------------------------------------------------

Interval = tuple[float, float]
"""Seconds on the GPU's clock: a copy's begin and end."""


def busy_s(copies: Iterable[Interval]) -> float:
    """Seconds in which at least one copy was under way: what overlaps counts once. Pure."""
    busy = 0.0
    until = -math.inf
    for begin, end in sorted(copies):
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return busy


@contextlib.contextmanager
def timed_copies() -> Iterator[list[Interval]]:
    """Loads of the block have what they queue timed, between two events of its stream; behind the
    block the list has them."""
    import torch

    from gds.device import cuda

    event = functools.partial(torch.cuda.Event, enable_timing=True)
    events: list[tuple[Any, Any]] = []

    class TimedQueue(cuda.CudaQueue):
        def submit(self, work: "Work", after: "Sequence[Mark]" = ()) -> "Mark":
            begin, end = event(), event()

            def timed_work() -> None:
                begin.record()
                work()
                end.record()

            mark = super().submit(timed_work, after)
            events.append((begin, end))
            return mark

        def copy(self, to: Any, staged: Any, after: "Sequence[Mark]" = ()) -> "Mark":
            begin, end = event(), event()
            begin.record(self._stream)
            mark = super().copy(to, staged, after)
            end.record(self._stream)
            events.append((begin, end))
            return mark

    found: list[Interval] = []
    first = event()
    first.record()
    with mock.patch.object(cuda, "CudaQueue", TimedQueue):
        yield found
    torch.cuda.synchronize()
    for pair in events:
        begin_s, end_s = (first.elapsed_time(each) / 1e3 for each in pair)
        found.append((begin_s, end_s))
