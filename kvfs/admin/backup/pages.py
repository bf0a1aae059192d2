"""Sorted keys and values, cut into pages whose names are digests of their content.

A page ends at a key that its own digest chooses, so that a change of one key changes one page, or
two, wherever it is: two backups share the pages of all that did not change between them, and what
was removed is simply not there. No key is compared with those of an earlier backup.
"""

import hashlib
import zlib
from collections.abc import Callable, Iterator
from typing import Final

import msgspec
import xxhash

from kvfs.admin.backup.manifest import SortedTable
from kvfs.admin.backup.repository import MOST_BYTES, Repository
from kvfs.base.errors import UNDECODABLE, Corrupt, NotFound

Pair = tuple[bytes, bytes]
PageSink = Callable[[str, bytes], None]
"""Takes the name and the content of a page."""
_CUT: Final = 0x3FF
"""A page ends at one key of 1,024."""
_MOST_KEYS: Final = 8_192
_MOST_BYTES: Final = 4 << 20
_LEVEL: Final = 1
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(list[bytes]).decode
_hash: Final = xxhash.xxh3_64_intdigest


class TableWriter:
    """Makes the pages of one table; `add` is called in the order of the keys."""

    def __init__(self, sink: PageSink) -> None:
        self.table = SortedTable()
        self._sink = sink
        self._page: list[bytes] = []
        self._size = 0

    def add(self, key: bytes, value: bytes) -> None:
        self._page += (key, value)
        self._size += len(key) + len(value)
        if not _hash(key) & _CUT or self._size >= _MOST_BYTES or len(self._page) >= 2 * _MOST_KEYS:
            self._cut()

    def finish(self) -> SortedTable:
        """Returns the table: all pages were given to the sink."""
        if self._page:
            self._cut()
        return self.table

    def _cut(self) -> None:
        packed = _encode(self._page)
        name = digest(packed)
        self.table.pages.append(name)
        self.table.entries += len(self._page) // 2
        self._page, self._size = [], 0
        self._sink(name, zlib.compress(packed, _LEVEL))


def digest(content: bytes) -> str:
    """Returns the name of a content."""
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def object_of(page: str) -> str:
    """Returns the name of a page's object."""
    return f"pages/{page}"


def rows(repository: Repository, table: SortedTable) -> Iterator[Pair]:
    """Yields the pairs of a table, in order. Raises Corrupt, which names the page."""
    for page in table.pages:
        found = iter(_read(repository, page))
        yield from zip(found, found, strict=True)


def _read(repository: Repository, page: str) -> list[bytes]:
    where = f"{repository.shown}/{object_of(page)}"
    unpacking = zlib.decompressobj()
    try:
        packed = unpacking.decompress(repository.get(object_of(page)), MOST_BYTES)
    except NotFound:
        raise Corrupt(f"the backup is damaged: {where} is missing") from None
    except zlib.error:
        raise Corrupt(f"the backup is damaged: {where} cannot be read") from None
    if digest(packed) != page:
        raise Corrupt(f"the backup is damaged: {where} is not what it was")
    try:
        found = _decode(packed)
    except UNDECODABLE:
        raise Corrupt(f"the backup is damaged: {where} cannot be read") from None
    if len(found) % 2:
        raise Corrupt(f"the backup is damaged: {where} cannot be read")
    return found
