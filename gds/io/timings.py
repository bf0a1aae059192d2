"""The time of a load's threads by stage, and the bytes of each stage.

Each thread has a watch, which runs for one stage at a time: a stage within another stops that one.
So no time counts twice, and stages are named where they happen, without anybody handing a watch on.
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
    """Have bytes of a file in memory: also asking the page cache for them, and clearing new pages
    for them."""
    CHECK = "check"
    """Compare them with their checksums."""
    COPY = "copy"
    """All else: cut, convert and copy what does not lie yet where it belongs; for a GPU hand over,
    and wait for its copies."""
    WAIT = "wait"
    """For room: memory that whoever takes the tensors still has, or that is being made."""


class Spent(NamedTuple):
    """The time and bytes of one stage."""

    size_bytes: int
    """Bytes that were asked of it; WAIT has none."""
    thread_s: float
    """Seconds of all threads together."""


class Stages(NamedTuple):
    """The stages of a load, but for what the taker of the tensors does itself."""

    threads: int
    read: Spent
    check: Spent
    copy: Spent
    wait: Spent

    def seconds(self, spent: Spent) -> float:
        """Seconds of each thread, on the average."""
        return spent.thread_s / self.threads if self.threads else 0.0

    def gb_per_s(self, spent: Spent) -> float:
        """The rate of the threads in a stage while they do nothing else; 0 where it took no
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
        """It runs for this one now; the one before."""
        now = _clock()
        before = self.stage
        self.seconds[before] += now - self.since
        self.stage, self.since = stage, now
        return before


_watch: Final = _Watch()
Lap = dict[Stage, Spent]
"""The time and bytes of one thread, by stage."""


def start_watch() -> None:
    """The watch of this thread starts anew."""
    _watch.restart()


def stop_watch() -> Lap:
    """The time that this thread spent since `start_watch`, by stage."""
    _watch.turn(Stage.COPY)
    return {stage: Spent(_watch.sizes[stage], _watch.seconds[stage]) for stage in Stage}


@contextlib.contextmanager
def during(stage: Stage, size_bytes: int = 0) -> Iterator[None]:
    """The block is this stage, of so many bytes. It costs a few microseconds: take one for many
    small pieces. Bytes of a block that fails do not count, its time does."""
    before = _watch.turn(stage)
    try:
        yield
        _watch.sizes[stage] += size_bytes
    finally:
        _watch.turn(before)


def together(laps: Sequence[Lap]) -> Stages:
    """The stages of all threads together."""
    sums = {
        stage.value: Spent(
            sum(lap[stage].size_bytes for lap in laps), sum(lap[stage].thread_s for lap in laps)
        )
        for stage in Stage
    }
    return Stages(threads=len(laps), **sums)
