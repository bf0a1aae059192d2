"""Predicts the next reads of a file that is still arriving. Pure.

Sequential reads want the window behind the last one; the kernel sends those of one readahead in no
fixed order, so a small step back or forth counts as sequential too. Reads at equal distances (a
tensor of each layer) want the next few at that distance.
"""

from typing import Final

WINDOW_BYTES: Final = 64 << 20
_NEAR_BYTES: Final = 8 << 20
"""The kernel's own readahead."""
_STEPS: Final = 8
"""Predicted reads ahead of a strided reader."""


class Readahead:
    """The readahead of one reader."""

    __slots__ = ("_end", "_last", "_stride")

    def __init__(self) -> None:
        self._last = 0
        self._end = 0
        self._stride = 0

    def ahead(self, offset: int, size: int) -> list[tuple[int, int]]:
        """Notes a read of `size` bytes at `offset`, and returns the spans (offset, length) that
        will be wanted next, the first one soonest; none if that cannot be predicted."""
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
