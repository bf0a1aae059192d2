"""Carries out a plan: threads read, and tensors are handed over as they become whole.

    steps, in the order of the files -> threads -> whole tensors -> the iterating thread

Invariants
- A tensor is handed over once all its steps are done; after an error nothing is handed over.
- Memory that is being filled or waits to be handed over is at most `budget` bytes, or one run.
- No thread is left when the iteration ends, in whatever way: it waits for the reads under way, each
  at most `STAGING_BYTES` long. A second interrupt of that wait (a disk hangs) ends it: the threads
  then keep the files.
- A process that is forked meanwhile has none of the threads: the iteration ends there with an
  error.
- The iterating thread may be interrupted (`kvfs.session.uninterruptible`), so it takes a plain lock
  only, and waits for a queue; a thread of their own starts, wakes and awaits the others.
"""

import collections
import contextlib
import os
import queue
import threading
from collections.abc import Generator, Sequence
from typing import Final

import torch

from gds.format.safetensors import BITS
from gds.io.checked_source import Damaged
from gds.io.source import SourceFile
from gds.io.target import Lane, Target
from gds.io.timings import Lap, Stage, Stages, during, start_watch, stop_watch, together
from gds.plan.load_plan import InPlace, Lines, LoadPlan, Sliced, StagedSpan, Step, Strided
from gds.plan.pages import page_down, page_up
from gds.probe.numa import run_on
from kvfs.base.errors import Invalid, KvfsError, NoSpace, Unavailable
from kvfs.session.uninterruptible import Aside, next_within

_FAILED: Final = "failed"
"""Stands in for a tensor's number."""


class Loader:
    """One load. Iterate over `tensors` once, from one thread."""

    def __init__(
        self,
        plan: LoadPlan,
        sources: Sequence[SourceFile],
        target: Target,
        *,
        threads: int,
        budget: int | None = None,
        cpus: frozenset[int] | None = None,
    ) -> None:
        """`budget`: bytes; None: no limit, all tensors are kept anyway. `cpus`: the CPUs for
        threads; None: any."""
        self._plan = plan
        self._sources = sources
        self._target = target
        self._threads = threads
        self._budget = budget
        self._cpus = cpus
        self._mutex = threading.Lock()
        self._lock = threading.Condition(self._mutex)
        """The condition of the threads. The iterating thread takes the mutex instead, since it may
        be interrupted in the middle of the condition's methods."""
        self._steps = iter(plan.steps)
        self._held: dict[int, int] = {}
        """Bytes of the units (runs, and tensors alone) that are not handed over."""
        self._missing = _steps_of(plan)
        self._to_take = _members(plan)
        self._arrived: queue.SimpleQueue[object] = queue.SimpleQueue()
        """Numbers of whole tensors; anything else: no more come."""
        self._calls: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """Calls to the thread that manages the others. True: there is room; False: the iteration
        ends."""
        for at, count in enumerate(self._missing):
            if not count:
                self._arrived.put(at)
        self._error: BaseException | None = None
        self._ended = False
        self._process = os.getpid()
        self.read_bytes = 0
        """Bytes that the finished steps asked the files for."""
        self._laps: list[Lap] = []
        """The laps of the threads that ended."""

    def tensors(self) -> Generator[tuple[int, torch.Tensor], None, None]:
        """Yields each tensor by its number in the plan, as they become whole. Raises errors of
        reading or of memory; Invalid in a process that was forked since it began."""
        threads = Aside(self._care, lambda _nothing: None, self._arrived)
        try:
            threads.start()
            for _ in self._plan.wanted:
                at = self._next_whole()
                tensor = self._target.take(at)
                self._let_go(at)
                yield at, tensor
                del tensor  # whoever took it may have dropped it
        finally:
            try:
                self._end(threads)
            except BaseException:
                self._end_or_abandon(threads)
                raise

    def stages(self) -> Stages:
        """Returns the work of its threads, once the iteration ended."""
        return together(self._laps)

    def _end(self, threads: Aside[None]) -> None:
        self._calls.put(False)
        threads.leave()

    def _end_or_abandon(self, threads: Aside[None]) -> None:
        try:
            self._end(threads)
        except BaseException:
            for source in self._sources:
                source.abandon()
            raise

    def _care(self) -> None:
        """Manages the threads until the iteration ends."""
        workers: list[threading.Thread] = []
        try:
            self._start(workers)
            while self._calls.get():
                with self._lock:
                    self._lock.notify_all()
        except BaseException as error:
            with self._lock:
                self._fail(error)
        with self._lock:
            self._ended = True
            self._lock.notify_all()
        for worker in workers:
            worker.join()

    def _start(self, workers: list[threading.Thread]) -> None:
        """Starts as many threads as there is memory for. None of them works before all have
        started: a thread that runs out of memory while it starts would be waited for without end.
        Raises NoSpace."""
        with self._lock:
            for number in range(self._threads):
                name = f"kvfs-load-{number}"
                worker = threading.Thread(target=self._work, name=name, daemon=True)
                try:
                    worker.start()
                except RuntimeError as error:
                    if not workers:
                        raise NoSpace(f"no thread to read with: {error}") from None
                    return
                workers.append(worker)

    def _next_whole(self) -> int:
        if os.getpid() != self._process:
            raise Invalid("this load is the parent process's, whose threads read: load again here")
        while (at := next_within(self._arrived)) is None:
            pass
        if isinstance(at, int) and self._error is None:
            return at
        # Else its traceback would hold this object, and so all memory, until it is collected.
        error, self._error = self._error, None
        try:
            raise error or NoSpace("no memory for a thread to read with")
        finally:
            del error

    def _let_go(self, at: int) -> None:
        """Notes that the tensor was taken, and with its unit's last tensor the unit."""
        unit = self._plan.unit(at)
        with self._mutex:
            self._to_take[unit] -= 1
            if self._to_take[unit]:
                return
            self._held.pop(unit, None)
            if unit >= 0:
                self._target.close_run(unit)
        self._calls.put(True)

    def _fail(self, error: BaseException) -> None:
        """Fails the load; to be called with the lock held."""
        if not self._ended:  # else nobody asks any more, and it would keep all memory
            self._error = error
        self._ended = True
        self._arrived.put(_FAILED)
        self._lock.notify_all()

    def _work(self) -> None:
        start_watch()
        try:
            run_on(self._cpus)
            with contextlib.closing(self._target.lane()) as lane:
                while (step := self._next_step()) is not None:
                    self._carry_out(step, lane)
                    self._done(step)
        except BaseException as error:
            with self._lock:
                self._fail(error)
        finally:
            self._laps.append(stop_watch())

    def _next_step(self) -> Step | None:
        """Returns the next step, once there is room for it; None: there is none, or the load
        ended."""
        with during(Stage.WAIT), self._lock:
            step = None if self._ended else next(self._steps, None)
            if step is None:
                return None
            unit = _unit(step)
            self._lock.wait_for(lambda: self._ended or unit in self._held or self._has_room(unit))
            return step if self._is_open(unit) else None

    def _is_open(self, unit: int) -> bool:
        """Returns whether there is memory for the unit, now; False: the load ended."""
        if self._ended:
            return False
        if unit not in self._held:
            self._open(unit)
        return True

    def _has_room(self, unit: int) -> bool:
        if self._budget is None or not self._held:
            return True
        return sum(self._held.values()) + self._size_of(unit) <= self._budget

    def _open(self, unit: int) -> None:
        if unit >= 0:
            self._target.open_run(unit)
        else:
            self._target.open_alone(~unit)
        self._held[unit] = self._size_of(unit)

    def _size_of(self, unit: int) -> int:
        if unit >= 0:
            return self._plan.runs[unit].room
        return self._target.alone_bytes(~unit)

    def _carry_out(self, step: Step, lane: Lane) -> None:
        try:
            if isinstance(step, InPlace):
                source = self._sources[self._plan.runs[step.run].file]
                lane.read_in_place(source, step)
            else:
                self._read_staged(step, lane)
        except Damaged:
            raise
        except (KvfsError, OSError, MemoryError) as error:
            names = ", ".join(repr(self._plan.wanted[at].tensor.name) for at in _tensors(step)[:3])
            raise _kind(error)(f"{error} (tensor {names})") from error

    def _read_staged(self, step: Sliced | StagedSpan | Strided, lane: Lane) -> None:
        lines = self._plan.lines[step.tensor]
        source = self._sources[self._plan.wanted[step.tensor].file]
        if isinstance(step, Strided):
            self._read_strided(step, lines, source, lane)
            return
        if isinstance(step, Sliced):
            begin = lines.begin + step.first_line * lines.length
            end = lines.begin + step.end_line * lines.length
        else:
            begin, end = step.begin, step.end
        staged = self._staged(step.tensor, source, lane, begin, end)
        with during(Stage.COPY, end - begin):
            if isinstance(step, Sliced):
                lane.copy_table(step.tensor, staged, step.first_line, step.end_line)
            else:
                lane.copy_span(step.tensor, staged, step.offset)

    def _staged(
        self, tensor: int, source: SourceFile, lane: Lane, begin: int, end: int
    ) -> torch.Tensor:
        """Returns the bytes [begin, end) of a file in a buffer, so that elements begin where they
        may."""
        staging = lane.staging()
        if begin * 8 % BITS[self._plan.wanted[tensor].tensor.dtype]:
            source.read_pieces([(staging.memory[: end - begin], begin)])
            return staging.raw[: end - begin]
        skip = begin - page_down(begin)
        size = skip + end - begin
        source.read_into(staging.memory[: page_up(size)], begin, end)
        return staging.raw[skip:size]

    def _read_strided(self, step: Strided, lines: Lines, source: SourceFile, lane: Lane) -> None:
        staging = lane.staging()
        pieces, filled = [], 0
        for line in range(step.first_line, step.end_line):
            for first, last in lines.pieces:
                view = staging.memory[filled : filled + last - first]
                pieces.append((view, lines.begin + line * lines.length + first))
                filled += last - first
        source.read_pieces(pieces)
        with during(Stage.COPY, filled):
            lane.copy_span(step.tensor, staging.raw[:filled], step.first_line * lines.wanted)

    def _done(self, step: Step) -> None:
        with self._lock:
            self.read_bytes += self._plan.bytes_of(step)
            for at in _tensors(step):
                self._missing[at] -= 1
                if not self._missing[at]:
                    self._arrived.put(at)


def _kind(error: Exception) -> type[KvfsError]:
    if isinstance(error, KvfsError):
        return type(error)
    return NoSpace if isinstance(error, MemoryError) else Unavailable


def _tensors(step: Step) -> tuple[int, ...]:
    return step.tensors if isinstance(step, InPlace) else (step.tensor,)


def _unit(step: Step) -> int:
    """See `LoadPlan.unit`."""
    return step.run if isinstance(step, InPlace) else ~step.tensor


def _steps_of(plan: LoadPlan) -> list[int]:
    """Returns how many steps each tensor has."""
    found = [0] * len(plan.wanted)
    for step in plan.steps:
        for at in _tensors(step):
            found[at] += 1
    return found


def _members(plan: LoadPlan) -> dict[int, int]:
    """Returns how many tensors each unit has."""
    return collections.Counter(plan.unit(at) for at in range(len(plan.wanted)))
