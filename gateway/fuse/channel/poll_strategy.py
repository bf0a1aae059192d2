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

import contextlib
import os
import select
import time
from types import TracebackType
from typing import Final

import trio

_SPIN_NS: Final = 100_000
_BUSY_GAP_NS: Final = 300_000
"""Requests that follow each other this closely are worth spinning for."""
_INTERRUPTED_NS: Final = 40_000
_CONTENDED_NS: Final = 50_000_000
_BLOCK_NS: Final = 2_000_000
_BLOCK_S: Final = 0.001
_BURST: Final = 64
_BURST_NS: Final = 2_000_000
_clock = time.perf_counter_ns


class Attention:
    """The decisions of one mount's loop. It is a context within the task that serves the mount,
    which must have waited for the device before: that is how the event loop's descriptor is
    found."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._watched: select.epoll | None = None
        """The device and the event loop; None: the loop's descriptor was not found, and nothing
        blocks."""
        self._others = _Others()
        self._served_at = 0
        self._looked_at = 0
        self._spin_until = 0
        self._block_until = 0
        self._calm_after = 0
        self._burst = 0
        self._burst_began = 0

    def __enter__(self) -> "Attention":
        if (loop := _epoll_of(self._device)) is not None:
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

    def served(self) -> bool:
        """Notes that a request was answered. Returns True when the loop's other tasks are due."""
        now = _clock()
        busy = now - self._served_at < _BUSY_GAP_NS
        self._served_at = self._looked_at = now
        self._spin_until = now + _SPIN_NS if busy and now > self._calm_after else 0
        self._block_until = now + _BLOCK_NS
        self._burst += 1
        if self._burst < _BURST and now - self._burst_began < _BURST_NS:
            return False
        self._burst, self._burst_began = 0, now
        return True

    def stay(self, *, block: bool) -> bool:
        """Returns whether to look again at once, now that no request is there; False while other
        tasks may run. `block` allows it to wait a moment first."""
        now = _clock()
        if self._others.due:
            return False
        if now < self._spin_until:
            if now - self._looked_at > _INTERRUPTED_NS:
                self._spin_until, self._calm_after = 0, now + _CONTENDED_NS
            self._looked_at = now
            return True
        if not block or now >= self._block_until or self._watched is None:
            return False
        ready = self._watched.poll(_BLOCK_S)
        for fd, _ in ready:
            if fd == self._device:
                return True
        return not ready

    def woken(self) -> None:
        """Notes that the loop has slept."""
        self._burst, self._burst_began = 0, _clock()


class _Others(trio.abc.Instrument):
    """Counts the tasks that may run, except the running one."""

    def __init__(self) -> None:
        self.due: set[trio.lowlevel.Task] = set()

    def task_scheduled(self, task: trio.lowlevel.Task) -> None:
        self.due.add(task)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.due.discard(task)


def _epoll_of(fd: int) -> int | None:
    """Returns this process's epoll descriptor that `fd` was added to; None if there is none, or the
    kernel does not tell. Trio has no public name for its own."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                with open(f"/proc/self/fdinfo/{name}", "rb") as info:
                    added = (line.split()[1:2] for line in info if line.startswith(b"tfd:"))
                    if [b"%d" % fd] in added:
                        return int(name)
    return None
