"""The counts of a node's own set, in the rows of its file (`own_set_file`): one word for each
fingerprint, the count in the low 16 bits. What finds its row full is kept in an area beside.

To set counts again changes nothing. What a kill (SIGKILL) at each step of dividing rows leaves,
which adds some at the end, and what the next `read` makes of it:

| step | in the file | opened again |
|---|---|---|
| 1 the file is extended | room that is not used | the same |
| 2 what moves is copied into new rows | rows beyond `row_count` | the next division repeats it |
| 3 `row_count` includes them | copies are left in the old rows | what is not the row's is removed |
| 4 the copies are removed | | |
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvfs.base.errors import Corrupt
from kvfs.holdings.fingerprints import RANGES, U64, sums_by_range
from kvfs.holdings.own_set_file import MOST_SPILLED, OwnSetFile
from kvfs.holdings.row_address import SLOT_SHIFT, SLOTS, Lines, next_divided, rows_of

COUNT_BITS: Final = np.uint64(16)
MOST_COUNT: Final = (1 << 16) - 1
_MOST_LOAD: Final = 0.6
_PIECE: Final = 1024
_LEAST_DIVIDED: Final = 64
_MOST_DIVIDED: Final = 4096
_SCANNED: Final = 4096


class OwnCounts:
    """The counts, by fingerprint."""

    def __init__(self, file: OwnSetFile) -> None:
        self._file = file
        self._used = 0
        self.growth_failures = 0
        at = np.flatnonzero(file.spilled)
        found = (file.spilled[at] >> COUNT_BITS).tolist()
        self._spilled = dict(zip(found, at.tolist(), strict=True))
        """Places beside the rows, by fingerprint."""

    def fingerprints(self, range_: int) -> U64:
        """Returns what is there of a range, in ascending order."""
        slots = self._file.rows[range_ : self._file.row_count : RANGES]
        found: U64 = slots[slots != 0] >> COUNT_BITS
        beside = [each for each in self._spilled if each % RANGES == range_]
        if beside:
            found = np.concatenate((found, np.array(beside, np.uint64)))
        found.sort()
        return found

    def of(self, fingerprints: U64) -> NDArray[np.int64]:
        """Returns the count of each; 0: it is not there."""
        counts = np.zeros(len(fingerprints), np.int64)
        for start in range(0, len(fingerprints), _PIECE):
            piece = fingerprints[start : start + _PIECE]
            rows = rows_of(piece, self._file.row_count)
            lines, _, words = self._find(piece, self._file.rows.take(rows, axis=0))
            counts[start + lines] = (words & np.uint64(MOST_COUNT)).view(np.int64)
        if self._spilled:
            for line, fingerprint in enumerate(fingerprints.tolist()):
                at = self._spilled.get(fingerprint)
                if at is not None:
                    counts[line] = int(self._file.spilled[at]) & MOST_COUNT
        return counts

    def _find(self, fingerprints: U64, slots: U64) -> tuple[Lines, Lines, U64]:
        """Returns which fingerprints are in their rows (`slots`), in which slot, and its word."""
        own = (slots ^ (fingerprints << COUNT_BITS)[:, None]) <= np.uint64(MOST_COUNT)
        at = np.flatnonzero(own)
        words = slots.reshape(-1)[at]
        at, words = at[words != 0], words[words != 0]
        return at >> SLOT_SHIFT, at & SLOTS - 1, words

    def set(self, fingerprints: U64, counts: NDArray[np.int64]) -> list[int]:
        """Sets counts of unique fingerprints; returns those that have no room. To repeat it changes
        nothing."""
        without_room: list[int] = []
        rows = rows_of(fingerprints, self._file.row_count)
        while len(rows):
            _, apart = np.unique(rows, return_index=True)
            if len(apart) == len(rows) <= _PIECE:
                return without_room + self._set_apart(fingerprints, counts, rows)
            apart = apart[:_PIECE]
            without_room += self._set_apart(fingerprints[apart], counts[apart], rows[apart])
            fingerprints, counts = np.delete(fingerprints, apart), np.delete(counts, apart)
            rows = np.delete(rows, apart)
        return without_room

    def _set_apart(self, fingerprints: U64, counts: NDArray[np.int64], rows: Lines) -> list[int]:
        """Sets counts in rows that are all different."""
        slots = self._file.rows.take(rows, axis=0)
        lines, columns, _ = self._find(fingerprints, slots)
        is_free = slots == 0
        at = is_free.argmax(axis=1)
        is_known = np.zeros(len(rows), np.bool_)
        is_known[lines] = True
        at[lines] = columns
        fits = is_known | (is_free[np.arange(len(rows)), at] & (counts > 0))
        if self._spilled:
            fits &= np.array([each not in self._spilled for each in fingerprints.tolist()])
        words = _words(fingerprints, counts)
        self._file.rows[rows[fits], at[fits]] = words[fits]
        self._used += int(np.count_nonzero(fits & ~is_known))
        self._used -= int(np.count_nonzero(is_known & (counts == 0)))
        return [
            fingerprint
            for fingerprint, word in zip(
                fingerprints[~fits].tolist(), words[~fits].tolist(), strict=True
            )
            if not self._set_spilled(fingerprint, word)
        ]

    def _set_spilled(self, fingerprint: int, word: int) -> bool:
        """Sets the count of one that has no slot in its row; returns whether there was room."""
        at = self._spilled.get(fingerprint)
        if word == 0:
            if at is not None:
                self._file.spilled[at] = 0
                del self._spilled[fingerprint]
            return True
        if at is None:
            if len(self._spilled) >= MOST_SPILLED:
                return False
            at = int(np.flatnonzero(self._file.spilled == 0)[0])
            self._spilled[fingerprint] = at
        self._file.spilled[at] = word
        return True

    # --- growth

    def grow(self, names: int) -> None:
        """Divides some rows if as many more names need it. A disk that is full is counted: rows
        then become fuller, and the next call tries again."""
        count = self._file.row_count
        if not next_divided(count) and self._used + names <= _MOST_LOAD * SLOTS * count:
            return
        if len(self._file.rows) <= count and not self._extend(2 * count):
            return
        self._divide(min(max(_LEAST_DIVIDED, names), _MOST_DIVIDED))

    def _extend(self, row_count: int) -> bool:
        try:
            self._file.extend(row_count)
        except OSError:
            self.growth_failures += 1
            return False
        return True

    def _divide(self, most: int) -> None:
        count = self._file.row_count
        first = next_divided(count)
        half = count - first
        taken = min(most, half - first, len(self._file.rows) - count)
        old = self._file.rows[first : first + taken]
        bit = np.uint64(half.bit_length() - 1 + int(COUNT_BITS))
        moves = (old >> bit & np.uint64(1)).astype(np.bool_)
        self._copy_moving(old, moves, count)
        self._file.row_count = count + taken
        self._clear_moved(old, moves)

    def _copy_moving(self, old: U64, moves: NDArray[np.bool_], to: int) -> None:
        self._file.rows[to : to + len(old)] = np.where(moves, old, np.uint64(0))

    def _clear_moved(self, old: U64, moves: NDArray[np.bool_]) -> None:
        old[moves] = 0

    # --- reading all

    def read(self) -> tuple[int, U64]:
        """Counts all that is there, and removes what a division left in another row. Returns how
        many fingerprints there are, and the checksums of their ranges. Raises Corrupt."""
        spilled = np.array(list(self._spilled), np.uint64)
        used, sums = 0, sums_by_range(spilled)
        row_count = self._file.row_count
        for start in range(0, row_count, _SCANNED):
            slots = self._file.rows[start : min(start + _SCANNED, row_count)].reshape(-1)
            at = np.flatnonzero(slots)
            words = slots[at]
            if not (words & np.uint64(MOST_COUNT)).all():
                raise Corrupt("the content of the own set is damaged")
            fingerprints = words >> COUNT_BITS
            is_left = rows_of(fingerprints, row_count) != (at >> SLOT_SHIFT) + start
            slots[at[is_left]] = 0
            own = fingerprints[~is_left]
            sums += sums_by_range(own)
            used += len(own)
        self._used = used
        return used + len(spilled), sums


def _words(fingerprints: U64, counts: NDArray[np.int64]) -> U64:
    """Returns what slots have: a fingerprint and its count; 0 if that is 0."""
    words = fingerprints << COUNT_BITS | counts.view(np.uint64)
    words[counts == 0] = 0
    return words
