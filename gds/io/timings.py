"""The time of a load's threads by stage, and the bytes of each stage.

Each thread has a watch, which runs for one stage at a time: a stage within another stops the outer
one. So no time counts twice, and stages are named where they happen, without passing a watch on.
"""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Final, NamedTuple

_clock: Final = time.perf_counter


class Stage(Enum):
    """A stage of a thread's work."""

    READ = "read"
    """Getting bytes of a file into memory: also asking the page cache for them, and clearing new
    pages for them."""
    CHECK = "check"
    """Comparing them with their checksums."""
    COPY = "copy"
    """Everything else: cutting, converting and copying bytes that are not in their places yet; for
    a GPU handing them over, and waiting for its copies."""
    WAIT = "wait"
    """Waiting for memory that the receiver of the tensors still holds, or that is being made."""


class Spent(NamedTuple):
    """The time and bytes of one stage."""

    size_bytes: int
    """Bytes that it was asked for; WAIT has none."""
    thread_s: float
    """Seconds of all threads together."""


class Stages(NamedTuple):
    """The stages of a load, without the work of the receiver of the tensors."""

    threads: int
    read: Spent
    check: Spent
    copy: Spent
    wait: Spent

    def seconds(self, spent: Spent) -> float:
        """Returns the mean seconds of each thread."""
        return spent.thread_s / self.threads if self.threads else 0.0

    def gb_per_s(self, spent: Spent) -> float:
        """Returns the rate of the threads in a stage while they do nothing else; 0 if it took no
        time."""
        seconds = self.seconds(spent)
        return spent.size_bytes / seconds / 1e9 if seconds > 0 else 0.0


class _Watch(threading.local):
    """The watch of one thread."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.sizes = dict.fromkeys(Stage, 0)
        self.seconds = dict.fromkeys(Stage, 0.0)
        self.stage = Stage.COPY
        self.since = _clock()

    def turn(self, stage: Stage) -> Stage:
        """Makes it run for this stage, and returns the one before."""
        now = _clock()
        before = self.stage
        self.seconds[before] += now - self.since
        self.stage, self.since = stage, now
        return before


_watch: Final = _Watch()
Lap = dict[Stage, Spent]
"""The time and bytes of one thread, by stage."""


def start_watch() -> None:
    """Starts the watch of this thread anew."""
    _watch.restart()


def stop_watch() -> Lap:
    """Returns the time that this thread spent since `start_watch`, by stage."""
    _watch.turn(Stage.COPY)
    return {stage: Spent(_watch.sizes[stage], _watch.seconds[stage]) for stage in Stage}


@contextlib.contextmanager
def during(stage: Stage, size_bytes: int = 0) -> Iterator[None]:
    """Counts the block as this stage, of so many bytes. It costs a few microseconds: use one for
    many small pieces. Bytes of a block that fails do not count, its time does."""
    before = _watch.turn(stage)
    try:
        yield
        _watch.sizes[stage] += size_bytes
    finally:
        _watch.turn(before)


def together(laps: Sequence[Lap]) -> Stages:
    """Returns the stages of all threads together."""
    sums = {
        stage.value: Spent(
            sum(lap[stage].size_bytes for lap in laps), sum(lap[stage].thread_s for lap in laps)
        )
        for stage in Stage
    }
    return Stages(threads=len(laps), **sums)
