"""Files that a node told others of, and that its evictor passes over for a moment. Pure but for the
clock that it is given.

A lease is a courtesy: one that is forgotten makes the look-up that had it end with a miss.
"""

from collections.abc import Callable
from typing import Final

MOST_FILES: Final = 65_536
"""Leased files that are remembered; more make the oldest leases end."""
MOST_S: Final = 10.0
"""The longest lease: whoever asks must not keep files from being evicted."""


class NameLeases:
    """The leases that one node gave."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[int, float] = {}

    def __len__(self) -> int:
        """Returns how many are remembered, ended ones among them."""
        return len(self._until)

    def give(self, ino: int, seconds: float) -> None:
        """Notes that another node was told of the file, and may come for it; a lease is never
        shortened."""
        now = self._clock()
        until = max(now + min(seconds, MOST_S), self._until.pop(ino, now))
        if until <= now:
            return
        self._until[ino] = until
        while len(self._until) > MOST_FILES or self._is_over(next(iter(self._until)), now):
            del self._until[next(iter(self._until))]

    def holds(self, ino: int) -> bool:
        """Returns whether a lease of the file has not ended."""
        return ino in self._until and not self._is_over(ino, self._clock())

    def _is_over(self, ino: int, now: float) -> bool:
        return self._until[ino] <= now
