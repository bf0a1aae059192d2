"""Carries out a plan: threads read, tensors are handed over as they become whole.

    steps, in the order of the files -> threads -> whole tensors -> whoever iterates

Invariants
- A tensor is handed over once all its steps are done; after an error nothing is handed over.
- Memory that is being filled or waits to be handed over is at most `budget` bytes, or one run.
- No thread is left when the iteration ends, in whichever way: it waits for the reads under way,
  each at most `STAGING_BYTES` long.
"""

import collections
import threading
from collections.abc import Generator, Sequence

import torch

from gds.load_plan import (
    InPlace,
    Lines,
    LoadPlan,
    Sliced,
    Span,
    Step,
    Strided,
)
from gds.pages import page_down, page_up
from gds.source import Source
from gds.target import Staging, Target
from kvfs.errors import KvfsError, Unavailable


class Loader:
    """One load. Iterate over `tensors` once, from one thread."""

    def __init__(
        self,
        plan: LoadPlan,
        sources: Sequence[Source],
        target: Target,
        *,
        threads: int,
        budget: int | None = None,
        shared: bool = False,
    ) -> None:
        """`budget`: bytes; None: no limit, all tensors are kept anyway. `shared`: other processes
        of this host are about to read the same bytes."""
        self._plan = plan
        self._sources = sources
        self._target = target
        self._threads = threads
        self._budget = budget
        self._shared = shared
        self._lock = threading.Condition()
        self._steps = iter(plan.steps)
        self._held: dict[int, int] = {}
        """Bytes of the units (runs, and tensors alone) that are not handed over."""
        self._missing = _steps_of(plan)
        self._to_take = _members(plan)
        self._whole: collections.deque[int] = collections.deque(
            at for at, count in enumerate(self._missing) if not count
        )
        self._error: BaseException | None = None
        self._ended = False

    def tensors(self) -> Generator[tuple[int, torch.Tensor], None, None]:
        """Each tensor by its number in the plan, as they become whole. Raises what reading or
        memory raised."""
        workers = [
            threading.Thread(target=self._work, name=f"kvfs-load-{n}", daemon=True)
            for n in range(self._threads)
        ]
        try:
            for worker in workers:
                worker.start()
            for _ in self._plan.wanted:
                at = self._next_whole()
                tensor = self._target.take(at)
                self._let_go(at)
                yield at, tensor
                del tensor  # whoever took it may have dropped it
        finally:
            self._end()
            _join([worker for worker in workers if worker.ident is not None])

    def _next_whole(self) -> int:
        with self._lock:
            while not self._whole and self._error is None:
                self._lock.wait()
            if self._error is None:
                return self._whole.popleft()
            # Else its traceback would hold this object, and so all memory, until it is collected.
            error, self._error = self._error, None
        try:
            raise error
        finally:
            del error

    def _let_go(self, at: int) -> None:
        """The tensor was taken: so is its unit, with the last of its tensors."""
        unit = self._plan.unit(at)
        with self._lock:
            self._to_take[unit] -= 1
            if not self._to_take[unit]:
                self._held.pop(unit, None)
                if unit >= 0:
                    self._target.close_run(unit)
                self._lock.notify_all()

    def _end(self) -> None:
        with self._lock:
            self._ended = True
            self._lock.notify_all()

    def _work(self) -> None:
        staging: Staging | None = None
        try:
            while (step := self._next_step()) is not None:
                if staging is None and not isinstance(step, InPlace):
                    staging = self._target.staging()
                self._carry_out(step, staging)
                self._done(step)
        except BaseException as error:
            with self._lock:
                self._error = self._error or error
                self._ended = True
                self._lock.notify_all()

    def _next_step(self) -> Step | None:
        """The next one, once there is room for it; None: there is none, or the load ended."""
        with self._lock:
            step = None if self._ended else next(self._steps, None)
            if step is None:
                return None
            unit = _unit(step)
            self._lock.wait_for(lambda: self._ended or unit in self._held or self._has_room(unit))
            return step if self._is_open(unit) else None

    def _is_open(self, unit: int) -> bool:
        """Whether there is memory for it, now; False: the load ended."""
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

    def _carry_out(self, step: Step, staging: Staging | None) -> None:
        try:
            if isinstance(step, InPlace):
                self._read_in_place(step)
            else:
                assert staging is not None
                self._read_staged(step, staging)
        except (KvfsError, OSError) as error:
            names = ", ".join(repr(self._plan.wanted[at].tensor.name) for at in _tensors(step)[:3])
            kind = type(error) if isinstance(error, KvfsError) else Unavailable
            raise kind(f"{error} (tensor {names})") from error

    def _read_in_place(self, step: InPlace) -> None:
        run = self._plan.runs[step.run]
        pages = self._target.pages(step.run, step.begin, step.end)
        self._sources[run.file].read_into(pages, step.begin, step.end, shared=self._shared)

    def _read_staged(self, step: Sliced | Span | Strided, staging: Staging) -> None:
        lines = self._plan.lines[step.tensor]
        source = self._sources[self._plan.wanted[step.tensor].file]
        if isinstance(step, Strided):
            self._read_strided(step, lines, source, staging)
            return
        if isinstance(step, Sliced):
            begin = lines.begin + step.first_line * lines.length
            end = lines.begin + step.end_line * lines.length
        else:
            begin, end = step.begin, step.end
        skip = begin - page_down(begin)
        size = skip + end - begin
        pages = staging.memory[: page_up(size)]
        source.read_into(pages, begin, end, shared=self._shared)
        staged = staging.raw[skip:size]
        if isinstance(step, Sliced):
            span = step.first_line, step.end_line
            self._target.copy_table(step.tensor, staged, span, (lines.first, lines.last))
        else:
            self._target.copy_span(step.tensor, staged, step.offset)

    def _read_strided(self, step: Strided, lines: Lines, source: Source, staging: Staging) -> None:
        piece = lines.last - lines.first
        numbers = range(step.first_line, step.end_line)
        pieces = [staging.memory[at * piece : (at + 1) * piece] for at in range(len(numbers))]
        begins = [lines.begin + line * lines.length + lines.first for line in numbers]
        source.read_pieces(list(zip(pieces, begins, strict=True)))
        staged = staging.raw[: len(numbers) * piece]
        self._target.copy_span(step.tensor, staged, step.first_line * piece)

    def _done(self, step: Step) -> None:
        with self._lock:
            for at in _tensors(step):
                self._missing[at] -= 1
                if not self._missing[at]:
                    self._whole.append(at)
            self._lock.notify_all()


def _join(workers: Sequence[threading.Thread]) -> None:
    """Also an interrupt does not leave before the threads: they read from files that are closed
    next."""
    interrupted: BaseException | None = None
    for worker in workers:
        while worker.is_alive():
            try:
                worker.join()
            except BaseException as error:
                interrupted = error
    if interrupted is not None:
        raise interrupted


def _tensors(step: Step) -> tuple[int, ...]:
    return step.tensors if isinstance(step, InPlace) else (step.tensor,)


def _unit(step: Step) -> int:
    """See `LoadPlan.unit`."""
    return step.run if isinstance(step, InPlace) else ~step.tensor


def _steps_of(plan: LoadPlan) -> list[int]:
    """How many steps each tensor has."""
    found = [0] * len(plan.wanted)
    for step in plan.steps:
        for at in _tensors(step):
            found[at] += 1
    return found


def _members(plan: LoadPlan) -> dict[int, int]:
    """How many tensors each unit has."""
    return collections.Counter(plan.unit(at) for at in range(len(plan.wanted)))
