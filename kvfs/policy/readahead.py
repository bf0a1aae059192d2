"""Predicts what the reader of a file that is still arriving will want next. Pure.

Reads that follow each other want the window behind the last one; the kernel sends those of one
readahead in no fixed order, so that a small step back or forth is in sequence too. Reads at equal
distances (a tensor of each layer) want the next few at that distance.
"""

from typing import Final

WINDOW_BYTES: Final = 64 << 20
_NEAR_BYTES: Final = 8 << 20
"""The kernel's own readahead."""
_STEPS: Final = 8
"""Places ahead of a strided reader."""


class Readahead:
    """The readahead of one reader."""

    __slots__ = ("_end", "_last", "_stride")

    def __init__(self) -> None:
        self._last = 0
        self._end = 0
        self._stride = 0

    def ahead(self, offset: int, size: int) -> list[tuple[int, int]]:
        """It reads `size` bytes at `offset`: the spans (offset, length) that it will want next, the
        first one soonest; none where that cannot be told."""
        step, self._last = offset - self._last, offset
        if abs(offset - self._end) <= _NEAR_BYTES:
            self._end = max(self._end, offset + size)
            self._stride = 0
            return [(self._end, WINDOW_BYTES)]
        self._end = offset + size
        known, self._stride = self._stride, step
        if step != known:
            return []
        spans = [(offset + step * each, size) for each in range(1, _STEPS + 1)]
        return [span for span in spans if span[0] >= 0]
