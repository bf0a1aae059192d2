"""Numbers of holders: a node is 16 bits in the holder table, and its checksums lie at that number.

A node that is dropped loses its number at once, and has another when it returns; the old one is
retired until no slot holds it any more. Number 0 is no holder.
"""

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvfs.base.errors import NoSpace
from kvfs.holdings.fingerprints import RANGES, U64

_MOST: Final = 1 << 16
_FIRST_ROWS: Final = 16


class HolderNumbers:
    """The number of each node, and what is known of its claims as a whole."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._nodes: list[int] = [0]
        self._free: list[int] = []
        self.is_holder: NDArray[np.bool_] = np.zeros(_MOST, np.bool_)
        """Whether a slot with that number is a claim."""
        self.retired: list[int] = []
        self.retired_bits = 0
        self.counts: NDArray[np.int64] = np.zeros(_MOST, np.int64)
        self.sums: U64 = np.zeros(_FIRST_ROWS * RANGES, np.uint64)
        """The checksum of range `r` of number `n` at n * RANGES + r."""
        self.totals: U64 = np.zeros(_MOST, np.uint64)
        """The sum of the checksums of each number."""

    def find(self, node: int) -> int:
        """Returns the number of a node; 0: it has none."""
        return self._numbers.get(node, 0)

    def of(self, node: int) -> int:
        """Returns the number of a node, a new one if needed. Raises NoSpace when all are taken."""
        return self._numbers.get(node) or self._assign(node)

    def node(self, number: int) -> int:
        """Returns the node that has the number."""
        return self._nodes[number]

    def nodes(self) -> list[int]:
        """Returns all nodes that have one."""
        return list(self._numbers)

    def sums_of(self, number: int) -> U64:
        """Returns the checksums of its ranges, not a copy."""
        return self.sums[number * RANGES : (number + 1) * RANGES]

    def retire(self, node: int) -> int:
        """Takes a node's number from it; returns how many claims that leaves without a holder."""
        number = self._numbers.pop(node, 0)
        if not number:
            return 0
        count = int(self.counts[number])
        self.is_holder[number] = False
        self.counts[number] = self.totals[number] = 0
        self.sums_of(number)[:] = 0
        self.retired.append(number)
        self.retired_bits |= 1 << number
        return count

    def release(self, numbers: Iterable[int]) -> None:
        """Gives retired numbers back: no slot has them."""
        for number in numbers:
            self.retired.remove(number)
            self.retired_bits &= ~(1 << number)
            self._free.append(number)

    def _assign(self, node: int) -> int:
        if self._free:
            number = self._free.pop()
            self._nodes[number] = node
        else:
            number = len(self._nodes)
            if number >= _MOST:
                raise NoSpace(f"the holder table knows at most {_MOST - 1} nodes")
            self._nodes.append(node)
        if (number + 1) * RANGES > self.sums.size:
            self.sums = np.concatenate((self.sums, np.zeros(self.sums.size, np.uint64)))
        self._numbers[node] = number
        self.is_holder[number] = True
        return number
