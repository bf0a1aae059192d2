"""Listings whose offsets outlive the stream that told them. NFS needs that, since each of its
requests opens the directory anew; so listings are asked for by directory, and none needs to be
opened.

Names are listed in the order of their hashes, and an offset is the hash of the name before it, as
in ext4. So it tells where to go on whatever came or went meanwhile, in another stream, and after a
restart: names that stay are neither skipped nor repeated. A listing begins with the directory as it
is; where names change meanwhile, it goes on for a while with the names that it began with, those
that have gone since left out: 100,000 names take 0.1 s to read, and a client a thousand requests.
Of two names of one directory whose hashes are equal (one pair in 10^19), one may be missing.
"""

from array import array
from bisect import bisect_right
from collections import Counter, OrderedDict
from functools import partial
from math import inf
from typing import Final, NamedTuple

import trio
import xxhash

from gateway.fuse.names.directory_streams import ListingEntry, dots, entry_elsewhere, others_of
from kvfs.base import detach
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Inode, unpack_inode
from kvfs.node import Node
from kvfs.tree import published_view, tree
from kvfs.vfs.names.all_names import AllNames, PageWanted

_DOTS: Final = 2
_LEAST: Final = _DOTS + 1
_BITS: Final = 62
"""NFS and the kernel count offsets with a sign."""
_BATCH: Final = 2_000
"""Names that are read in one turn of the event loop, some 2 ms."""
_OTHERS_S: Final = 2.0
_OTHERS_TIMES: Final = 10
"""A listing with names of other nodes is believed for so long, or so many times as long as it took:
a client that reads a large one by many requests has it gathered only some times."""
_CHANGED_S: Final = 2.0
_CHANGED_TIMES: Final = 10
"""The names of a directory that has changed are listed on for so long, or so many times as long as
reading them took."""
_KEPT_NAMES: Final = 500_000
"""Names of directories that are kept sorted, some 100 bytes each."""


def offset_of(name: bytes) -> int:
    """Returns where a listing goes on after this name."""
    return max(_LEAST, xxhash.xxh3_64_intdigest(name) >> (64 - _BITS))


class _Found(NamedTuple):
    """A name, and where a listing goes on after it."""

    offset: int
    name: bytes
    ino: int
    mode: int
    """That of a name that only other nodes have; else 0."""


class Listing:
    """The sorted names of one directory in one of its states."""

    __slots__ = (
        "changed_until",
        "inos",
        "is_changed",
        "modes",
        "names",
        "offsets",
        "state",
        "until",
    )

    def __init__(
        self, state: tuple[int, int], found: list[_Found], until: float, changed_until: float
    ) -> None:
        found.sort()
        self.state = state
        self.is_changed = False
        """Whether names are known to have changed since."""
        self.until = until
        """The time from which on it is too old (of trio's clock)."""
        self.changed_until = changed_until
        """The same where names have changed since, for listings that have begun."""
        self.offsets = array("Q", [each.offset for each in found])
        self.names = [each.name for each in found]
        self.inos = array("Q", [each.ino for each in found])
        self.modes = array("L", [each.mode for each in found])

    def after(self, offset: int, limit: int) -> list[_Found]:
        """Returns at most `limit` that follow."""
        start = bisect_right(self.offsets, offset)
        part = slice(start, start + limit)
        columns = self.offsets[part], self.names[part], self.inos[part], self.modes[part]
        return list(map(_Found, *columns))


class StableListings:
    """The directories of one view."""

    def __init__(self, node: Node) -> None:
        self._engine = node.engine
        self._coherence = node.coherence
        self._port = node.port
        self._names = node.names
        self._kept: OrderedDict[int, Listing] = OrderedDict()
        self._reading: Counter[int] = Counter()
        """How often each directory is being read now."""
        self._outdated: set[int] = set()
        """Directories among them that changed since."""

    def changed(self, ino: int) -> None:
        """Notes that names of this directory have changed, which its times may not tell: they go by
        ticks of 4 ms, and clocks of several hosts differ."""
        kept = self._kept.get(ino)
        if kept is not None:
            kept.is_changed = True
        if ino in self._reading:
            self._outdated.add(ino)

    async def read(self, ino: int, offset: int, limit: int) -> list[ListingEntry]:
        """Returns at most `limit` entries from `offset` on, `.` and `..` first. Fewer than asked
        for is not the end; none is. Raises Stale; Unavailable."""
        if self._coherence is not None:
            await self._coherence.fresh(ino)
        listing, is_present = await self._listing(ino, is_begun=offset > _DOTS)
        page = [] if offset >= _DOTS else await self._engine.read(lambda t: dots(t, ino, offset))
        at = max(offset, _DOTS)
        while True:
            following = listing.after(at, limit)
            there = following
            if not is_present:
                there = await self._engine.read(partial(_still_there, ino, following))
            found = await self._engine.read(partial(_entries, there))
            if found or not following:
                return page + found
            at = following[-1][0]  # all of these have gone

    async def _listing(self, ino: int, *, is_begun: bool) -> tuple[Listing, bool]:
        """Returns the directory's present listing, with some of the changes that are made
        meanwhile, and True; for a listing that has begun perhaps an earlier one, and False."""
        inode = await self._engine.read(lambda t: tree.read_inode(t, ino))
        kept, now = self._kept.get(ino), trio.current_time()
        if kept is not None and now < kept.until:
            is_present = kept.state == _state(inode) and not kept.is_changed
            if is_present or (is_begun and now < kept.changed_until):
                self._kept.move_to_end(ino)
                return kept, is_present
        self._reading[ino] += 1
        try:
            began = trio.current_time()
            found, others = await self._scan(ino)
            took = trio.current_time() - began
            until = inf if others is None else began + max(_OTHERS_S, _OTHERS_TIMES * took)
            # What was removed here may be another node's name still.
            changed_s = 0.0 if others is not None else max(_CHANGED_S, _CHANGED_TIMES * took)
            changed_until = began + changed_s
            listing = Listing(_state(inode), found, until, changed_until)
            listing.is_changed = ino in self._outdated
            self._keep(ino, listing)
        finally:
            self._reading[ino] -= 1
            if not self._reading[ino]:
                del self._reading[ino]
                self._outdated.discard(ino)
        return listing, True

    async def _scan(self, ino: int) -> tuple[list[_Found], AllNames | None]:
        """Returns the names, and what told those of other nodes."""
        found: list[_Found] = []
        others = others_of(self._names, ino, _BATCH)
        last = b""
        while True:
            some = await self._children(ino, last, others)
            for child in some:
                mode = 0 if others is None else others.mode(ino, child.key)
                found.append(_Found(offset_of(child.name), child.name, child.ino, mode))
            if len(some) < _BATCH:
                return found, others
            last = some[-1].key
            if others is not None:
                others.forget(ino, last + b"\0")
            await detach.aside()
            await trio.lowlevel.checkpoint()

    async def _children(self, ino: int, last: bytes, others: AllNames | None) -> list[tree.Child]:
        if others is None:
            return await self._engine.read(partial(_children, ino, last))
        while True:
            try:
                return await self._engine.read(lambda t: _children(ino, last, others.over(t)))
            except PageWanted as wanted:
                others.add(wanted, await self._port.listed(wanted.asked, others.detail))

    def _keep(self, ino: int, listing: Listing) -> None:
        kept = self._kept
        kept.pop(ino, None)
        kept[ino] = listing
        names = sum(len(each.names) for each in kept.values())
        while names > _KEPT_NAMES and len(kept) > 1:
            names -= len(kept.popitem(last=False)[1].names)


def _state(inode: Inode) -> tuple[int, int]:
    """Returns a value that changes with each name that is added or comes to stand for another
    inode. Removed names leave no trace in it."""
    return inode.mtime_ns, inode.ctime_ns


def _children(ino: int, last: bytes, t: Transaction) -> list[tree.Child]:
    return tree.list_children(t, ino, last, _BATCH)


def _still_there(directory: int, some: list[_Found], t: Transaction) -> list[_Found]:
    """Returns those of these names that the directory still has, each with its present inode."""
    found: list[_Found] = []
    for each in some:
        now = tree.find(t, directory, each.name)
        if now is not None:
            found.append(each._replace(ino=now[0]))
    return found


def _entries(some: list[_Found], t: Transaction) -> list[ListingEntry]:
    """Returns the entries of these names that are still there. A name may stand for another inode
    since the listing: a later look-up tells."""
    records = t.get_many([keys.inode(each.ino) for each in some])
    found: list[ListingEntry] = []
    for each, record in zip(some, records, strict=True):
        if record is not None:
            inode = unpack_inode(record)
            found.append(ListingEntry(each.offset, each.name, each.ino, inode))
        elif each.mode:
            found.append(entry_elsewhere(*each))
    return [
        each
        for each in found
        if each.inode.nlink and (not t.node or published_view.is_here(t, each.ino, each.inode))
    ]
