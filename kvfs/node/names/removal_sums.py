"""Sums by which nodes compare the removals that they know, and their wire form: a thousand come
each second, so they are a table. Pure. Little-endian, checksummed:

| bytes | |
|---|---|
| 4 | `KVR1` |
| 20 each | teller (2), origin (2), hour since 1970 (4), removals (4), sum (8) |
| 8 | xxh3-64 of all before |
"""

import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

import xxhash

from kvfs.base.errors import Corrupt
from kvfs.node.names.tombstones import HOUR_NS

_MAGIC: Final = b"KVR1"
_ROW: Final = struct.Struct("<HHIIQ")
_CHECK: Final = struct.Struct("<Q")


class RemovalSum(NamedTuple):
    """The removals of a node from an hour on, as another one or it itself knows them, in
    numbers."""

    teller: int
    origin: int
    hour: int
    removals: int
    sum: int

    @property
    def since_ns(self) -> int:
        return self.hour * HOUR_NS


def pack(told: RemovalSum) -> bytes:
    """Returns a row of the table."""
    return _ROW.pack(*told)


def encode(rows: Iterable[bytes]) -> bytes:
    """Returns a table of packed rows."""
    whole = _MAGIC + b"".join(rows)
    return whole + _CHECK.pack(xxhash.xxh3_64_intdigest(whole))


def decode(data: bytes) -> list[RemovalSum]:
    """Returns the rows of a table. Raises Corrupt."""
    rows = memoryview(data)[len(_MAGIC) : -_CHECK.size]
    if data[: len(_MAGIC)] != _MAGIC or len(rows) % _ROW.size or len(data) < 12:
        raise Corrupt("this is no table of removals that this node understands")
    if _CHECK.pack(xxhash.xxh3_64_intdigest(data[: -_CHECK.size])) != data[-_CHECK.size :]:
        raise Corrupt("a table of removals is damaged")
    return [RemovalSum(*row) for row in _ROW.iter_unpack(rows)]
