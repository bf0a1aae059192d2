"""The target of a device's tensors: through buffers of the host, or without them.

    file -> buffer (read) -> the device's memory (queued copy) -> the tensor, once the copy is done

Invariants
- A lane (one thread's way) has two buffers: it reads into one while the other is copied. A buffer
  is read into again when its copy is done.
- A tensor is handed over when all copies into its memory are done, and begins at a multiple of
  `ALIGN_BYTES`: kernels need that, files keep multiples of 8 at best.
- A lane that ends, in whatever way, waits for its copies first: no copy outlives the memory that it
  reads or writes.
- Lines of which only pieces are wanted, and elements that are converted, are cut and converted by
  the device.
"""

import functools
import threading
from collections.abc import Iterator
from typing import Final

import torch

from gds.device.devices import Device, Mark, Queue, Staging, Work, first_line
from gds.device.double_buffer import DoubleBuffer
from gds.io.source import SourceFile
from gds.io.target import STAGE_BYTES, Lane, Target
from gds.io.timings import Stage, during
from gds.plan.load_plan import READ_BYTES, InPlace, LoadPlan
from gds.plan.pages import PAGE_BYTES, page_down, page_up
from kvfs.base.errors import NoSpace

ALIGN_BYTES: Final = 16
CACHED_BYTES: Final = 8 << 20
"""Bytes of one read and copy of data in the page cache: the processor's cache still has a buffer
when it is copied, and when it is read into again. Shorter ones have the threads wait for the
interpreter's lock."""


class DeviceTarget(Target):
    """The memory of one load on a device."""

    def __init__(self, plan: LoadPlan, device: Device, dtype: torch.dtype | None) -> None:
        super().__init__(plan, dtype)
        self._device = device
        self._ready: dict[int, Mark] = {}
        """The mark at which a unit's memory may be written, by unit (`LoadPlan.unit`)."""
        self._lock = threading.Lock()
        self._landing: dict[int, dict[Queue, Mark]] = {}
        """The newest copy of each lane into a unit, by unit."""
        self._aligning = device.queue()

    def lane(self) -> Lane:
        return DeviceLane(self, self._device)

    def _make_run(self, number: int) -> torch.Tensor:
        run = self._plan.runs[number]
        made = self._device.empty((self._start(number) + run.end - run.begin,), torch.uint8)
        self._ready[number] = self._device.ready()
        return made

    def _make_alone(self, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made = self._device.empty(shape, dtype)
        self._ready[~at] = self._device.ready()
        return made

    def _start(self, _number: int) -> int:
        return 0

    def ready(self, unit: int) -> Mark:
        return self._ready[unit]

    def span(self, step: InPlace) -> torch.Tensor:
        """Returns the memory where the bytes of a step belong."""
        begin = self._start(step.run) + step.begin - self._plan.runs[step.run].begin
        return self._runs[step.run][begin : begin + step.end - step.begin]

    def landing(self, unit: int, queue: Queue, mark: Mark) -> None:
        """Notes that a copy into the unit's memory is done at `mark`."""
        with self._lock:
            self._landing.setdefault(unit, {})[queue] = mark

    def take(self, at: int) -> torch.Tensor:
        unit = self._plan.unit(at)
        with self._lock:
            marks = list(self._landing.get(unit, {}).values())
        for mark in marks:
            mark.wait()
        if unit < 0:
            self._forget(unit)
        return super().take(at)

    def _aligned(self, raw: torch.Tensor, itemsize: int) -> torch.Tensor:
        if raw.data_ptr() % max(ALIGN_BYTES, itemsize) == 0:
            return raw
        copy = self._device.empty(tuple(raw.shape), torch.uint8)
        work = functools.partial(copy.copy_, raw)
        self._aligning.submit(work, [self._device.ready()]).wait()
        return copy

    def close_run(self, number: int) -> None:
        super().close_run(number)
        self._forget(number)

    def _forget(self, unit: int) -> None:
        self._ready.pop(unit, None)
        with self._lock:
            self._landing.pop(unit, None)


class DeviceLane(Lane):
    """One thread's way to a device, through buffers that copies start from. All have the same size,
    so that any load can use those of the one before."""

    def __init__(self, target: DeviceTarget, device: Device) -> None:
        """To be made by the thread that uses it. Raises Unavailable."""
        device.enter()
        self._target = target
        self._device = device
        self._queue = device.queue()
        self._turns = DoubleBuffer(device, STAGE_BYTES)
        self._scratch: torch.Tensor | None = None

    def read_in_place(self, source: SourceFile, step: InPlace) -> None:
        is_cached = source.is_cold(step.begin, step.end) is False
        size = CACHED_BYTES if is_cached else READ_BYTES
        to = self._target.span(step)
        after = [self._target.ready(step.run)]
        for begin, end in pieces(step.begin, step.end, size):
            staging = self.staging()
            page = staging.memory[: page_up(end) - page_down(begin)]
            source.read_into(page, begin, end, is_cached=is_cached)
            skip = begin % PAGE_BYTES
            with during(Stage.COPY, end - begin):
                staged = staging.raw[skip : skip + end - begin]
                there = to[begin - step.begin : end - step.begin]
                if staging.refused:  # the driver waits in such a copy
                    work = functools.partial(there.copy_, staged, non_blocking=True)
                    mark = self._queue.submit(work, after)
                else:
                    mark = self._queue.copy(there, staged, after)
                self._turns.copied_at(mark)
            after = []
        self._target.landing(step.run, self._queue, mark)

    def staging(self) -> Staging:
        return self._turns.take()

    def copy_table(self, at: int, staged: torch.Tensor, begin: int, end: int) -> None:
        there = self._there(staged)

        def work() -> None:
            there.copy_(staged, non_blocking=True)
            self._target.copy_table(at, there, begin, end)

        self._send(~at, work)

    def copy_span(self, at: int, staged: torch.Tensor, offset: int) -> None:
        there = self._there(staged)

        def work() -> None:
            there.copy_(staged, non_blocking=True)
            self._target.copy_span(at, there, offset)

        self._send(~at, work)

    def _there(self, staged: torch.Tensor) -> torch.Tensor:
        """Returns memory of the device for as many bytes, which the lane's work uses in sequence.
        Raises NoSpace, Unavailable."""
        if self._scratch is None:
            try:
                self._scratch = self._device.empty((STAGE_BYTES,), torch.uint8)
            except RuntimeError as error:
                raise NoSpace(f"a buffer on the device: {first_line(error)}") from None
            self._device.ready().wait()
        return self._scratch[: len(staged)]

    def _send(self, unit: int, work: Work) -> None:
        mark = self._queue.submit(work, [self._target.ready(unit)])
        self._turns.copied_at(mark)
        self._target.landing(unit, self._queue, mark)

    def close(self) -> None:
        try:
            self._turns.close()
        finally:
            self._scratch = None


def pieces(begin: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """Yields the parts of [begin, end) between multiples of `size`. Pure."""
    while begin < end:
        middle = min((begin // size + 1) * size, end)
        yield begin, middle
        begin = middle
