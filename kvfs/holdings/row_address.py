"""Rows of 64 slots whose number grows one by one (linear hashing). Pure.

Among `count` rows, with 2**bits the largest power of two up to it, a fingerprint's row is its low
`bits` bits; the first `count - 2**bits` of those rows are divided, by one bit more, into row `r`
and row `r + 2**bits`. So the next row that comes takes its content from one other row, and there is
no moment at which everything moves.

There are at least 1,024 rows: those of a range are every 1,024th.
"""

from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvfs.holdings.fingerprints import U64

Lines: TypeAlias = NDArray[np.int64]
"""Positions, in a batch or of rows."""
SLOTS: Final = 64
SLOT_SHIFT: Final = 6


def next_divided(count: int) -> int:
    """Returns the row that is divided next."""
    return count - (1 << count.bit_length() - 1)


def rows_of(fingerprints: U64, count: int) -> Lines:
    """Returns the row of each fingerprint among `count` rows."""
    half = 1 << count.bit_length() - 1
    rows = (fingerprints & np.uint64(half - 1)).view(np.int64)
    if count == half:
        return rows
    divided = (fingerprints & np.uint64(2 * half - 1)).view(np.int64)
    return np.where(rows < count - half, divided, rows)


def row_of(fingerprint: int, count: int) -> int:
    """Returns the row of one fingerprint among `count` rows."""
    half = 1 << count.bit_length() - 1
    row = fingerprint & half - 1
    return fingerprint & 2 * half - 1 if row < count - half else row
