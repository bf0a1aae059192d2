"""The wire form of `messages` of one origin, by which it answers questions: little-endian,
versioned, checksummed. Pure.

| bytes | |
|---|---|
| 4 | `KVHD` |
| 1, 1, 2 | version, kind, flags |
| 8, 8, 8 | store, epoch, sequence number: the first, the one after which, or 0 |
| body | of its kind |
| 8 | xxh3-64 of all before |

A set of fingerprints is their number (4 bytes), the width of a gap (1) and the gaps between them in
ascending order, so a random fingerprint takes 6 bytes and one of a range 3 to 5. The bodies:

| kind | body |
|---|---|
| deltas | how many changes (4), digest (8, flag 1: it is known), the added, the removed |
| checksums | 1,024 sums (8 each) |
| range contents | range (2), the set, each without its 10 low bits |
| ask | (flag 1: for changes), how many ranges (2), each of them (2), ascending |

Whatever comes is believed by its checksum alone as to damage, and as to its counts not at all: each
is compared with the bytes that are there before memory is taken.
"""

import struct
from typing import Final

import numpy as np
import xxhash

from kvfs.base.errors import Corrupt, TooLarge
from kvfs.holdings.fingerprints import BITS, NONE, RANGES, U64
from kvfs.holdings.messages import Checksums, Deltas, HoldingsAsk, Message, RangeContents

VERSION: Final = 1
MOST_CHANGES: Final = 1 << 13
"""Changes of one message."""
MOST_IN_RANGE: Final = 1 << 18
"""Fingerprints of a range."""
_MAGIC: Final = b"KVHD"
_HEAD: Final = struct.Struct("<4sBBHQQQ")
_CHECK: Final = struct.Struct("<Q")
_SET: Final = struct.Struct("<IB")
_DELTAS: Final = struct.Struct("<IQ")
_NUMBER: Final = struct.Struct("<H")
_KINDS: Final = (Deltas, Checksums, RangeContents, HoldingsAsk)
_KNOWN: Final = 1
"""Flag: the digest is known; of an ask: it is for changes."""
_RANGE_BITS: Final = RANGES.bit_length() - 1
_MOST_WIDTH: Final = BITS // 8
_MOST_SEQUENCE: Final = (1 << BITS) - 1
MOST_BYTES: Final = _HEAD.size + _NUMBER.size + _SET.size + 5 * MOST_IN_RANGE + _CHECK.size
"""Size of the longest message."""
assert _HEAD.size + _DELTAS.size + 2 * _SET.size + 6 * MOST_CHANGES + _CHECK.size <= MOST_BYTES


def encode(message: Message) -> bytes:
    """Returns the wire form. Raises TooLarge if it has more than a message may have."""
    flags, number, body = _body_of(message)
    head = _HEAD.pack(
        _MAGIC, VERSION, _KINDS.index(type(message)), flags, message.store, message.epoch, number
    )
    packed = head + body
    return packed + _CHECK.pack(xxhash.xxh3_64_intdigest(packed))


def decode(data: bytes | memoryview) -> Message:
    """Returns the message. Raises Corrupt: it is damaged, cut short, of another version, or no
    message that `encode` makes."""
    view = memoryview(data)
    if not _HEAD.size + _CHECK.size <= len(view) <= MOST_BYTES:
        raise Corrupt(f"a message about holdings has {len(view)} bytes")
    magic, version, kind, flags, store, epoch, number = _HEAD.unpack_from(view)
    if magic != _MAGIC or version != VERSION:
        raise Corrupt(f"no message about holdings of version {VERSION}, which this node speaks")
    packed, body = view[: -_CHECK.size], _Body(view[_HEAD.size : -_CHECK.size])
    if (xxhash.xxh3_64_intdigest(packed),) != _CHECK.unpack(view[-_CHECK.size :]):
        raise Corrupt("a message about holdings is damaged")
    if kind >= len(_KINDS) or flags > _KNOWN or number > _MOST_SEQUENCE:
        raise Corrupt("a message about holdings is of no known kind")
    message = _DECODERS[kind](body, store, epoch, number, bool(flags))
    body.end()
    return message


def _body_of(message: Message) -> tuple[int, int, bytes]:
    """Returns flags, sequence number and body."""
    if isinstance(message, Deltas):
        changes = message.last - message.first + 1
        if changes > MOST_CHANGES:
            raise TooLarge(f"{changes} changes in a message, not up to {MOST_CHANGES}")
        is_known = message.digest is not None
        fields = _DELTAS.pack(changes, message.digest or 0)
        body = fields + _packed(message.added) + _packed(message.removed)
        return is_known * _KNOWN, message.first, body
    if isinstance(message, Checksums):
        return 0, message.sequence, message.sums.astype("<u8").tobytes()
    if isinstance(message, RangeContents):
        if len(message.fingerprints) > MOST_IN_RANGE:
            raise TooLarge(f"{len(message.fingerprints)} fingerprints in a range")
        upper = message.fingerprints >> np.uint64(_RANGE_BITS)
        return 0, message.sequence, _NUMBER.pack(message.range_) + _packed(upper)
    ranges = np.array(message.ranges, "<u2").tobytes()
    is_since = message.since is not None
    return is_since * _KNOWN, message.since or 0, _NUMBER.pack(len(message.ranges)) + ranges


def _packed(ascending: U64) -> bytes:
    if not len(ascending):
        return _SET.pack(0, 0)
    gaps = np.diff(ascending, prepend=np.uint64(0))
    width = max(1, (int(gaps.max()).bit_length() + 7) // 8)
    octets = gaps.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width]
    return _SET.pack(len(ascending), width) + octets.tobytes()


class _Body:
    """The unread rest of a body. Raises Corrupt if it is less than it should be, or more."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def take(self, size: int) -> memoryview:
        if size > len(self._view):
            raise Corrupt("a message about holdings is shorter than it says")
        taken, self._view = self._view[:size], self._view[size:]
        return taken

    def numbers(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.take(layout.size))

    def ascending(self, most: int, bits: int) -> U64:
        """Reads a set of up to `most` values below 2**bits."""
        count, width = self.numbers(_SET)
        if count > most or width > _MOST_WIDTH or (width == 0) != (count == 0):
            raise Corrupt(f"a message about holdings says that it has {count} fingerprints")
        if not count:
            return NONE
        packed = np.frombuffer(self.take(count * width), np.uint8)
        octets = np.zeros((count, 8), np.uint8)
        octets[:, :width] = packed.reshape(-1, width)
        gaps = octets.view("<u8").reshape(-1).astype(np.uint64, copy=False)
        values: U64 = gaps.cumsum(dtype=np.uint64)
        # Gaps are below 2**48, so a sum that overflows has passed through what is over the limit.
        if int(values.max()) >> bits or not gaps[1:].all():
            raise Corrupt("fingerprints of a message are not in order")
        return values

    def end(self) -> None:
        if len(self._view):
            raise Corrupt("a message about holdings is longer than it says")


def _deltas(body: _Body, store: int, epoch: int, first: int, is_known: bool) -> Message:
    changes, digest = body.numbers(_DELTAS)
    if changes > MOST_CHANGES or first == 0 or first + changes > _MOST_SEQUENCE:
        raise Corrupt(f"a message about holdings says that it has {changes} changes")
    added = body.ascending(changes, BITS)
    removed = body.ascending(changes - len(added), BITS)
    if len(np.intersect1d(added, removed, assume_unique=True)):
        raise Corrupt("a message adds and removes the same fingerprint")
    last = first + changes - 1
    return Deltas(store, epoch, first, last, added, removed, digest if is_known else None)


def _checksums(body: _Body, store: int, epoch: int, sequence: int, _: bool) -> Message:
    sums = np.frombuffer(body.take(8 * RANGES), "<u8").astype(np.uint64)
    return Checksums(store, epoch, sequence, sums)


def _range_contents(body: _Body, store: int, epoch: int, sequence: int, _: bool) -> Message:
    (range_,) = body.numbers(_NUMBER)
    if range_ >= RANGES:
        raise Corrupt(f"there is no range {range_}")
    upper = body.ascending(MOST_IN_RANGE, BITS - _RANGE_BITS)
    fingerprints = upper << np.uint64(_RANGE_BITS) | np.uint64(range_)
    return RangeContents(store, epoch, sequence, range_, fingerprints)


def _ask(body: _Body, store: int, epoch: int, since: int, is_since: bool) -> Message:
    (count,) = body.numbers(_NUMBER)
    if count > RANGES or (is_since and count) or (since and not is_since):
        raise Corrupt(f"a node asks for {count} ranges")
    ranges = np.frombuffer(body.take(2 * count), "<u2").tolist()
    if ranges != sorted(set(ranges)) or (ranges and ranges[-1] >= RANGES):
        raise Corrupt("a node asks for ranges that there are not")
    return HoldingsAsk(store, epoch, since if is_since else None, tuple(ranges))


_DECODERS: Final = (_deltas, _checksums, _range_contents, _ask)
