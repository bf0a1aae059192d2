"""The node's own index of its data files: chunk checksums, the space that they take of its disk,
and the order in which they were last used.

| key | value |
|---|---|
| `f` inode (8) | Entry |
| `l` namespace id (2) clock (8) inode (8) | empty: coldest first within a namespace |
| `n` | inode (8): the scrubber looks at this one next |
| `s` namespace id (2) | 512 x the blocks of all its entries (8) |

Invariants
- An entry has exactly one `l` key, that of its clock, and is in the sum of its namespace; they
  change in one transaction.
- `touch` and `add` are gathered in memory and written in batches: an open must not cost a commit. A
  kill loses at most those: an access clock, or the entry of a file that is not sealed, which the
  sealer adds again.
- `store` and `remove` have survived a kill when they return, as far as the engine's commits do.
- This module knows no names, and not whether a file may be evicted.
"""

import logging
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeVar

import msgspec
import trio

from kvfs.base.errors import KvfsError
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import NAMESPACE_SHIFT, namespace_of

log = logging.getLogger(__name__)
T = TypeVar("T")
NAME: Final = b"\xffindex"
"""The name of the database within the embedded engine's file."""
_BATCH: Final = 256
"""Changes written in one transaction: about 2 ms on the event loop."""
_GATHERED_LIMIT: Final = 8192
_PAGE: Final = 1024
_FLUSH_PERIOD_S: Final = 1.0
_SCRUBBING: Final = b"n"
_order = struct.Struct(">cHQQ")


class Table(Protocol):
    """An ordered map of this node: a database of the embedded engine, or the model in memory."""

    def read_now(self, fn: Callable[[Transaction], T]) -> T:
        """Runs `fn` on a read-only view, at once."""

    def transact_now(self, fn: Callable[[Transaction], T]) -> T:
        """Runs `fn` and commits, at once."""


class IndexEntry(msgspec.Struct, array_like=True, kw_only=True):
    """The node's knowledge of one data file (msgpack array; fields are only ever appended)."""

    version: int
    clock: int
    """Time of the last use, in nanoseconds since the epoch."""
    chunks: bytes = b""
    """The xxh3-128 of each chunk, one after the other; empty until sealed."""
    blocks: int = 0
    """Blocks that it takes of the disk, of 512 bytes each, when it was published, sealed or
    fetched."""


class Sealed(NamedTuple):
    """The facts about a sealed data file that `Index.store` takes."""

    ino: int
    version: int
    chunks: bytes
    blocks: int


class _Added(NamedTuple):
    """A file that was published, and is not written yet."""

    version: int
    blocks: int


_BLOCK: Final = 512
_sum = struct.Struct(">q")
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(IndexEntry).decode


class Index:
    """Chunk checksums, space and access order of the files of one node. For the event loop only."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._touched: dict[int, int] = {}
        self._added: dict[int, _Added] = {}

    def touch(self, ino: int) -> None:
        """Notes that the file was just used. Does nothing for a file that is not in the index."""
        self._touched[ino] = time.time_ns()
        if len(self._touched) >= _GATHERED_LIMIT:
            self._flush_or_forget()

    def add(self, ino: int, version: int, blocks: int = 0) -> None:
        """Gives a published file a place in the access order."""
        self._added[ino] = _Added(version, blocks)
        self._touched[ino] = time.time_ns()
        if len(self._touched) >= _GATHERED_LIMIT:
            self._flush_or_forget()

    def add_missing(self, ino: int, version: int, blocks: int = 0) -> None:
        """Like `add`, for a file that may be in the index already: then its place stays."""
        entry = self.get(ino)
        if ino not in self._added and (entry is None or entry.version != version):
            self.add(ino, version, blocks)

    def store(self, sealed: Iterable[Sealed]) -> None:
        """Stores files that were sealed, or came whole from another node."""
        now, stored = time.time_ns(), list(sealed)

        def fn(t: Transaction) -> None:
            sums = _Sums()
            for ino, version, chunks, blocks in stored:
                old = _get(t, ino)
                clock = old.clock if old else self._touched.get(ino, now)
                new = IndexEntry(version=version, clock=clock, chunks=chunks, blocks=blocks)
                _replace(t, ino, old, new, sums)
            sums.write(t)

        self._table.transact_now(fn)
        for ino, version, _, _ in stored:
            added = self._added.get(ino)
            if added is not None and added.version == version:
                del self._added[ino]

    def used_bytes(self) -> dict[int, int]:
        """Returns the bytes of this node's disk that the data files of each namespace take. A file
        whose content was replaced in the last second may count twice."""
        used = self._table.read_now(_all_sums)
        for ino, added in self._added.items():
            namespace_id = ino >> NAMESPACE_SHIFT
            used[namespace_id] = used.get(namespace_id, 0) + added.blocks * _BLOCK
        return used

    def get(self, ino: int) -> IndexEntry | None:
        """Returns the entry of the file, as last written."""
        return self._table.read_now(lambda t: _get(t, ino))

    def get_many(self, inos: Sequence[int]) -> list[IndexEntry | None]:
        """Does `get` for each, in one transaction."""
        return self._table.read_now(lambda t: [_get(t, ino) for ino in inos])

    def has(self, ino: int, version: int) -> bool:
        """Returns whether its entry of the file is of this version, written or not."""
        known = self._added.get(ino) or self.get(ino)
        return known is not None and known.version == version

    def remove(self, inos: Iterable[int]) -> None:
        """Removes files that have gone. Call it before their records are dropped: a kill between
        leaves records, which are found again, and not index entries, which are not."""
        gone = list(inos)
        for ino in gone:
            self._touched.pop(ino, None)
            self._added.pop(ino, None)

        def fn(t: Transaction) -> None:
            sums = _Sums()
            for ino in gone:
                old = _get(t, ino)
                if old is not None:
                    sums.add(ino, -old.blocks)
                    t.delete(_order_key(ino, old.clock))
                    t.delete(b"f" + keys.pack_u64(ino))
            sums.write(t)

        self._table.transact_now(fn)

    def coldest(self, namespace_id: int, limit: int) -> list[tuple[int, int]]:
        """Returns (clock, inode) of the files of a namespace used longest ago, at most `limit`,
        coldest first."""
        found = self._coldest(namespace_id, limit)
        if len(found) < limit and self._touched:
            self.flush(_BATCH)
            found = self._coldest(namespace_id, limit)
        return found

    def _coldest(self, namespace_id: int, limit: int) -> list[tuple[int, int]]:
        prefix = b"l" + namespace_id.to_bytes(2, "big")

        def fn(t: Transaction) -> list[tuple[int, int]]:
            found: list[tuple[int, int]] = []
            for key, _ in t.scan(prefix, keys.after(prefix)):
                _, _, clock, ino = _order.unpack(key)
                if ino not in self._touched:  # else it stands here by a clock that is outdated
                    found.append((clock, ino))
                if len(found) == limit:
                    break
            return found

        return self._table.read_now(fn)

    def flush(self, limit: int | None = None) -> None:
        """Writes the gathered changes, the oldest first, at most `limit` files."""
        batch = list(self._touched.items())[:limit]
        if not batch:
            return

        def fn(t: Transaction) -> None:
            sums = _Sums()
            for ino, clock in batch:
                _touch(t, ino, clock, self._added.get(ino), sums)
            sums.write(t)

        self._table.transact_now(fn)
        for ino, _ in batch:
            del self._touched[ino]
            self._added.pop(ino, None)

    async def run(self) -> None:
        """Writes the gathered changes every second, until cancelled."""
        while True:
            await trio.sleep(_FLUSH_PERIOD_S)
            for _ in range(0, len(self._touched), _BATCH):
                self._flush_or_forget()
                await trio.lowlevel.checkpoint()

    def _flush_or_forget(self) -> None:
        """Writes one batch, or forgets it if the engine cannot (a full disk): clocks are worth no
        failed open."""
        try:
            self.flush(_BATCH)
        except KvfsError as error:
            log.warning("access times of files are lost: %s", error)
            for ino in list(self._touched)[:_BATCH]:
                del self._touched[ino]
                self._added.pop(ino, None)

    def entries(self, start: int = 0, limit: int = _PAGE) -> list[tuple[int, IndexEntry]]:
        """Returns (inode, entry) in ascending order from inode `start`, at most `limit`."""
        first = b"f" + keys.pack_u64(start)

        def fn(t: Transaction) -> list[tuple[int, IndexEntry]]:
            found: list[tuple[int, IndexEntry]] = []
            for key, value in t.scan(first, b"g"):
                if len(found) == limit:
                    break
                found.append((keys.unpack_u64(key, 1), _unpack(value)))
            return found

        return self._table.read_now(fn)

    def scrubbing_from(self) -> int:
        """Returns the point where the scrubber goes on: the least inode that it has not
        examined."""
        value = self._table.read_now(lambda t: t.get(_SCRUBBING))
        return keys.unpack_u64(value) if value else 0

    def scrub_from(self, ino: int) -> None:
        """Records where the scrubber is to go on after a restart."""
        self._table.transact_now(lambda t: t.put(_SCRUBBING, keys.pack_u64(ino)))

    def disorder(self) -> Iterator[tuple[int, int]]:
        """Yields (clock, inode) of `l` keys whose entry is missing or has another clock: read page
        by page for `fsck`."""
        start = b"l"
        while start:
            start, wrong = self._table.read_now(partial(_wrong_order, start=start))
            yield from wrong

    def unordered(self, ino: int, entry: IndexEntry) -> bool:
        """Returns whether the entry lacks its place in the access order."""
        return self._table.read_now(lambda t: t.get(_order_key(ino, entry.clock)) is None)

    def restore_order(self, ino: int, clock: int) -> None:
        """Repairs the order: drops a wrong `l` key and gives the entry, if there is one, its
        own."""

        def fn(t: Transaction) -> None:
            t.delete(_order_key(ino, clock))
            entry = _get(t, ino)
            if entry is not None:
                t.put(_order_key(ino, entry.clock), b"")

        self._table.transact_now(fn)


def _order_key(ino: int, clock: int) -> bytes:
    return _order.pack(b"l", namespace_of(ino), clock, ino)


def _get(t: Transaction, ino: int) -> IndexEntry | None:
    value = t.get(b"f" + keys.pack_u64(ino))
    return None if value is None else _unpack(value)


class _Sums:
    """The changes that one transaction makes to the sums of namespaces."""

    def __init__(self) -> None:
        self._blocks: dict[int, int] = {}

    def add(self, ino: int, blocks: int) -> None:
        if blocks:
            namespace_id = namespace_of(ino)
            self._blocks[namespace_id] = self._blocks.get(namespace_id, 0) + blocks

    def write(self, t: Transaction) -> None:
        for namespace_id, blocks in self._blocks.items():
            total = _get_sum(t, namespace_id) + blocks * _BLOCK
            t.put(_sum_key(namespace_id), _sum.pack(total))


def _sum_key(namespace_id: int) -> bytes:
    return b"s" + namespace_id.to_bytes(2, "big")


def _get_sum(t: Transaction, namespace_id: int) -> int:
    value = t.get(_sum_key(namespace_id))
    return 0 if value is None else int(_sum.unpack(value)[0])


def _all_sums(t: Transaction) -> dict[int, int]:
    return {
        int.from_bytes(key[1:], "big"): int(_sum.unpack(value)[0])
        for key, value in t.scan(b"s", b"t")
    }


def _replace(
    t: Transaction, ino: int, old: IndexEntry | None, new: IndexEntry, sums: _Sums
) -> None:
    if old is not None and old.clock != new.clock:
        t.delete(_order_key(ino, old.clock))
    if old is None or old.clock != new.clock:
        t.put(_order_key(ino, new.clock), b"")
    sums.add(ino, new.blocks - (old.blocks if old else 0))
    t.put(b"f" + keys.pack_u64(ino), _pack(new))


def _touch(t: Transaction, ino: int, clock: int, added: _Added | None, sums: _Sums) -> None:
    old = _get(t, ino)
    if added is None:
        if old is not None:
            _replace(t, ino, old, msgspec.structs.replace(old, clock=clock), sums)
        return
    chunks = old.chunks if old is not None and old.version == added.version else b""
    new = IndexEntry(version=added.version, clock=clock, chunks=chunks, blocks=added.blocks)
    _replace(t, ino, old, new, sums)


def _wrong_order(t: Transaction, start: bytes) -> tuple[bytes, list[tuple[int, int]]]:
    """Returns the wrong keys of one page, and the beginning of the next (empty: none)."""
    wrong: list[tuple[int, int]] = []
    for read, (key, _) in enumerate(t.scan(start, b"m")):
        if read == _PAGE:
            return key, wrong
        _, namespace_id, clock, ino = _order.unpack(key)
        entry = _get(t, ino)
        if entry is None or entry.clock != clock or namespace_id != namespace_of(ino):
            wrong.append((clock, ino))
    return b"", wrong
