"""The slots of the holder table: claims are added to rows and removed from them, rows are divided,
and what dropped nodes leave is swept. `holder_table` has its public face and the invariants.

A batch is first looked at as a whole: which rows it meets, which of their slots have its tags, and
which are free. Claims that meet the same row follow in a second pass. Those alone are handled one
by one that find their row full, or whose fingerprint has many holders.

In a turned table what is called a fingerprint here is a turned one.
"""

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvfs.holdings.fingerprints import (
    RANGE_BITS,
    RANGES,
    U64,
    mixed,
    range_of_turned,
    ranges_of,
    turned_back,
)
from kvfs.holdings.holder_numbers import HolderNumbers
from kvfs.holdings.holder_rows import MIN_ROW_BITS, HolderRows, tags_of
from kvfs.holdings.row_address import SLOT_SHIFT, SLOTS, Lines
from kvfs.holdings.spilled_claims import SpilledClaims, bits_from

_MOST_IN_ROW: Final = 8
"""Holders of one fingerprint that get slots."""
MOST_LOAD: Final = 0.7
"""Share of used slots at which rows are divided: fewer than 1 in 5,000 claims then finds its row
full."""
_LEAST_LOAD: Final = 0.4
"""Below it no rows are divided, even if some are full."""
_CROWDED: Final = 8
"""Rows for each claim that may find no slot before rows are divided."""
_SPILLED: Final = 16
"""Rows for each fingerprint that may be kept beside them."""
_LEAST_SPILLED: Final = 1 << 16
_FEW: Final = 3
"""Claims with rows of their own that are handled one by one: so few cost less so."""
_LEAST_DIVIDED: Final = 64
_STEP_SWEPT: Final = 16384
_SWEPT_TOGETHER: Final = 16
_LOSING_COSTS: Final = 8
"""Retired numbers that take as long to sweep as lost ranges do."""
_MARKS: Final = 1 << 20
_RANGE_SHIFT: Final = np.uint32(32 - RANGE_BITS)
"""The shift from a tag of a turned fingerprint to its range."""

Numbers: TypeAlias = NDArray[np.uint16]


@dataclass(slots=True)
class TableCounters:
    """Counts of claims, and of changes that were none."""

    claims: int = 0
    """There now."""
    duplicates: int = 0
    """Claims that were there when they were added."""
    missing: int = 0
    """Claims that were not there when they were removed."""
    refused: int = 0
    """Claims for which there was no room."""


class ClaimSlots:
    """The claims of all nodes, by row."""

    def __init__(self, most_rows: int, *, is_turned: bool = False) -> None:
        """`is_turned`: whether it is given turned fingerprints. Raises NoSpace if there is no
        address space for `most_rows`."""
        self.is_turned = is_turned
        self.rows = HolderRows(most_rows)
        self.numbers = HolderNumbers()
        self.spilled = SpilledClaims()
        self.counters = TableCounters()
        self._used = 0
        self._crowded = 0
        self._swept = 0
        self._sweeping: tuple[int, ...] = ()
        self._lost: NDArray[np.bool_] | None = None
        """Ranges whose claims are to be removed."""
        self._losing: NDArray[np.bool_] | None = None
        """The ranges whose claims are being removed."""
        self._marks = np.zeros(_MARKS, np.int32)

    @property
    def load(self) -> float:
        """Returns the share of slots that are used."""
        return self._used / (len(self.rows) * SLOTS)

    @property
    def is_at_limit(self) -> bool:
        """Whether there are as many rows as there may be."""
        return len(self.rows) >= self.rows.most_rows

    # --- adding

    def add(self, fingerprints: U64, numbers: Numbers) -> None:
        """Adds claims: each fingerprint with the number beside it."""
        self._grow(len(fingerprints))
        rows = self.rows.rows_of(fingerprints)
        while len(rows):
            first = self._first_of_each(rows)
            taken = int(np.count_nonzero(first))
            if taken == len(rows):
                self._add_apart(fingerprints, numbers, rows)
                return
            if taken <= _FEW:
                self._add_singly(fingerprints, numbers)
                return
            self._add_apart(fingerprints[first], numbers[first], rows[first])
            left = ~first
            fingerprints, numbers, rows = fingerprints[left], numbers[left], rows[left]

    def _first_of_each(self, places: Lines) -> NDArray[np.bool_]:
        """Returns which of a batch to handle now, so that none of them have the same place."""
        marks = places & _MARKS - 1
        lines = np.arange(len(places), dtype=np.int32)
        self._marks[marks] = lines
        first: NDArray[np.bool_] = self._marks[marks] == lines
        return first

    def _add_apart(self, fingerprints: U64, numbers: Numbers, rows: Lines) -> None:
        """Adds claims to rows that are all different."""
        tags = tags_of(fingerprints)
        holders = self.rows.holders.take(rows, axis=0)
        is_free = holders == 0
        slots = is_free.argmax(axis=1)
        is_new = np.ones(len(rows), np.bool_)
        is_full = ~is_free[np.arange(len(rows)), slots]
        is_odd = is_full.copy()
        for line in np.flatnonzero(self.rows.is_spilled[rows]).tolist():
            is_odd[line] |= bool(self.spilled.holders(int(rows[line]), int(fingerprints[line])))
        at = np.flatnonzero(self.rows.tags.take(rows, axis=0) == tags[:, None])
        if at.size:
            lines, found = at >> SLOT_SHIFT, holders.reshape(-1)[at]
            is_new[lines[found == numbers[lines]]] = False
            others = np.bincount(lines[self.numbers.is_holder[found]], minlength=len(rows))
            is_odd |= others >= _MOST_IN_ROW
        is_odd &= is_new
        self.counters.duplicates += len(rows) - int(np.count_nonzero(is_new))
        if is_odd.any():
            self._crowded += int(np.count_nonzero(is_full & is_odd))
            self._add_beside(fingerprints[is_odd], numbers[is_odd], rows[is_odd])
            is_new &= ~is_odd
        if not is_new.all():
            new = np.flatnonzero(is_new)
            fingerprints, numbers, rows = fingerprints[new], numbers[new], rows[new]
            tags, slots = tags[new], slots[new]
        self.rows.tags[rows, slots] = tags
        self.rows.holders[rows, slots] = numbers
        self._used += len(rows)
        self._count(fingerprints, numbers)

    def _add_beside(self, fingerprints: U64, numbers: Numbers, rows: Lines) -> None:
        """Adds claims that are not in their rows, beside them."""
        placed = [
            self._keep_beside(*claim)
            for claim in zip(rows.tolist(), fingerprints.tolist(), numbers.tolist(), strict=True)
        ]
        self._count(fingerprints[placed], numbers[placed])

    def _add_singly(self, fingerprints: U64, numbers: Numbers) -> None:
        """Adds claims one by one, whatever their rows."""
        placed = [
            self._add_one(fingerprint, number)
            for fingerprint, number in zip(fingerprints.tolist(), numbers.tolist(), strict=True)
        ]
        self._count(fingerprints[placed], numbers[placed])

    def _add_one(self, fingerprint: int, number: int) -> bool:
        row = self.rows.row_of(fingerprint)
        same = np.flatnonzero(self.rows.tags[row] == fingerprint >> MIN_ROW_BITS)
        present = self.rows.holders[row, same].tolist()
        if number in present:
            self.counters.duplicates += 1
            return False
        return self._place(row, fingerprint, number, present)

    def _place(self, row: int, fingerprint: int, number: int, present: list[int]) -> bool:
        """Gives a claim that has no slot one, or a place beside its row; returns whether it is new
        and there was one. `present`: the numbers that have slots with its tag."""
        if self.spilled.holders(row, fingerprint):
            return self._keep_beside(row, fingerprint, number)
        others = sum(bool(self.numbers.is_holder[each]) for each in present)
        if others < _MOST_IN_ROW:
            free = np.flatnonzero(self.rows.holders[row] == 0)
            if free.size:
                self.rows.tags[row, free[0]] = fingerprint >> MIN_ROW_BITS
                self.rows.holders[row, free[0]] = number
                self._used += 1
                return True
            self._crowded += 1
        return self._keep_beside(row, fingerprint, number)

    def _keep_beside(self, row: int, fingerprint: int, number: int) -> bool:
        holders = self.spilled.holders(row, fingerprint)
        if holders >> number & 1:
            self.counters.duplicates += 1
            return False
        most = max(_LEAST_SPILLED, len(self.rows) // _SPILLED)
        if self.spilled.fingerprints >= most and not holders:
            self.counters.refused += 1
            return False
        self.spilled.add(row, fingerprint, number)
        self.rows.is_spilled[row] = True
        return True

    def _count(self, fingerprints: U64, numbers: Numbers) -> None:
        self.counters.claims += len(fingerprints)
        if self.is_turned:
            fingerprints = turned_back(fingerprints)
        sums = mixed(fingerprints)
        np.add.at(self.numbers.counts, numbers, 1)
        np.add.at(self.numbers.totals, numbers, sums)
        np.add.at(self.numbers.sums, _sum_of(fingerprints, numbers), sums)

    def _discount(self, fingerprints: U64, numbers: Numbers) -> None:
        self.counters.claims -= len(fingerprints)
        if self.is_turned:
            fingerprints = turned_back(fingerprints)
        sums = mixed(fingerprints)
        np.subtract.at(self.numbers.counts, numbers, 1)
        np.subtract.at(self.numbers.totals, numbers, sums)
        np.subtract.at(self.numbers.sums, _sum_of(fingerprints, numbers), sums)

    # --- removing

    def remove(self, fingerprints: U64, numbers: Numbers) -> None:
        """Removes claims: of each fingerprint that of the number beside it."""
        rows = self.rows.rows_of(fingerprints)
        at = np.flatnonzero(self.rows.tags.take(rows, axis=0) == tags_of(fingerprints)[:, None])
        lines, slots = at >> SLOT_SHIFT, at & SLOTS - 1
        own = self.rows.holders[rows[lines], slots] == numbers[lines]
        lines, slots = lines[own], slots[own]
        _, once = np.unique(rows[lines] * SLOTS + slots, return_index=True)
        left = np.ones(len(rows), np.bool_)
        left[lines[once]] = False
        lines, slots = lines[once], slots[once]
        self.rows.holders[rows[lines], slots] = 0
        self._used -= len(lines)
        self._discount(fingerprints[lines], numbers[lines])
        beside = [
            line
            for line in np.flatnonzero(left & self.rows.is_spilled[rows]).tolist()
            if self._remove_spilled(int(rows[line]), int(fingerprints[line]), int(numbers[line]))
        ]
        if beside:
            left[beside] = False
            self._discount(fingerprints[beside], numbers[beside])
        self.counters.missing += int(np.count_nonzero(left))

    def _remove_spilled(self, row: int, fingerprint: int, number: int) -> bool:
        if not self.spilled.remove(row, fingerprint, number):
            return False
        self.rows.is_spilled[row] = row in self.spilled
        return True

    # --- growing and sweeping

    def _grow(self, claims: int) -> None:
        """Divides rows in proportion to the claims that came."""
        if not self.rows.is_between:
            is_crowded = self._crowded > len(self.rows) // _CROWDED and self.load > _LEAST_LOAD
            if self.is_at_limit or not (is_crowded or self.load > MOST_LOAD):
                return
            self._crowded = 0
        self.divide(max(_LEAST_DIVIDED, claims // 2))

    def divide(self, most: int) -> None:
        """Divides up to `most` rows."""
        first, count = self.rows.divide(most)
        for line in np.flatnonzero(self.rows.is_spilled[first : first + count]).tolist():
            self._settle(first + line)

    def _settle(self, row: int) -> None:
        """Places the claims again that were kept beside a row. As many places as before are there:
        none is refused."""
        self.rows.is_spilled[row] = False
        for fingerprint, bits in self.spilled.take(row).items():
            place = self.rows.row_of(fingerprint)
            bits &= ~self.numbers.retired_bits
            for number in bits_from(bits, 0, bits.bit_count()):
                same = np.flatnonzero(self.rows.tags[place] == fingerprint >> MIN_ROW_BITS)
                self._place(place, fingerprint, number, self.rows.holders[place, same].tolist())

    @property
    def is_dirty(self) -> bool:
        """Whether slots have what counts no more."""
        return bool(self.numbers.retired) or self.is_losing

    @property
    def is_losing(self) -> bool:
        """Whether slots have claims of ranges that were lost."""
        return self._lost is not None or self._losing is not None

    def lose(self, ranges: NDArray[np.bool_]) -> None:
        """Has all claims of these ranges removed by `sweep`; their checksums go at once."""
        self._lost = ranges if self._lost is None else self._lost | ranges
        sums = self.numbers.sums.reshape(-1, RANGES)
        self.numbers.totals[: len(sums)] -= sums[:, ranges].sum(axis=1, dtype=np.uint64)
        sums[:, ranges] = 0

    def sweep(self) -> None:
        """Frees slots of retired numbers and of lost ranges in the next rows."""
        if not self._sweeping and self._losing is None:
            self._sweeping, self._swept = tuple(self.numbers.retired[:_SWEPT_TOGETHER]), 0
            self._losing, self._lost = self._lost, None
        losing = 0 if self._losing is None else _LOSING_COSTS
        most = _STEP_SWEPT // (len(self._sweeping) + losing)
        rows = slice(self._swept, min(self._swept + most, len(self.rows)))
        holders = self.rows.holders[rows]
        for number in self._sweeping:
            gone = holders == number
            self._used -= int(np.count_nonzero(gone))
            holders *= ~gone
        if self._losing is not None:
            self._free_lost(self._losing, rows)
        bits = sum(1 << number for number in self._sweeping)
        for line in np.flatnonzero(self.rows.is_spilled[rows]).tolist():
            row = self._swept + line
            self.spilled.remove_holders(row, bits)
            if self._losing is not None:
                self._free_lost_beside(self._losing, row)
            self.rows.is_spilled[row] = row in self.spilled
        self._swept = rows.stop
        if self._swept == len(self.rows):
            self.numbers.release(self._sweeping)
            self._sweeping, self._losing = (), None

    def _free_lost(self, lost: NDArray[np.bool_], rows: slice) -> None:
        holders = self.rows.holders[rows]
        gone = lost[self.rows.tags[rows] >> _RANGE_SHIFT] & (holders != 0)
        self._used -= int(np.count_nonzero(gone))
        self._discount_lost(np.bincount(holders[gone], minlength=len(self.numbers.counts)))
        holders *= ~gone

    def _free_lost_beside(self, lost: NDArray[np.bool_], row: int) -> None:
        for fingerprint in self.spilled.fingerprints_in(row):
            if lost[range_of_turned(fingerprint)]:
                bits = self.spilled.remove_all(row, fingerprint)
                gone = np.zeros(len(self.numbers.counts), np.int64)
                gone[bits_from(bits, 0, bits.bit_count())] = 1
                self._discount_lost(gone)

    def _discount_lost(self, gone: NDArray[np.int64]) -> None:
        """Counts claims away, by number; those of retired numbers are not counted any more."""
        gone *= self.numbers.is_holder
        self.numbers.counts -= gone
        self.counters.claims -= int(gone.sum())


def _sum_of(fingerprints: U64, numbers: Numbers) -> Lines:
    return numbers.astype(np.int64) * RANGES + ranges_of(fingerprints)
