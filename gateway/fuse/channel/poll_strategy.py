"""How the event loop waits for the next request: spinning, in a short blocking poll, or asleep.

A wake-up across CPUs outweighs a request's own work, so right after a reply the loop looks again
and again: for 100 us at most, while that pays, and not where another process wants the CPU (a look
that took long was interrupted by the scheduler; spinning there costs the client its turn). Then it
blocks in epoll_wait(2) for a millisecond or two: it is woken without the event loop's own work of
going to sleep. Then it sleeps as any task does, and an idle mount costs nothing.

Nobody waits for the end of that block: it does not begin while other tasks may run, and it ends
with whatever would wake the event loop, since the loop's own epoll descriptor is polled too.
(poll(2) of both looks at each of them again when it is woken, and takes 1 us longer.)
"""

import enum
import select
import time
from types import TracebackType
from typing import Final

import trio

from kvfs.base.event_loop import RunnableTasks, epoll_of

_SPIN_NS: Final = 100_000
_BUSY_GAP_NS: Final = 300_000
"""Requests that follow each other this closely are worth spinning for."""
_INTERRUPTED_NS: Final = 40_000
_CONTENDED_NS: Final = 50_000_000
_BLOCK_NS: Final = 2_000_000
_BLOCK_S: Final = 0.001
_BURST_NS: Final = 2_000_000
"""The longest time for which requests keep the loop's other tasks waiting."""
_clock = time.perf_counter_ns


class Rest(enum.Enum):
    """The loop's next step."""

    LOOK = "looks for a request at once"
    YIELD = "lets its other tasks run first: they are due"
    SLEEP = "sleeps until a request comes"


class Attention:
    """The decisions of one mount's loop. It is a context within the task that serves the mount,
    which must have waited for the device before: that is how the event loop's descriptor is
    found."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._watched: select.epoll | None = None
        """The device and the event loop; None: the loop's descriptor was not found, and nothing
        blocks."""
        self._others = RunnableTasks()
        self._served_at = 0
        self._looked_at = 0
        self._spin_until = 0
        self._block_until = 0
        self._calm_after = 0
        self._burst_began = 0

    def __enter__(self) -> "Attention":
        if (loop := epoll_of(self._device)) is not None:
            self._watched = select.epoll()
            self._watched.register(self._device, select.EPOLLIN)
            self._watched.register(loop, select.EPOLLIN)
        trio.lowlevel.add_instrument(self._others)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        trio.lowlevel.remove_instrument(self._others)
        if self._watched is not None:
            self._watched.close()

    def rest(self, answered: int, *, block: bool) -> Rest:
        """Decides what to do after so many requests were answered since the last decision (0: none
        was there). Waits a moment itself where `block` allows it."""
        now = _clock()
        if answered:
            busy = now - self._served_at < _BUSY_GAP_NS
            self._served_at = self._looked_at = now
            self._spin_until = now + _SPIN_NS if busy and now > self._calm_after else 0
            self._block_until = now + _BLOCK_NS
            if now - self._burst_began >= _BURST_NS:
                self._burst_began = now
                return Rest.YIELD
        if self._others.due:
            return Rest.SLEEP
        if now < self._spin_until:
            if now - self._looked_at > _INTERRUPTED_NS:
                self._spin_until, self._calm_after = 0, now + _CONTENDED_NS
            self._looked_at = now
            return Rest.LOOK
        if not block or now >= self._block_until or self._watched is None:
            return Rest.SLEEP
        ready = self._watched.poll(_BLOCK_S)
        for fd, _ in ready:
            if fd == self._device:
                return Rest.LOOK
        return Rest.SLEEP if ready else Rest.LOOK

    def woken(self) -> None:
        """Notes that the loop has slept."""
        self._burst_began = _clock()
