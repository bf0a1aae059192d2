"""Changes of many origins in one message, as nodes tell and pass them on: its columns, and its wire
form. Pure.

Among a thousand nodes each hears of all others every second. One by one a message cost its receiver
150 us, whatever was in it; so those of a moment are one table, which is checked, compared and
applied as a whole, and passed on without being made anew. Little-endian, versioned, checksummed:

| bytes | |
|---|---|
| 4 | `KVHB` |
| 1, 1, 2 | version, nothing, the number of a map of homes (version 2), or 0 (version 1) |
| 4, 4, 4 | how many rows, added, removed fingerprints |
| 32 each | rows |
| 6 each | the added fingerprints of all rows, in their order, then the removed |
| 8 | xxh3-64 of all before |

A row is what `messages.Deltas` is: the node (2), changes (2, the highest bit: the digest is known),
how many added (2) and removed (2), epoch, first sequence number and digest (8 each). Counts are
compared with what is there before memory is taken.

A batch with the number of a map (`home_map`) has, of the changes that its rows cover, at least
those in ranges of which its receiver is a home by that map; one without has all.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvfs.base.errors import Corrupt
from kvfs.holdings.delta_codec import MOST_CHANGES
from kvfs.holdings.fingerprints import BITS, U64, ranges_of
from kvfs.holdings.home_map import Share
from kvfs.holdings.messages import Deltas
from kvfs.holdings.row_address import Lines

T = TypeVar("T")
VERSION: Final = 1
_OF_A_MAP: Final = 2
"""The version of a batch that has a part of the changes."""
MOST_BYTES: Final = 1 << 20
"""Bytes of a batch: more than a request may have."""
MOST_OF_ORIGIN: Final = 256
"""Rows of one origin in a message: each is applied after the one before."""
_MAGIC: Final = b"KVHB"
_HEAD: Final = struct.Struct("<4sBxHIII")
_CHECK: Final = struct.Struct("<Q")
_ROW: Final = np.dtype(
    [
        ("store", "<u2"),
        ("changes", "<u2"),
        ("added", "<u2"),
        ("removed", "<u2"),
        ("epoch", "<u8"),
        ("first", "<u8"),
        ("digest", "<u8"),
    ]
)
_IS_KNOWN: Final = 1 << 15
_OCTETS: Final = BITS // 8
_MOST_SEQUENCE: Final = (1 << BITS) - 1


@dataclass(frozen=True, slots=True, eq=False)
class DeltaBatch:
    """Changes of several origins, a row each; those of one origin in the order of their numbers."""

    rows: NDArray[np.void]
    added: U64
    """The fingerprints that the rows add, one row behind the other, each in ascending order."""
    removed: U64
    map_number: int = 0
    """That of the map by which changes were left out; 0: none were."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def stores(self) -> NDArray[np.uint16]:
        return self._column("store")

    @property
    def epochs(self) -> U64:
        return self._column("epoch")

    @property
    def firsts(self) -> Lines:
        return self._column("first").astype(np.int64)

    @property
    def changes(self) -> Lines:
        return self._column("changes").astype(np.int64) & _IS_KNOWN - 1

    @property
    def lasts(self) -> Lines:
        return self.firsts + self.changes - 1

    @property
    def digests(self) -> U64:
        return self._column("digest")

    @property
    def has_digest(self) -> NDArray[np.bool_]:
        known: NDArray[np.bool_] = self._column("changes") >= _IS_KNOWN
        return known

    @property
    def added_counts(self) -> Lines:
        return self._column("added").astype(np.int64)

    @property
    def removed_counts(self) -> Lines:
        return self._column("removed").astype(np.int64)

    def of(self, chosen: NDArray[np.bool_]) -> "DeltaBatch":
        """Returns the rows that are chosen, in their order."""
        if chosen.all():
            return self
        return DeltaBatch(
            self.rows[chosen],
            self.added[np.repeat(chosen, self.added_counts)],
            self.removed[np.repeat(chosen, self.removed_counts)],
            self.map_number,
        )

    def at(self, lines: Sequence[int]) -> "DeltaBatch":
        """Returns the rows at these lines, in ascending order."""
        chosen = np.zeros(len(self), np.bool_)
        chosen[lines] = True
        return self.of(chosen)

    def within(self, shares: Sequence[Share], map_number: int) -> "DeltaBatch":
        """Returns all rows with those of their changes alone whose range is in a share, each row's
        own, or one for all: what a map has its receivers told of."""
        rows, table = self.rows.copy(), np.stack(shares)

        def meant(name: str, fingerprints: U64) -> U64:
            owners = np.repeat(np.arange(len(rows)), rows[name])
            is_meant = table[owners if len(table) > 1 else 0, ranges_of(fingerprints)]
            rows[name] = np.bincount(owners[is_meant], minlength=len(rows))
            kept: U64 = fingerprints[is_meant]
            return kept

        added, removed = meant("added", self.added), meant("removed", self.removed)
        return DeltaBatch(rows, added, removed, map_number)

    def told_of(self, is_meant: Callable[[int], bool]) -> "DeltaBatch":
        """Returns the rows of the origins that are meant."""
        return self.of(np.array([is_meant(each) for each in self.stores.tolist()], np.bool_))

    def divided(self, way: Callable[[int], T]) -> Iterator[tuple[T, "DeltaBatch"]]:
        """Yields the ways that its origins go, each with its rows."""
        ways: dict[T, list[int]] = {}
        for line, store in enumerate(self.stores.tolist()):
            ways.setdefault(way(store), []).append(line)
        for each, lines in ways.items():
            yield each, self.at(lines)

    def messages(self) -> Iterator[Deltas]:
        """Yields the rows as messages of one origin each."""
        added, removed = 0, 0
        for store, changes, adds, removes, epoch, first, digest in self.rows.tolist():
            yield Deltas(
                store,
                epoch,
                first,
                first + (changes & _IS_KNOWN - 1) - 1,
                self.added[added : added + adds],
                self.removed[removed : removed + removes],
                digest if changes & _IS_KNOWN else None,
            )
            added, removed = added + adds, removed + removes

    def _column(self, name: str) -> NDArray[Any]:
        return self.rows[name]


class PackedBatch:
    """A batch as its bytes, which are put together with others without being looked at."""

    __slots__ = ("added", "map_number", "removed", "rows")

    def __init__(self, rows: bytes, added: bytes, removed: bytes, map_number: int) -> None:
        self.rows, self.added, self.removed = rows, added, removed
        self.map_number = map_number

    @property
    def size(self) -> int:
        """Bytes of it in a message."""
        return len(self.rows) + len(self.added) + len(self.removed)

    def __len__(self) -> int:
        return len(self.rows) // _ROW.itemsize


def of_messages(messages: Sequence[Deltas]) -> DeltaBatch:
    """Returns messages, each of up to `MOST_CHANGES`, as a batch."""
    rows = np.array(
        [
            (
                each.store,
                each.last - each.first + 1 | (each.digest is not None and _IS_KNOWN),
                len(each.added),
                len(each.removed),
                each.epoch,
                each.first,
                each.digest or 0,
            )
            for each in messages
        ],
        _ROW,
    )
    return DeltaBatch(
        rows,
        np.concatenate([each.added for each in messages]),
        np.concatenate([each.removed for each in messages]),
    )


def joined(batches: Sequence[DeltaBatch]) -> DeltaBatch:
    """Returns the rows of all, in their order; they are of one map."""
    if len(batches) == 1:
        return batches[0]
    return DeltaBatch(
        np.concatenate([each.rows for each in batches]),
        np.concatenate([each.added for each in batches]),
        np.concatenate([each.removed for each in batches]),
        batches[0].map_number,
    )


def packed(batch: DeltaBatch) -> PackedBatch:
    """Returns the bytes of a batch."""
    return PackedBatch(
        batch.rows.tobytes(), _octets(batch.added), _octets(batch.removed), batch.map_number
    )


def encode(batches: Sequence[PackedBatch]) -> bytes:
    """Returns one message of all of them, in their order; they are of one map."""
    number = batches[0].map_number
    rows = b"".join([each.rows for each in batches])
    added = b"".join([each.added for each in batches])
    removed = b"".join([each.removed for each in batches])
    head = _HEAD.pack(
        _MAGIC,
        _OF_A_MAP if number else VERSION,
        number,
        len(rows) // _ROW.itemsize,
        len(added) // _OCTETS,
        len(removed) // _OCTETS,
    )
    whole = b"".join((head, rows, added, removed))
    return whole + _CHECK.pack(xxhash.xxh3_64_intdigest(whole))


def decode(data: bytes) -> DeltaBatch:
    """Returns the batch of a message. Raises Corrupt: it is damaged, cut short, of another version,
    or none that `encode` makes."""
    if not _HEAD.size + _CHECK.size <= len(data) <= MOST_BYTES:
        raise Corrupt(f"a batch of changes has {len(data)} bytes")
    magic, version, number, rows, added, removed = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != (_OF_A_MAP if number else VERSION):
        raise Corrupt(
            f"no batch of changes of version {VERSION} or {_OF_A_MAP}, which this node speaks"
        )
    body = _HEAD.size + rows * _ROW.itemsize
    if len(data) != body + (added + removed) * _OCTETS + _CHECK.size:
        raise Corrupt("a batch of changes has another length than it says")
    whole = memoryview(data)[: -_CHECK.size]
    if (xxhash.xxh3_64_intdigest(whole),) != _CHECK.unpack_from(data, len(whole)):
        raise Corrupt("a batch of changes is damaged")
    batch = DeltaBatch(
        np.frombuffer(data, _ROW, rows, _HEAD.size),
        _fingerprints(data, added, body),
        _fingerprints(data, removed, body + added * _OCTETS),
        number,
    )
    _check(batch)
    return batch


def _check(batch: DeltaBatch) -> None:
    """Raises Corrupt unless its rows are what origins tell."""
    adds, removes, changes = batch.added_counts, batch.removed_counts, batch.changes
    firsts = batch.rows["first"]
    if (
        int(adds.sum()) != len(batch.added)
        or int(removes.sum()) != len(batch.removed)
        or (adds + removes > changes).any()
        or (changes > MOST_CHANGES).any()
        or (firsts == 0).any()
        or (firsts > _MOST_SEQUENCE - MOST_CHANGES).any()
    ):
        raise Corrupt("a batch of changes has counts that cannot be")
    if len(batch) > MOST_OF_ORIGIN and int(np.bincount(batch.stores).max()) > MOST_OF_ORIGIN:
        raise Corrupt(f"a batch of changes has more than {MOST_OF_ORIGIN} rows of one origin")
    if not (_is_ascending(batch.added, adds) and _is_ascending(batch.removed, removes)):
        raise Corrupt("fingerprints of a batch of changes are not in order")


def _is_ascending(fingerprints: U64, counts: Lines) -> bool:
    """Returns whether those of each row are in ascending order, none of them twice."""
    falls = fingerprints[1:] <= fingerprints[:-1]
    ends = counts.cumsum()[:-1]
    begins = ends[(ends > 0) & (ends < len(fingerprints))]
    falls[begins - 1] = False
    return not falls.any()


def _octets(fingerprints: U64) -> bytes:
    return fingerprints.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :_OCTETS].tobytes()


def _fingerprints(data: bytes, count: int, offset: int) -> U64:
    octets = np.zeros((count, 8), np.uint8)
    octets[:, :_OCTETS] = np.frombuffer(data, np.uint8, count * _OCTETS, offset).reshape(
        -1, _OCTETS
    )
    return octets.view("<u8").reshape(-1).astype(np.uint64, copy=False)
