"""The own set: fingerprints of all names that this node holds, and the numbered changes of it that
other nodes follow.

It lies in a mapped file (`own_set_file`), so that a node that was killed goes on with it without
reading any name. A fingerprint is counted: it leaves when the last of its names does, and others
are told only that it came or left.

What a kill (SIGKILL) at each step of a change leaves, and what the next `open` makes of it:

| step | in the file | opened again |
|---|---|---|
| 1 the changes are written into the ring | they are beyond `sequence` | nothing has happened |
| 2 the new counts are written as intents | they have no meaning yet | nothing has happened |
| 3 `intended` = how many, up to which sequence | it is decided | counts and `sequence` are set so |
| 4 counts are set in the rows | some are set | the same: setting a count again changes nothing |
| 5 `sequence` is the next one | all is done | the same |
| 6 `intended` = 0 | idle | nothing is to do |

Rows are divided by steps of their own (`own_counts`).

A file is not believed if it was open in another boot and not closed (a power cut loses any part of
it), if a check fails, or if its owner had not filled it: a new one is begun, with another epoch,
and `is_filled` is false until its owner has added all names.

The owner tells each name once, several together where it can: a change of one name costs 80 us, of
a thousand 0.7 us each. A kill between a change of a name and `add` or `remove` leaves that
name out, or in; `ensure` and `remove` for the names of which it cannot know repair that.

One process, one thread.
"""

import time
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvfs.base.errors import Corrupt
from kvfs.holdings.fingerprints import RANGES, U64, sums_by_range, total
from kvfs.holdings.messages import Deltas
from kvfs.holdings.own_counts import COUNT_BITS, MOST_COUNT, OwnCounts
from kvfs.holdings.own_set_file import MOST_INTENTS, OwnSetFile, OwnSetHeader

RING_SIZE: Final = 1 << 20
"""Changes that are kept for nodes that lag: 8 MB."""
MOST_NAMES: Final = 1 << 27
"""Fingerprints of a node; a range of so many still fits into a message."""
_TOLD_AT_ONCE: Final = 2048
_ADDED, _REMOVED = np.uint64(1), np.uint64(2)
_TARGET_BITS: Final = 32


class OwnSet:
    """The set of one node. `open` makes it."""

    def __init__(self, file: OwnSetFile, reason: str) -> None:
        self._file = file
        header = file.header()
        self.store = header.store
        self.epoch = header.epoch
        """Identifies this life of the set, microseconds since 1970 when it began: sequence numbers
        of another one mean nothing in it, and a later life has a higher one."""
        self.is_filled = header.is_filled
        """Whether it has all that the node holds; else the owner adds all names, then calls
        `mark_filled`."""
        self.reason = reason
        """Why a new set was begun; empty if it was not."""
        self.missing = 0
        """Names that were removed and not there."""
        self.refused = 0
        """Names for which there was no room: others are not told of them."""
        self._is_doubted = False
        self._boot = header.boot
        self._count = 0
        self._sums = np.zeros(RANGES, np.uint64)
        self._counts = OwnCounts(file)

    @classmethod
    def open(cls, path: Path, store: int, boot: int, ring_size: int = RING_SIZE) -> "OwnSet":
        """Opens the set at `path`, or begins a new one if there is none that can be believed.
        `store`: this node's (64 bits). `boot`: that of the filesystem of `path`; after another one
        only a set that was closed counts. Reads the whole file: 0.2 s for 10 million names.

        Raises OSError."""
        former = 0
        try:
            own = cls(OwnSetFile(path, ring_size), "")
            former = own.epoch
            own._resume(path, store, boot)
            return own
        except FileNotFoundError:
            reason = f"there was no {path}"
        except Corrupt as error:
            reason = str(error)
        epoch = max(time.time_ns() // 1000, former + 1)
        header = OwnSetHeader(store, epoch, boot, is_filled=False, is_closed=False)
        return cls(OwnSetFile.create(path, ring_size, header), reason)

    # --- what it holds

    def __len__(self) -> int:
        """Returns how many fingerprints it has."""
        return self._count

    @property
    def growth_failures(self) -> int:
        """Attempts to grow that the disk refused."""
        return self._counts.growth_failures

    @property
    def sequence(self) -> int:
        """Number of the last change."""
        return self._file.sequence

    def holds(self, fingerprints: U64) -> NDArray[np.bool_]:
        """Returns which of them are there."""
        return self._counts.of(fingerprints) > 0

    def fingerprints(self, range_: int) -> U64:
        """Returns what is there of a range, in ascending order."""
        return self._counts.fingerprints(range_)

    def checksums(self) -> U64:
        """Returns the checksum of each range (`fingerprints.sums_by_range`)."""
        return self._sums.copy()

    def digest(self) -> int:
        """Returns the sum of the checksums, modulo 2**64."""
        return total(self._sums)

    def deltas_since(self, sequence: int, most: int = _TOLD_AT_ONCE) -> Deltas | None:
        """Returns up to `most` changes after that one, as their net effect; None if they are not
        kept any more, or the number is none of this epoch."""
        newest = self.sequence
        if not max(0, newest - self._kept) <= sequence <= newest:
            return None
        last = min(sequence + most, newest)
        at = np.arange(sequence, last) % len(self._file.ring)
        words = self._file.ring[at][::-1]
        fingerprints, final = np.unique(words >> COUNT_BITS, return_index=True)
        is_added = (words[final] & np.uint64(MOST_COUNT)) == _ADDED
        return Deltas(
            self.store,
            self.epoch,
            sequence + 1,
            last,
            fingerprints[is_added],
            fingerprints[~is_added],
            self.digest() if last == newest else None,
        )

    @property
    def _kept(self) -> int:
        """Changes in the ring that a change which is being written does not overwrite."""
        return len(self._file.ring) - MOST_INTENTS

    # --- changes

    def add(self, fingerprints: U64) -> None:
        """Counts names that came, each once; two of one fingerprint are two."""
        unique, times = np.unique(fingerprints, return_counts=True)
        self._change(unique, times)

    def remove(self, fingerprints: U64) -> None:
        """Counts names that went, each once. More than came change nothing, and are counted."""
        unique, times = np.unique(fingerprints, return_counts=True)
        self._change(unique, -times)

    def ensure(self, fingerprints: U64) -> None:
        """Adds those that are not there: for names of which the owner does not know whether they
        were added."""
        unique = np.unique(fingerprints)
        new = unique[~self.holds(unique)]
        self._change(new, np.ones(len(new), np.int64))

    def mark_filled(self) -> None:
        """Says that the owner has added all names: from now on a restart goes on with the set."""
        self.is_filled = True
        self._write_header(is_closed=False)

    def doubt(self) -> None:
        """Has the next life begin a new set, since this one has names that the owner did not take
        away; it goes on until then."""
        self._is_doubted = True
        self._write_header(is_closed=False)

    def close(self) -> None:
        """Writes the set to the disk and says so: it then counts in any later boot. Nothing else
        may be called after it. Raises OSError."""
        self._file.sync()
        self._write_header(is_closed=True)
        self._file.sync()

    def _change(self, fingerprints: U64, by: NDArray[np.int64]) -> None:
        for start in range(0, len(fingerprints), MOST_INTENTS):
            piece = slice(start, start + MOST_INTENTS)
            self._change_piece(fingerprints[piece], by[piece])

    def _change_piece(self, fingerprints: U64, by: NDArray[np.int64]) -> None:
        self._counts.grow(len(fingerprints))
        before = self._counts.of(fingerprints)
        wanted = before + by
        self.missing += int(-wanted[wanted < 0].sum())
        after = np.clip(wanted, 0, MOST_COUNT)
        is_new = (before == 0) & (after > 0)
        if int(np.count_nonzero(is_new)) > MOST_NAMES - self._count:
            self.refused += int(np.count_nonzero(is_new))
            after[is_new] = 0
        changes = np.flatnonzero(after != before)
        self._commit(fingerprints[changes], before[changes], after[changes])

    def _commit(
        self, fingerprints: U64, before: NDArray[np.int64], after: NDArray[np.int64]
    ) -> None:
        """Makes these counts so, and tells those that came or left. Fingerprints are unique."""
        if not len(fingerprints):
            return
        came, left = fingerprints[before == 0], fingerprints[after == 0]
        target = self.sequence + len(came) + len(left)
        self._write_ring(came, left)
        self._write_intents(fingerprints, after)
        self._intend(len(fingerprints), target)
        without_room = self._counts.set(fingerprints, after)
        self._advance(target)
        self._finish()
        self._sums += sums_by_range(came)
        self._sums -= sums_by_range(left)
        self._count += len(came) - len(left)
        if without_room:
            self._take_back(without_room)

    def _take_back(self, fingerprints: list[int]) -> None:
        """Tells that names left which were told to have come: there was no room for them."""
        self.refused += len(fingerprints)
        self.is_filled = False
        self._write_header(is_closed=False)
        ones = np.ones(len(fingerprints), np.int64)
        self._commit(np.array(sorted(fingerprints), np.uint64), ones, 0 * ones)

    # --- the steps of a change

    def _write_ring(self, came: U64, left: U64) -> None:
        words = np.concatenate((came << COUNT_BITS | _ADDED, left << COUNT_BITS | _REMOVED))
        first = self.sequence
        self._file.ring[np.arange(first, first + len(words)) % len(self._file.ring)] = words

    def _write_intents(self, fingerprints: U64, counts: NDArray[np.int64]) -> None:
        words = fingerprints << COUNT_BITS | counts.view(np.uint64)
        self._file.intents[: len(fingerprints)] = words

    def _intend(self, count: int, target: int) -> None:
        self._file.intended = count << _TARGET_BITS | target & (1 << _TARGET_BITS) - 1

    def _advance(self, target: int) -> None:
        self._file.sequence = target

    def _finish(self) -> None:
        self._file.intended = 0

    # --- opening

    def _resume(self, path: Path, store: int, boot: int) -> None:
        """Makes what the file has whole. Raises Corrupt if it cannot be believed."""
        header = self._file.header()
        if header.store != store:
            raise Corrupt(f"{path} is of another store")
        if not header.is_filled:
            raise Corrupt(f"{path} had not been filled")
        if not header.is_closed and header.boot != boot:
            raise Corrupt(f"{path} was open when the machine or its filesystem went away")
        self._repeat_intended()
        self._count, self._sums = self._counts.read()
        if header.is_closed and (header.count, header.digest) != (self._count, self.digest()):
            raise Corrupt(f"the content of {path} is damaged")
        self._boot = boot
        if header.is_closed or header.boot != boot:
            self._write_header(is_closed=False)
            self._file.sync()

    def _repeat_intended(self) -> None:
        intended = self._file.intended
        if not intended:
            return
        count, low = intended >> _TARGET_BITS, intended & (1 << _TARGET_BITS) - 1
        behind = (low - self.sequence) % (1 << _TARGET_BITS)
        if count > MOST_INTENTS or behind > MOST_INTENTS:
            raise Corrupt("what was intended is damaged")
        words = self._file.intents[:count]
        counts = (words & np.uint64(MOST_COUNT)).view(np.int64)
        if self._counts.set(words >> COUNT_BITS, counts):
            raise Corrupt("what was intended has no room")
        self._advance(self.sequence + behind)
        self._finish()

    def _write_header(self, is_closed: bool) -> None:
        self._file.write_header(
            OwnSetHeader(
                self.store,
                self.epoch,
                self._boot,
                self.is_filled and not self._is_doubted,
                is_closed,
                self._count,
                self.digest(),
            )
        )
