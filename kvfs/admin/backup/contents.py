"""The contents of files in a backup: which there are, and how new ones get there.

The table of contents is sorted as the records of inodes are, so that the contents that an earlier
backup has are found by reading both once, side by side: nothing is held in memory.

| content | lies in |
|---|---|
| up to 4 MiB | a pack of 16 MiB or more, at an offset |
| larger | an object of its own |

A content is named by inode number, version and checksum, as in the cold tier. It is compared with
its checksum before it counts; a restore compares it again.

| a kill after | leaves |
|---|---|
| a pack was put | an object that nobody knows; the same files make the same pack again |
| what it holds was put | the contents, which the next `create` finds |
| a large content was put | the same |
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final, NamedTuple, TypeVar

import msgspec
import xxhash

from kvfs.admin.backup.manifest import is_digest
from kvfs.admin.backup.pages import TableWriter, digest
from kvfs.admin.backup.repository import Repository
from kvfs.admin.backup.selection import WantedContent
from kvfs.base.descriptors import closing
from kvfs.base.errors import UNDECODABLE, Corrupt
from kvfs.datastore.checksum import CHUNK_BYTES, checksum, combine
from kvfs.meta import keys

T = TypeVar("T")
LARGE_BYTES: Final = CHUNK_BYTES
"""Contents above this have an object of their own; one chunk, so that its checksum is one."""
SHOWN: Final = 10
"""Files that are named."""
_PACK_BYTES: Final = 16 << 20
_MOST_WAITING: Final = 50_000
"""Rows that wait for the name of a pack."""
_BEGUN: Final = "begun"
_KEY_BYTES: Final = 16
"""Inode number and version; the checksum follows."""
Opened = Callable[[WantedContent], int | None]
"""Returns a descriptor of a content; None: it cannot be had."""


class StoredContent(msgspec.Struct, array_like=True):
    """The place of a content."""

    size: int
    pack: str = ""
    """The pack; empty: it has an object of its own."""
    offset: int = 0


class _Row(NamedTuple):
    key: bytes
    stored: StoredContent


_pack: Final = msgspec.msgpack.Encoder().encode
_unpack: Final = msgspec.msgpack.Decoder(StoredContent).decode
_unpack_begun: Final = msgspec.msgpack.Decoder(dict[bytes, StoredContent]).decode


class ContentCounts(msgspec.Struct):
    """The result of a pass over all contents."""

    files: int = 0
    bytes: int = 0
    large: int = 0
    added_bytes: int = 0
    in_cold_tier: int = 0
    left_out: list[int] = []
    """The first inode numbers whose content could not be had, or was not what its record says."""
    left_out_files: int = 0


class ContentWriter:
    """Puts the contents that a place does not have, and writes the table of all."""

    def __init__(self, repository: Repository, table: TableWriter, opened: Opened) -> None:
        self.counts = ContentCounts()
        self.packs: set[str] = set()
        self._repository = repository
        self._table = table
        self._opened = opened
        self._rows: deque[_Row] = deque()
        self._filling = bytearray()
        self._in_pack: list[_Row] = []

    def run(
        self,
        wanted: Iterable[WantedContent],
        before: Iterator[tuple[bytes, StoredContent]],
        progress: Callable[[int], None],
    ) -> None:
        """Goes through all contents, in order. `before`: those that an earlier backup has, sorted;
        one whose object was removed since counts as none. `progress` is told the bytes that are
        done. Raises what a Repository raises."""
        begun = _BegunContents(self._repository)
        there = {name for kind in ("packs", "large") for name in self._repository.names(kind)}
        known = next(before, None)
        for each in wanted:
            key = key_of(each)
            while known is not None and known[0] < key:
                known = next(before, None)
            found = known[1] if known is not None and known[0] == key else begun.find(key)
            if found is not None and _object_of(each, found) in there:
                self._count(each)
                self._keep(_Row(key, found))
            else:
                self._add(each, key)
            progress(self.counts.bytes)
        self._put_pack()

    def forget_begun(self) -> None:
        """Forgets what a backup under way had noted: it is whole."""
        for name in list(self._repository.names(_BEGUN)):
            self._repository.delete(name)

    def _add(self, each: WantedContent, key: bytes) -> None:
        fd = self._opened(each)
        if fd is None:
            if each.is_cold:
                self.counts.in_cold_tier += 1
            else:
                self._leave_out(each)
            return
        with closing(fd):
            stored = self._put(fd, each) if os.fstat(fd).st_size == each.size else None
        if stored is None:
            self._leave_out(each)
            return
        self._count(each)
        self.counts.added_bytes += each.size
        row = _Row(key, stored)
        if each.size <= LARGE_BYTES:
            self._in_pack.append(row)
        self._keep(row)
        if len(self._filling) >= _PACK_BYTES:
            self._put_pack()

    def _put(self, fd: int, each: WantedContent) -> StoredContent | None:
        """Puts a content, or into the pack under way; None: it is not what its record says."""
        if each.size <= LARGE_BYTES:
            data = os.pread(fd, each.size, 0)
            sums = xxhash.xxh3_128_digest(data) if data else b""
            if len(data) != each.size or combine(sums) != each.checksum:
                return None
            offset = len(self._filling)
            self._filling += data
            return StoredContent(each.size, "", offset)
        name = large_object(each)
        if self._repository.size_of(name) != each.size:
            before = os.fstat(fd)
            sums_of = checksum(fd, each.size)
            if sums_of is None or sums_of.combined != each.checksum:
                return None
            self._repository.put_file(name, fd, each.size)
            if _changed(before, os.fstat(fd)):
                self._repository.delete(name)
                return None
        return StoredContent(each.size)

    def _count(self, each: WantedContent) -> None:
        self.counts.files += 1
        self.counts.bytes += each.size
        self.counts.large += each.size > LARGE_BYTES

    def _leave_out(self, each: WantedContent) -> None:
        self.counts.left_out_files += 1
        if len(self.counts.left_out) < SHOWN:
            self.counts.left_out.append(each.ino)

    def _keep(self, row: _Row) -> None:
        """Writes the row once all rows before it, and its pack, have their names."""
        self._rows.append(row)
        if not self._in_pack:
            self._write_rows()
        elif len(self._rows) >= _MOST_WAITING:
            self._put_pack()

    def _put_pack(self) -> None:
        if self._in_pack:
            content = bytes(self._filling)
            name = digest(content)
            for row in self._in_pack:
                row.stored.pack = name
            self._repository.put(pack_object(name), content)
            noted = {row.key: row.stored for row in self._in_pack}
            self._repository.put(f"{_BEGUN}/{name}", _pack(noted))
            self._filling, self._in_pack = bytearray(), []
        self._write_rows()

    def _write_rows(self) -> None:
        for row in self._rows:
            if row.stored.pack:
                self.packs.add(row.stored.pack)
            self._table.add(row.key, _pack(row.stored))
        self._rows.clear()


def key_of(each: WantedContent) -> bytes:
    """Returns the key of a content in the table."""
    return keys.pack_u64(each.ino) + keys.pack_u64(each.version) + each.checksum


def content_at(key: bytes, stored: StoredContent) -> WantedContent:
    """Returns the content of a row."""
    return WantedContent(
        keys.unpack_u64(key), keys.unpack_u64(key, 8), key[16:], stored.size, is_cold=False
    )


def pack_object(pack: str) -> str:
    """Returns the name of a pack's object."""
    return f"packs/{pack}"


def large_object(each: WantedContent) -> str:
    """Returns the name of the object of a large content."""
    return f"large/{each.ino:016x}.{each.version:x}.{each.checksum.hex()}"


def _object_of(each: WantedContent, stored: StoredContent) -> str:
    return pack_object(stored.pack) if stored.pack else large_object(each)


def stored(table: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, StoredContent]]:
    """Yields the rows of a table of contents. Raises Corrupt if one is none."""
    for key, value in table:
        try:
            found = _unpack(value)
        except UNDECODABLE:
            raise _no_row(key) from None
        if len(key) < _KEY_BYTES or found.size < 0 or found.offset < 0:
            raise _no_row(key)
        if found.pack and not is_digest(found.pack):
            raise _no_row(key)
        yield key, found


def _no_row(key: bytes) -> Corrupt:
    return Corrupt(f"the backup is damaged: its table of contents has {key.hex()}, which is none")


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yields the items in lists of this size."""
    drawn = iter(items)
    while batch := list(islice(drawn, size)):
        yield batch


class _BegunContents:
    """The contents of packs of a backup that was cut short. They are looked for in the order of
    their keys, in which packs were filled: so one or two packs' are in memory."""

    def __init__(self, repository: Repository) -> None:
        """Raises Corrupt, and what a Repository raises."""
        self._repository = repository
        self._here: list[dict[bytes, StoredContent]] = []
        names = (name for name in repository.names(_BEGUN) if self._has_pack(name))
        firsts = ((min(self._noted(name), default=b""), name) for name in names)
        self._coming = sorted(firsts, reverse=True)
        """The first keys of packs that begin further on, the next one last."""

    def find(self, key: bytes) -> StoredContent | None:
        """Returns the place of a content; None: no pack has it. Later calls have greater keys."""
        while self._coming and self._coming[-1][0] <= key:
            self._here = [each for each in self._here if max(each, default=b"") >= key]
            self._here.append(self._noted(self._coming.pop()[1]))
        return next((each[key] for each in self._here if key in each), None)

    def _has_pack(self, name: str) -> bool:
        pack = name.rpartition("/")[2]
        return self._repository.size_of(pack_object(pack)) is not None

    def _noted(self, name: str) -> dict[bytes, StoredContent]:
        try:
            return _unpack_begun(self._repository.get(name))
        except UNDECODABLE:
            raise Corrupt(
                f"{self._repository.shown}/{name} is damaged: remove it, its files are read again"
            ) from None


def _changed(before: os.stat_result, after: os.stat_result) -> bool:
    def state(found: os.stat_result) -> tuple[int, int]:
        return found.st_size, found.st_mtime_ns

    return state(before) != state(after)
