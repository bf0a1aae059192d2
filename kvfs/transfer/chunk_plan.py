"""The order in which chunks of a file are asked for. Pure: no clock, no I/O.

Invariants
- A chunk is in one state: missing, asked for (of one stream), or here.
- A chunk that is here stays here.
- Chunks that tasks wait for come before those that are only likely to be wanted, and these before
  the rest, in the order of the file.
- A source that may not answer is asked for no chunk that a task waits for (`take_last`).
"""

from typing import Final, NamedTuple

_MISSING: Final = 0
_ASKED: Final = 1
_HERE: Final = 2


class ChunkSpan(NamedTuple):
    """Consecutive chunks."""

    first: int
    chunks: int

    @property
    def end(self) -> int:
        return self.first + self.chunks


class ChunkPlan:
    """The chunks of one file."""

    def __init__(self, chunks: int) -> None:
        self._states = bytearray(chunks)
        self._urgent: dict[int, None] = {}
        self._likely: dict[int, None] = {}
        self._cursor = 0
        self.here = 0
        """How many chunks are."""

    @property
    def chunks(self) -> int:
        return len(self._states)

    @property
    def is_whole(self) -> bool:
        return self.here == len(self._states)

    def has(self, chunk: int) -> bool:
        return self._states[chunk] == _HERE

    def has_all(self, span: ChunkSpan) -> bool:
        return self._states.count(_HERE, span.first, span.end) == span.chunks

    def run(self, first: int, most: int) -> int:
        """Returns how many chunks from `first` on are here, at most so many."""
        count = 0
        for state in self._states[first : first + most]:
            if state != _HERE:
                break
            count += 1
        return count

    def urge(self, span: ChunkSpan) -> None:
        """Notes that a task waits for these."""
        for chunk in range(span.first, span.end):
            if self._states[chunk] == _MISSING:
                self._urgent[chunk] = None

    def expect(self, span: ChunkSpan) -> None:
        """Notes that these are likely to be wanted soon."""
        for chunk in range(span.first, span.end):
            if self._states[chunk] == _MISSING:
                self._likely[chunk] = None

    def left(self) -> int:
        """How many chunks are to be asked for yet."""
        return self._states.count(_MISSING)

    def take(self, most: int) -> ChunkSpan | None:
        """Returns the next chunks to ask for, `most` at most; None if there are none."""
        first = self._next()
        if first is None:
            return None
        end = first + 1
        while end < min(first + most, len(self._states)) and self._states[end] == _MISSING:
            end += 1
        for chunk in range(first, end):
            self._states[chunk] = _ASKED
            self._urgent.pop(chunk, None)
            self._likely.pop(chunk, None)
        return ChunkSpan(first, end - first)

    def take_last(self) -> ChunkSpan | None:
        """Returns the chunk to ask for that is wanted last; None if somebody waits for all of
        them."""
        free = (
            each for each in range(len(self._states) - 1, -1, -1) if self._states[each] == _MISSING
        )
        last = next((each for each in free if each not in self._urgent), None)
        if last is None:
            return None
        self._states[last] = _ASKED
        self._likely.pop(last, None)
        return ChunkSpan(last, 1)

    def _next(self) -> int | None:
        for wanted in (self._urgent, self._likely):
            while wanted:
                chunk = next(iter(wanted))
                if self._states[chunk] == _MISSING:
                    return chunk
                del wanted[chunk]
        self._cursor = self._states.find(_MISSING, self._cursor)
        if self._cursor < 0:
            self._cursor = len(self._states)
            return None
        return self._cursor

    def give_back(self, span: ChunkSpan) -> None:
        """Gives back a span: its chunks that are not here are the first to be asked for again."""
        back = [chunk for chunk in range(span.first, span.end) if self._states[chunk] == _ASKED]
        for chunk in back:
            self._states[chunk] = _MISSING
        if back:
            self._urgent = {**dict.fromkeys(back), **self._urgent}
            self._cursor = min(self._cursor, back[0])

    def skip(self, chunk: int) -> None:
        """Counts a chunk as here, unless it was asked for."""
        if self._states[chunk] == _MISSING:
            self.put(chunk)

    def put(self, chunk: int) -> None:
        """Counts a chunk as here."""
        if self._states[chunk] != _HERE:
            self._states[chunk] = _HERE
            self.here += 1
