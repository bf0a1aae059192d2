"""Files in such demand that they get more copies, and when these go again. Pure.

A file's heat counts its recent demands: each adds one, and the count halves in each half-life.
Copies grow with the logarithm of the heat, as a tree of readers does. A factor of four lies between
adding and removing copies, so that nothing oscillates.
"""

import math
from typing import Final

HALF_LIFE_S: Final = 10.0
HOT: Final = 16.0
"""Heat from which one more copy is worth its bytes; each doubling adds one."""
_COLD: Final = HOT / 4
_LIMIT: Final = 4096


def extra(heat: float) -> int:
    """Returns the copies beyond those that the namespace wants."""
    return 0 if heat < HOT else 1 + int(math.log2(heat / HOT))


def is_cold(heat: float) -> bool:
    """Returns whether the copies made for heat may go."""
    return heat < _COLD


class Heat:
    """The heat of files; at most 4,096 of them, the coldest are forgotten."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, float]] = {}

    def demanded(self, ino: int, now: float) -> None:
        """Counts a demand for the file; `now` in seconds, never going back."""
        self._seen[ino] = self.of(ino, now) + 1.0, now
        if len(self._seen) > _LIMIT:
            self._forget(now)

    def of(self, ino: int, now: float) -> float:
        heat, then = self._seen.get(ino, (0.0, now))
        return heat * math.exp2((then - now) / HALF_LIFE_S)

    def hot(self, now: float) -> list[tuple[int, int]]:
        """Returns (inode, extra copies) of the files that deserve any, hottest first."""
        heats = sorted(((self.of(ino, now), ino) for ino in self._seen), reverse=True)
        return [(ino, extra(heat)) for heat, ino in heats if extra(heat)]

    def _forget(self, now: float) -> None:
        """Forgets the colder half."""
        order = sorted(self._seen, key=lambda ino: self.of(ino, now))
        for ino in order[: len(order) // 2]:
            del self._seen[ino]
