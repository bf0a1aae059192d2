"""How the event loop waits for the next request: spinning, in a short blocking poll, or asleep.

A wake-up across CPUs outweighs a request's own work, so right after a reply the loop looks again
and again: for 100 us at most, while that pays, and not where somebody else wants the CPU (a look
that took long was interrupted by the scheduler; spinning there costs the client its turn). Then it
blocks in poll(2) for a millisecond or two: woken without the event loop's own work of going to
sleep. Then it sleeps as any task, and an idle mount costs nothing."""

import select
import time
from typing import Final

_SPIN_NS: Final = 100_000
_BUSY_GAP_NS: Final = 300_000
"""Requests that follow each other this closely are worth spinning for."""
_INTERRUPTED_NS: Final = 40_000
_CONTENDED_NS: Final = 50_000_000
_BLOCK_NS: Final = 2_000_000
_BLOCK_MS: Final = 1
_BURST: Final = 64
_BURST_NS: Final = 2_000_000
_clock = time.perf_counter_ns


class Attention:
    """The decisions of one mount's loop."""

    def __init__(self, device: int) -> None:
        self._poll = select.poll()
        self._poll.register(device, select.POLLIN)
        self._served_at = 0
        self._looked_at = 0
        self._spin_until = 0
        self._block_until = 0
        self._calm_after = 0
        self._burst = 0
        self._burst_began = 0

    def served(self) -> bool:
        """A request was answered; True when the loop's other tasks are due."""
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
        """Nothing is there: whether to look again at once. `block` allows to wait a moment
        first."""
        now = _clock()
        if now < self._spin_until:
            if now - self._looked_at > _INTERRUPTED_NS:
                self._spin_until, self._calm_after = 0, now + _CONTENDED_NS
            self._looked_at = now
            return True
        if block and now < self._block_until:
            self._poll.poll(_BLOCK_MS)
            return True
        return False

    def woken(self) -> None:
        """The loop has slept."""
        self._burst, self._burst_began = 0, _clock()
