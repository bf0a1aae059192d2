"""Directory streams: the state of opendir, readdir and seekdir.

A stream remembers the names in the order in which it first met them, so that an offset is an index
into them: it stays valid whatever is created or removed meanwhile, and names that stay are neither
skipped nor repeated (POSIX readdir)."""

from typing import Final, NamedTuple

from kvfs.base.errors import NotADirectory, Stale
from kvfs.cluster.coherence import Coherence
from kvfs.meta import keys
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.records import Inode, unpack_inode
from kvfs.node import Node
from kvfs.tree import published_view, tree

_BATCH: Final = 512
_DOTS: Final = 2


class ListingEntry(NamedTuple):
    """One name in a listing."""

    following: int
    """The offset of the next one."""
    name: bytes
    ino: int
    inode: Inode


class DirectoryStream:
    """One open directory."""

    __slots__ = ("ended", "entries", "ino", "last")

    def __init__(self, ino: int) -> None:
        self.ino = ino
        self.entries: list[tuple[bytes, int]] = []
        self.last = b""
        self.ended = False


class DirectoryStreams:
    """The open directories of a mount."""

    def __init__(self, node: Node) -> None:
        self._engine = node.engine
        self._coherence = node.coherence
        self._streams: dict[int, DirectoryStream] = {}
        self._next = 1

    async def open(self, ino: int) -> int:
        """Raises Stale, NotADirectory; Unavailable."""
        await require_directory(self._engine, self._coherence, ino)
        fh = self._next
        self._next += 1
        self._streams[fh] = DirectoryStream(ino)
        return fh

    def close(self, fh: int) -> None:
        """Forgets the stream."""
        self._streams.pop(fh, None)

    async def read(self, fh: int, offset: int, limit: int) -> list[ListingEntry]:
        """Returns at most `limit` entries from `offset` on. Fewer than asked for is not the end;
        none is. `.` and `..` come first."""
        stream = self._streams.get(fh)
        if stream is None:
            raise Stale("no such open directory")
        if offset == 0:
            stream.entries, stream.last, stream.ended = [], b"", False
        return await self._engine.read(lambda t: _page(t, stream, offset, limit))


async def require_directory(engine: Engine, coherence: Coherence | None, ino: int) -> None:
    """Requires a directory as fresh as its namespace demands. Raises Stale, NotADirectory;
    Unavailable."""
    if coherence is not None:
        await coherence.fresh(ino)
    inode = await engine.read(lambda t: tree.read_inode(t, ino))
    if inode.mode & 0o170000 != 0o040000:
        raise NotADirectory("not a directory")


def dots(t: Transaction, ino: int, offset: int) -> list[ListingEntry]:
    """Returns `.` and `..`, if they follow the offset; theirs are 1 and 2."""
    if offset >= _DOTS:
        return []
    parent = tree.read_inode(t, ino).parent or ino
    return [
        ListingEntry(at, name, of, tree.read_inode(t, of))
        for at, (name, of) in enumerate([(b".", ino), (b"..", parent)], 1)
        if at > offset
    ]


def _page(t: Transaction, stream: DirectoryStream, offset: int, limit: int) -> list[ListingEntry]:
    page = dots(t, stream.ino, offset)
    # Beside the dots: overlayfs takes a first reply of these alone for a filesystem without types.
    limit -= len(page)
    start = max(offset - _DOTS, 0)
    names: list[ListingEntry] = []
    while limit > 0 and not names and not (stream.ended and start >= len(stream.entries)):
        names = _known(t, stream, start, limit)
        start += limit
    return page + names


def _known(t: Transaction, stream: DirectoryStream, start: int, limit: int) -> list[ListingEntry]:
    while not stream.ended and len(stream.entries) < start + limit:
        _extend(t, stream)
    names = stream.entries[start : start + limit]
    records = t.get_many([keys.inode(ino) for _, ino in names])
    found = [
        ListingEntry(start + at + 1 + _DOTS, name, ino, unpack_inode(record))
        for at, ((name, ino), record) in enumerate(zip(names, records, strict=True))
        if record is not None
    ]
    if not t.node:
        return found
    return [each for each in found if published_view.is_here(t, each.ino, each.inode)]


def _extend(t: Transaction, stream: DirectoryStream) -> None:
    found = tree.list_children(t, stream.ino, stream.last, _BATCH)
    stream.entries.extend((name, ino) for _, name, ino in found)
    if found:
        stream.last = found[-1][0]
    stream.ended = len(found) < _BATCH
