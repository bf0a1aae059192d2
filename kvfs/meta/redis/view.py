"""What one transaction knows of a distant engine, and what it still has to ask for. No I/O.

The core's functions of a transaction are synchronous, and may be run more than once. Here such a
function runs against what is known already; at the first thing that is not, it is left by
`Missing`, the engine fetches that in one round trip, and runs it again. A function thus takes as
many round trips as its longest chain of dependent reads that nobody read before.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from kvfs.meta.gathered_writes import Gathering
from kvfs.meta.redis.known import Known, Missing, Pair, Range, Writes
from kvfs.meta.redis.sharding import REGISTER, TOP, Layout, Piece, one_piece, pieces, unpack_shards

_FIRST_LIMIT: Final = 64
_MAX_LIMIT: Final = 4_096
_AHEAD: Final = 32
"""Shards of one range that are asked at once."""


class View(Gathering):
    """A transaction: what is known, with its own writes over it.

    `reads` and `scanned` are what a commit has to find unchanged.
    """

    def __init__(self, known: Known, *, writable: bool, below: Writes | None = None) -> None:
        """`below`: writes of transactions that are to be committed together with this one, before
        it."""
        super().__init__(writable=writable)
        self._known = known
        self._below = below or {}
        self.reads: set[bytes] = set()
        self.leans: set[bytes] = set()
        """Keys read as those before it wrote them."""
        self.scanned: list[tuple[bytes, bytes]] = []
        """Ranges read, each to the end of what was read of it, in one shard."""

    def shards(self) -> set[int]:
        """All that it read or wrote."""
        of = self._known.layout.shard_of
        if self._known.layout is Layout.SINGLE:
            return {TOP}
        return {
            *map(of, self.reads),
            *map(of, self.leans),
            *map(of, self.writes),
            *(of(start) for start, _ in self.scanned),
        }

    def image(self) -> list[object]:
        """What it read, to compare with another run."""
        values = sorted((key, self._known.get(key)) for key in self.reads)
        return [values, [(*each, self._known.between(*each)) for each in self.scanned]]

    def get(self, key: bytes, /) -> bytes | None:
        if key in self.writes:
            return self.writes[key]
        if key in self._below:
            self.leans.add(key)
            return self._below[key]
        self.reads.add(key)
        return self._known.get(key)

    def get_many(self, keys: Sequence[bytes], /) -> list[bytes | None]:
        own, below = self.writes, self._below
        if not own and not below:
            self.reads.update(keys)
            try:
                return list(map(self._known.values.__getitem__, keys))
            except KeyError:
                pass
        unknown = self._known.unknown(key for key in keys if key not in own and key not in below)
        if unknown:
            raise Missing(dict.fromkeys(unknown))
        return [self.get(key) for key in keys]

    def scan(self, start: bytes, end: bytes, /) -> Iterator[Pair]:
        if start >= end:
            return
        piece = one_piece(self._known.layout, start, end)
        if piece is not None:
            yield from self._scan_piece(piece, [])
            return
        parts = list(pieces(start, end, unpack_shards(self.get(REGISTER))))
        for number, part in enumerate(parts):
            yield from self._scan_piece(part, parts[number + 1 : number + _AHEAD])

    def scan_keys(self, start: bytes, end: bytes, /) -> Iterator[bytes]:
        return (key for key, _ in self.scan(start, end))

    def _scan_piece(self, piece: Piece, next_ones: Sequence[Piece]) -> Iterator[Pair]:
        _, position, end = piece
        written = {
            key: value
            for writes in (self._below, self.writes)
            for key, value in writes.items()
            if position <= key < end
        }
        own = sorted(written)
        taken = 0
        record = len(self.scanned)
        self.scanned.append((position, position))
        limit = _FIRST_LIMIT
        while position < end:
            span = self._known.span_of(position)
            if span is None:
                raise self._missing(Range(position, end, limit), next_ones)
            limit = min(limit + len(span.pairs), _MAX_LIMIT)
            until = min(span.end, end)
            for key, value in span.within(position, until):
                while taken < len(own) and own[taken] < key:
                    yield from _present(own[taken], written)
                    taken += 1
                self._read_to(record, key + b"\0")
                if key in written:
                    taken += 1
                    yield from _present(key, written)
                else:
                    yield key, value
            while taken < len(own) and own[taken] < until:
                self._read_to(record, own[taken] + b"\0")
                yield from _present(own[taken], written)
                taken += 1
            self._read_to(record, until)
            position = until

    def _read_to(self, record: int, end: bytes) -> None:
        self.scanned[record] = (self.scanned[record][0], end)

    def _missing(self, first: Range, next_ones: Sequence[Piece]) -> Missing:
        """Nothing is known there, nor perhaps in the shards that follow."""
        ahead = [
            Range(each.start, each.end, _FIRST_LIMIT)
            for each in next_ones
            if self._known.span_of(each.start) is None
        ]
        return Missing(ranges=[first, *ahead])


def _present(key: bytes, written: Writes) -> Iterator[Pair]:
    value = written[key]
    if value is not None:
        yield key, value
