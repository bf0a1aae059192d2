"""The holder table: which nodes of the cluster say that they hold a name, by its fingerprint.

One table for the whole cluster: to ask for a name costs the same whether 10 or 10,000 nodes could
hold it, and most names that are asked for are held by none. A claim, a pair of fingerprint and
node, has a slot of 6 bytes (`holder_rows`); what finds no slot, and the holders of a fingerprint
beyond the first 8, are kept beside (`spilled_claims`).

All operations take batches. No step takes more than about 5 ms: a batch of up to `MOST_AT_ONCE`
claims; growth, a few rows with each batch; `step`, the rest, while nothing else is to do.

A node that is a home of some ranges alone (`home_map`) has a turned table: rows are chosen by the
bits above the range, or only the rows of its ranges would fill. To find a node's claims in a range
means to look through all of a turned table: so to replace a range takes longer than a step where
the node has claims in it, as when changes of a range that was gained come before its contents.

Invariants
- A claim is there once, in its row or beside it. To add one again, or to remove one that is not
  there, changes nothing and is counted.
- The checksums of a node's ranges are those of exactly the claims that are there; of a range that
  was lost they are 0, and nothing may be added to it until `is_losing` is false.
- A dropped node's claims are never seen again, also while their slots are not yet free.
- Memory is bounded: a claim without room is refused and counted, never another one lost for it.

A table belongs to one thread.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvfs.base.errors import Invalid
from kvfs.holdings.claim_slots import MOST_LOAD, ClaimSlots, Numbers
from kvfs.holdings.fingerprints import (
    NONE,
    RANGE_BITS,
    RANGES,
    U64,
    ranges_of,
    turned,
    turned_back,
    turned_one,
)
from kvfs.holdings.holder_rows import MIN_ROW_BITS, ROW_BYTES, tags_of
from kvfs.holdings.row_address import SLOT_SHIFT, SLOTS, Lines
from kvfs.holdings.spilled_claims import bits_from

LIMIT_BYTES: Final = 16 << 30
MOST_AT_ONCE: Final = 2048
"""Claims of a batch that keeps the thread for less than 5 ms, also while rows are divided."""
_PIECE: Final = 1024
"""Claims that are looked at together: what is read of their rows fits in the processor's cache."""
_STEP_DIVIDED: Final = 4096
_SALT: Final = 0x9E3779B97F4A7C15


class HolderTable:
    """The claims of all nodes."""

    def __init__(
        self, limit_bytes: int = LIMIT_BYTES, salt: int = _SALT, *, is_turned: bool = False
    ) -> None:
        """`limit_bytes` bounds the rows; it is rounded up to those of an empty table, 25 MB.
        `salt`: this node's own, so that nodes choose different ones of many holders. Raises NoSpace
        if the address space is not to be had."""
        self._slots = ClaimSlots(limit_bytes // ROW_BYTES, is_turned=is_turned)
        self._rows = self._slots.rows
        self._numbers = self._slots.numbers
        self._salt = salt
        self.counters = self._slots.counters

    # --- asking

    def probe(self, fingerprints: U64, most: int = 8) -> dict[int, list[int]]:
        """Returns up to `most` nodes that say they hold each, by position in the batch; names that
        nobody holds are left out."""
        found: dict[int, list[int]] = {}
        if self._slots.is_turned:
            fingerprints = turned(fingerprints)
        for start in range(0, len(fingerprints), _PIECE):
            self._probe(fingerprints[start : start + _PIECE], start, most, found)
        return found

    def holders_of(self, fingerprint: int, most: int = 8) -> list[int]:
        """Returns up to `most` nodes that say they hold one name: faster than a batch of one."""
        if self._slots.is_turned:
            fingerprint = turned_one(fingerprint)
        row, tag = self._rows.row_of(fingerprint), fingerprint >> MIN_ROW_BITS
        tags, is_spilled = self._rows.tags[row], self._rows.is_spilled[row]
        # Most names are held by none: to look for the tag's bytes takes a tenth of a comparison by
        # numpy, and finds at most too much, where the ends of two tags look like it.
        if not is_spilled and tag.to_bytes(tags.itemsize, sys.byteorder) not in tags.tobytes():
            return []
        slots = (tags == tag).nonzero()[0]
        found = [
            self._numbers.node(number)
            for number in self._rows.holders[row, slots].tolist()
            if self._numbers.is_holder[number]
        ]
        if is_spilled:
            return self._with_spilled(row, fingerprint, found, most)
        return found[:most]

    def _probe(self, fingerprints: U64, start: int, most: int, found: dict[int, list[int]]) -> None:
        rows = self._rows.rows_of(fingerprints)
        same = self._rows.tags.take(rows, axis=0) == tags_of(fingerprints)[:, None]
        at = np.flatnonzero(same)
        if at.size:
            lines = at >> SLOT_SHIFT
            numbers = self._rows.holders[rows[lines], at & SLOTS - 1]
            is_holder = self._numbers.is_holder[numbers]
            node = self._numbers.node
            for line, number in zip(
                lines[is_holder].tolist(), numbers[is_holder].tolist(), strict=True
            ):
                nodes = found.setdefault(start + line, [])
                if len(nodes) < most:
                    nodes.append(node(number))
        for line in np.flatnonzero(self._rows.is_spilled[rows]).tolist():
            nodes = self._with_spilled(
                int(rows[line]), int(fingerprints[line]), found.get(start + line, []), most
            )
            if nodes:
                found[start + line] = nodes

    def _with_spilled(self, row: int, fingerprint: int, nodes: list[int], most: int) -> list[int]:
        """Returns the nodes after those that are kept beside the row: all nodes know the former."""
        bits = self._slots.spilled.holders(row, fingerprint) & ~self._numbers.retired_bits
        if not bits:
            return nodes[:most]
        start = (fingerprint * self._salt >> 7) % bits.bit_length()
        return ([self._numbers.node(each) for each in bits_from(bits, start, most)] + nodes)[:most]

    # --- changing

    def apply(self, node: int, added: U64, removed: U64) -> None:
        """Adds and removes claims of a node. A fingerprint is in one of both. Raises NoSpace for a
        node when there are 65,535 others."""
        self.apply_many([node], added, [len(added)], removed, [len(removed)])

    def apply_many(
        self,
        nodes: Sequence[int],
        added: U64,
        added_counts: Sequence[int] | Lines,
        removed: U64,
        removed_counts: Sequence[int] | Lines,
    ) -> None:
        """Removes and then adds claims of several nodes together: small changes cost less so. Each
        node has so many of the fingerprints as the counts say, one node's behind the other's.
        Raises as `apply` does, before anything is changed."""
        numbers = np.array([self._numbers.of(node) for node in nodes], np.uint16)
        if self._slots.is_turned:
            added, removed = turned(added), turned(removed)
        self._each_piece(self._slots.remove, removed, np.repeat(numbers, removed_counts))
        self._each_piece(self._slots.add, added, np.repeat(numbers, added_counts))

    def replace_range(self, node: int, range_: int, fingerprints: U64) -> None:
        """Makes these the node's only claims in a range. Raises Invalid (one lies in another
        range), and as `apply` does."""
        if (ranges_of(fingerprints) != range_).any():
            raise Invalid(f"a fingerprint does not lie in range {range_}")
        present = self.fingerprints_of(node, range_)
        self.apply(node, np.setdiff1d(fingerprints, present), np.setdiff1d(present, fingerprints))

    def drop_node(self, node: int) -> None:
        """Removes all claims of a node. They are gone at once; `step` frees their memory."""
        self.counters.claims -= self._numbers.retire(node)

    def step(self) -> bool:
        """Does some of what dropped nodes and growth left to do, for less than 5 ms. Returns
        whether there is more."""
        if self._slots.is_dirty:
            self._slots.sweep()
        elif self._rows.is_between:
            self._slots.divide(_STEP_DIVIDED)
        is_growing = self._rows.is_between and not self._slots.is_at_limit
        return is_growing or self._slots.is_dirty

    def lose(self, ranges: NDArray[np.bool_]) -> None:
        """Removes all claims in these ranges, of a turned table; `step` frees their memory, and
        until then they may be seen."""
        self._slots.lose(ranges)

    @property
    def is_losing(self) -> bool:
        """Whether claims of ranges that were lost are still there."""
        return self._slots.is_losing

    def _each_piece(
        self, act: Callable[[U64, Numbers], None], fingerprints: U64, holders: Numbers
    ) -> None:
        for start in range(0, len(fingerprints), _PIECE):
            piece = slice(start, start + _PIECE)
            act(fingerprints[piece], holders[piece])

    # --- what a node holds

    def nodes(self) -> list[int]:
        """Returns the nodes that have claims, or had."""
        return self._numbers.nodes()

    def count(self, node: int) -> int:
        """Returns how many claims a node has."""
        return int(self._numbers.counts[self._numbers.find(node)])

    def checksums(self, node: int) -> U64:
        """Returns the checksum of each range of a node's claims (`fingerprints.sums_by_range`)."""
        return self._numbers.sums_of(self._numbers.find(node)).copy()

    def digest(self, node: int) -> int:
        """Returns the sum of a node's checksums, modulo 2**64."""
        return int(self._numbers.totals[self._numbers.find(node)])

    def digests(self, nodes: Iterable[int]) -> U64:
        """Returns the same of each of these nodes."""
        return self._numbers.totals[[self._numbers.find(node) for node in nodes]]

    def fingerprints_of(self, node: int, range_: int) -> U64:
        """Returns the claims of a node in a range, in ascending order."""
        number = self._numbers.find(node)
        if not number or not self._numbers.sums_of(number)[range_]:  # it has none there
            return NONE
        if self._slots.is_turned:
            return self._turned_fingerprints_of(number, range_)
        own = slice(range_, len(self._rows), RANGES)
        at = np.flatnonzero(self._rows.holders[own] == number)
        rows = (at >> SLOT_SHIFT) * RANGES + range_
        found = self._rows.fingerprints_at(rows, at & SLOTS - 1)
        beside = [
            each
            for line in np.flatnonzero(self._rows.is_spilled[own]).tolist()
            for each in self._slots.spilled.fingerprints_of(line * RANGES + range_, number)
        ]
        if beside:
            found = np.concatenate((found, np.array(beside, np.uint64)))
        found.sort()
        return found

    def _turned_fingerprints_of(self, number: int, range_: int) -> U64:
        tags, holders = self._rows.tags[: len(self._rows)], self._rows.holders[: len(self._rows)]
        is_there = (holders == number) & (tags >> np.uint32(32 - RANGE_BITS) == range_)
        at = np.flatnonzero(is_there)
        found = turned_back(self._rows.fingerprints_at(at >> SLOT_SHIFT, at & SLOTS - 1))
        beside = [
            each
            for row in np.flatnonzero(self._rows.is_spilled[: len(self._rows)]).tolist()
            for each in self._slots.spilled.fingerprints_of(row, number)
        ]
        if beside:
            spilled = turned_back(np.array(beside, np.uint64))
            found = np.concatenate((found, spilled[ranges_of(spilled) == range_]))
        found.sort()
        return found

    # --- its size

    @property
    def size_bytes(self) -> int:
        """Memory of the rows; each fingerprint kept beside costs some 400 bytes more."""
        return len(self._rows) * ROW_BYTES

    @property
    def spilled(self) -> int:
        """Claims that are kept beside their rows."""
        return self._slots.spilled.claims

    @property
    def is_full(self) -> bool:
        """Whether the rows have reached their limit and are full: claims may be refused."""
        return self._slots.is_at_limit and self.load >= MOST_LOAD

    @property
    def load(self) -> float:
        """Returns the share of slots that are used, also by dropped nodes until `step` came."""
        return self._slots.load
