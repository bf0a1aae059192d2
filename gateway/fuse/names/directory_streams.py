"""Directory streams: the state of opendir, readdir and seekdir.

A stream numbers the names in the order in which it first met them, and an offset is such a number:
it stays valid whatever is created or removed meanwhile, and names that stay are neither skipped nor
repeated (POSIX readdir). The last names are remembered; of those before, one key for each page. Who
goes back there is given the page as it is now, from its beginning if its names have changed: then
some names are told again, and none is skipped.
"""

from bisect import bisect_right
from typing import TYPE_CHECKING, Final, NamedTuple

import xxhash

from kvfs.base.errors import NotADirectory, Stale
from kvfs.cluster.coherence import Coherence
from kvfs.meta import keys
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.records import Inode, unpack_inode
from kvfs.node import Node
from kvfs.tree import published_view, tree
from kvfs.vfs.names.all_names import AllNames, PageWanted

if TYPE_CHECKING:
    from kvfs.node.names.peer_names import PeerNames

_BATCH: Final = 512
_WINDOW: Final = 16_384
"""Names that are remembered, some 100 bytes each."""
DOTS: Final = 2


class ListingEntry(NamedTuple):
    """One name in a listing."""

    following: int
    """The offset of the next one."""
    name: bytes
    ino: int
    inode: Inode
    is_elsewhere: bool = False
    """Whether only other nodes have it: of its record no more is known than the type."""


class _Name(NamedTuple):
    name: bytes
    ino: int
    mode: int
    """That of a name that only other nodes have; else 0."""


class _ReadPage(NamedTuple):
    """Names that were read together."""

    first: int
    """The number of the first."""
    after: bytes
    """The key after which they were read."""
    sum: int


class DirectoryStream:
    """One open directory."""

    __slots__ = ("ended", "first", "ino", "last", "names", "others", "pages", "returning")

    def __init__(self, ino: int, others: AllNames | None) -> None:
        """`others`: for what other nodes have of it; None: nothing."""
        self.ino = ino
        self.others = others
        self.names: list[_Name] = []
        """The names that are remembered, from the number `first` on."""
        self.first = 0
        self.pages: list[_ReadPage] = []
        self.last = b""
        self.ended = False
        self.returning: _ReadPage | None = None
        """The page that is to be read again."""

    @property
    def end(self) -> int:
        """The number of the name that was not read yet."""
        return self.first + len(self.names)

    def begin_anew(self) -> None:
        """Forgets all that was read."""
        self.names, self.first, self.last, self.ended = [], 0, b"", False
        self.returning = None
        self.pages.clear()

    def go_back(self, number: int) -> None:
        """Forgets what was read from the page with this number on."""
        at = bisect_right(self.pages, number, key=lambda page: page.first) - 1
        page = self.returning = self.pages[at]
        self.names, self.first, self.last, self.ended = [], page.first, page.after, False
        del self.pages[at:]
        if self.others is not None:
            self.others.clear()

    def restored(self, first: int, after: bytes, total: int) -> None:
        """Goes on at a page that an earlier daemon read. Of the names before it nothing is known:
        whoever goes back there is told all again."""
        self.first, self.last = first, after
        if first:
            self.pages.append(_ReadPage(0, b"", 0))
        self.returning = _ReadPage(first, after, total)

    def page_of(self, offset: int) -> tuple[_ReadPage, int]:
        """Returns the page in which the name with this offset stands, and the number after its
        last name."""
        at = bisect_right(self.pages, max(offset - DOTS, 0), key=lambda page: page.first) - 1
        page = self.pages[at] if at >= 0 else _ReadPage(0, b"", 0)
        return page, self.pages[at + 1].first if at + 1 < len(self.pages) else self.end

    def add(self, names: list[_Name], last: bytes, *, ended: bool) -> int:
        """Adds a page; returns its sum."""
        total = xxhash.xxh3_64_intdigest(b"/".join(each.name for each in names))
        self.pages.append(_ReadPage(self.end, self.last, total))
        self.names += names
        self.last, self.ended = last or self.last, ended
        if len(self.names) > _WINDOW:
            dropped = len(self.names) - _WINDOW // 2
            del self.names[:dropped]
            self.first += dropped
        return total


class DirectoryStreams:
    """The open directories of a mount."""

    def __init__(self, node: Node) -> None:
        self._engine = node.engine
        self._coherence = node.coherence
        self._port = node.port
        self._names = node.names
        self._streams: dict[int, DirectoryStream] = {}
        self._next = 1

    async def open(self, ino: int) -> int:
        """Raises Stale, NotADirectory; Unavailable."""
        await require_directory(self._engine, self._coherence, ino)
        fh = self._next
        self._next += 1
        self._streams[fh] = DirectoryStream(ino, others_of(self._names, ino, _BATCH))
        return fh

    def close(self, fh: int) -> None:
        """Forgets the stream."""
        self._streams.pop(fh, None)

    def directory(self, fh: int) -> int:
        """Returns the inode of an open directory. Raises Stale."""
        return self._stream(fh).ino

    async def read(self, fh: int, offset: int, limit: int) -> list[ListingEntry]:
        """Returns at most `limit` entries from `offset` on. Fewer than asked for is not the end;
        none is. `.` and `..` come first."""
        stream = self._stream(fh)
        if offset == 0:
            stream.begin_anew()
            if stream.others is not None:
                stream.others.clear()
        while True:
            try:
                return await self._engine.read(lambda t: _page(t, stream, offset, limit))
            except PageWanted as wanted:
                assert stream.others is not None, "it was they who were wanted"
                told = await self._port.listed(wanted.asked, stream.others.detail)
                stream.others.add(wanted, told)

    def _stream(self, fh: int) -> DirectoryStream:
        stream = self._streams.get(fh)
        if stream is None:
            raise Stale("no such open directory")
        return stream


def others_of(names: "PeerNames | None", directory: int, limit: int) -> AllNames | None:
    """Returns what asks for the names that other nodes have of a directory; None: its names are not
    each node's own."""
    return AllNames("names", limit) if names is not None and names.is_kept(directory) else None


def entry_elsewhere(following: int, name: bytes, ino: int, mode: int) -> ListingEntry:
    """Returns the entry of a name that only other nodes have."""
    known = Inode(
        mode=mode,
        uid=0,
        gid=0,
        nlink=1,
        atime_ns=0,
        mtime_ns=0,
        ctime_ns=0,
        parent=0,
        name=name,
    )
    return ListingEntry(following, name, ino, known, True)


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
    if offset >= DOTS:
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
    limit = min(limit - len(page), _WINDOW // 4)
    start = max(offset - DOTS, 0)
    if start < stream.first:
        stream.go_back(start)
    if stream.returning is not None:
        page_before, total = stream.returning, _extend(t, stream)
        stream.returning = None
        start = start if total == page_before.sum else page_before.first
    names: list[ListingEntry] = []
    while limit > 0 and not names and not (stream.ended and start >= stream.end):
        names = _known(t, stream, start, limit)
        start += limit
    return page + names


def _known(t: Transaction, stream: DirectoryStream, start: int, limit: int) -> list[ListingEntry]:
    while not stream.ended and stream.end < start + limit:
        _extend(t, stream)
    names = stream.names[start - stream.first : start - stream.first + limit]
    records = t.get_many([keys.inode(each.ino) for each in names])
    found: list[ListingEntry] = []
    for at, (each, record) in enumerate(zip(names, records, strict=True), start + 1 + DOTS):
        if record is not None:
            found.append(ListingEntry(at, each.name, each.ino, unpack_inode(record)))
        elif each.mode:
            found.append(entry_elsewhere(at, *each))
    if not t.node:
        return found
    return [each for each in found if published_view.is_here(t, each.ino, each.inode)]


def _extend(t: Transaction, stream: DirectoryStream) -> int:
    """Reads the next page; returns its sum."""
    others, directory = stream.others, stream.ino
    view = t if others is None else others.over(t)
    children = tree.list_children(view, directory, stream.last, _BATCH)
    last = children[-1].key if children else b""
    ended = len(children) < _BATCH
    if others is None:
        names = [_Name(each.name, each.ino, 0) for each in children]
    else:
        names = [_Name(e.name, e.ino, others.mode(directory, e.key)) for e in children]
        others.forget(directory, last + b"\0")
    return stream.add(names, last, ended=ended)
