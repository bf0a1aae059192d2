"""The memory of the holder table: rows of 64 slots, a slot a tag and a holder. No policy.

A fingerprint's row is given by its low bits, its tag by the high 32; as there are at least 2**16
rows, both together are the whole fingerprint. A slot costs 6 bytes.
Growth touches no more than the rows that it divides (`row_address`).

The address space for all rows is reserved at once; the kernel gives memory to what is touched.
"""

import contextlib
import mmap
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvfs.base.errors import NoSpace
from kvfs.holdings import row_address
from kvfs.holdings.fingerprints import U64
from kvfs.holdings.row_address import SLOTS, Lines

_Scalar = TypeVar("_Scalar", bound=np.generic)
ROW_BYTES: Final = SLOTS * (4 + 2) + 1
MIN_ROW_BITS: Final = 16
_TAG_SHIFT: Final = np.uint64(16)
_LOW: Final = np.uint64((1 << MIN_ROW_BITS) - 1)
_MAP_NORESERVE: Final = 0x4000


class HolderRows:
    """The rows, and where a fingerprint belongs among them."""

    def __init__(self, most_rows: int) -> None:
        """Reserves address space for `most_rows`. Raises NoSpace if there is none."""
        self.most_rows = max(most_rows, 1 << MIN_ROW_BITS)
        self.tags = _reserve(self.most_rows * SLOTS, np.uint32).reshape(-1, SLOTS)
        self.holders = _reserve(self.most_rows * SLOTS, np.uint16).reshape(-1, SLOTS)
        """0: the slot is free."""
        self.is_spilled = _reserve(self.most_rows, np.bool_)
        """Whether some of a row's claims are kept beside it."""
        self._count = 1 << MIN_ROW_BITS

    def __len__(self) -> int:
        """Returns how many rows there are."""
        return self._count

    @property
    def is_between(self) -> bool:
        """Whether a doubling has begun and not ended."""
        return row_address.next_divided(self._count) > 0

    def rows_of(self, fingerprints: U64) -> Lines:
        """Returns the row of each fingerprint."""
        return row_address.rows_of(fingerprints, self._count)

    def row_of(self, fingerprint: int) -> int:
        """Returns the row of one fingerprint."""
        return row_address.row_of(fingerprint, self._count)

    def divide(self, most: int) -> tuple[int, int]:
        """Divides up to `most` rows. Returns the first one and how many: their claims are now in
        them and in as many rows at the end. The caller moves what is spilled."""
        first = row_address.next_divided(self._count)
        half = self._count - first
        count = min(most, half - first, self.most_rows - self._count)
        if count <= 0:
            return first, 0
        old = slice(first, first + count)
        new = slice(first + half, first + half + count)
        tags, holders = self.tags[old], self.holders[old]
        moves = (tags >> np.uint32(half.bit_length() - 1 - MIN_ROW_BITS)).astype(np.uint16)
        moves &= np.uint16(1)
        self.tags[new] = tags
        np.multiply(holders, moves, out=self.holders[new])
        holders -= self.holders[new]
        self._count += count
        return first, count

    def fingerprints_at(self, rows: Lines, slots: Lines) -> U64:
        """Returns what is stored in these slots."""
        tags = self.tags[rows, slots].astype(np.uint64)
        return (tags << _TAG_SHIFT) | (rows.view(np.uint64) & _LOW)


def tags_of(fingerprints: U64) -> NDArray[np.uint32]:
    """Returns the tag of each fingerprint."""
    return (fingerprints >> _TAG_SHIFT).astype(np.uint32)


def _reserve(count: int, kind: type[_Scalar]) -> NDArray[_Scalar]:
    size = count * np.dtype(kind).itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        memory = mmap.mmap(-1, size, flags=flags)
    except OSError as error:
        raise NoSpace(
            f"no address space for {size} bytes of the holder table: {error.strerror};"
            " lower its limit, or raise the process's (ulimit -v)"
        ) from None
    with contextlib.suppress(OSError):  # a kernel without them: probes take longer
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, kind)
