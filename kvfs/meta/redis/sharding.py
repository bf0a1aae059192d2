"""Which shard a key belongs to. No I/O.

On a cluster each namespace is a shard: its Redis keys share a hash tag, so one server holds all of
it. Shard 0 holds the root, users, notices, and the register of shards. A single server has one
shard for everything, so that each transaction there is one commit.

Every class of keys that belongs to a namespace names it in its second and third byte: as its id, or
as the high bits of an inode number (`kvfs.meta.keys`). So a shard's keys of one class lie together,
and a range that covers several shards is their ranges one after the other.
"""

from collections.abc import Collection, Iterator, Sequence
from enum import Enum
from itertools import groupby
from typing import Final, NamedTuple

from kvfs.meta import keys

TOP: Final = 0
"""The shard of all that belongs to no namespace."""
REGISTER: Final = b"\xffshards"
"""The key, in TOP, of the shards that were ever written, two bytes each; no scan reaches it."""
_OF_NAMESPACES: Final = frozenset(b"".join(keys.OF_NAMESPACES))
_LAST: Final = 0xFFFF


class Layout(Enum):
    """How keys are spread."""

    SINGLE = "single"
    """All in one shard."""
    NAMESPACES = "namespaces"
    """A shard for each namespace."""

    def shard_of(self, key: bytes) -> int:
        """The shard of a key."""
        if self is Layout.SINGLE or not key or key[0] not in _OF_NAMESPACES:
            return TOP
        return int.from_bytes(key[1:3].ljust(2, b"\0"))

    def split(self, keys: Collection[bytes]) -> dict[int, Collection[bytes]]:
        """The keys of each shard."""
        if self is Layout.SINGLE:
            return {TOP: keys} if keys else {}
        found: dict[int, Collection[bytes]] = {}
        for shard, group in groupby(sorted(keys, key=self.shard_of), self.shard_of):
            found[shard] = list(group)
        return found


class Piece(NamedTuple):
    """A part of a range that lies in one shard."""

    shard: int
    start: bytes
    end: bytes


def one_piece(layout: Layout, start: bytes, end: bytes) -> Piece | None:
    """The range as one piece; None where it may cover several shards."""
    if layout is Layout.SINGLE:
        return Piece(TOP, start, end)
    shard = layout.shard_of(start)
    if start and end <= _upper(start[0], shard):
        return Piece(shard, start, end)
    return None


def pieces(start: bytes, end: bytes, shards: Sequence[int]) -> Iterator[Piece]:
    """A range of a layout of NAMESPACES in its order; `shards` are those there are, ascending."""
    last = min(end[0] if end else 0, REGISTER[0] - 1)
    for kind in range(start[0] if start else 0, last + 1):
        for shard in shards if kind in _OF_NAMESPACES else (TOP,):
            low, high = max(start, _lower(kind, shard)), min(end, _upper(kind, shard))
            if low < high:
                yield Piece(shard, low, high)


def pack_shards(shards: Sequence[int]) -> bytes:
    """The value of REGISTER."""
    return b"".join(shard.to_bytes(2) for shard in sorted(shards))


def unpack_shards(value: bytes | None) -> list[int]:
    """The shards in a value of REGISTER, TOP always."""
    found = memoryview(value or b"")
    numbers = {int.from_bytes(found[at : at + 2]) for at in range(0, len(found), 2)}
    return sorted(numbers | {TOP})


def _lower(kind: int, shard: int) -> bytes:
    """The least key of a class in a shard."""
    if kind not in _OF_NAMESPACES:
        return bytes([kind])
    return bytes([kind]) + shard.to_bytes(2).rstrip(b"\0")


def _upper(kind: int, shard: int) -> bytes:
    """The least key behind those of a class in a shard."""
    if kind not in _OF_NAMESPACES or shard == _LAST:
        return bytes([kind + 1])
    return _lower(kind, shard + 1)
