"""Directories that the kernel is about to know: each counts as known
(`kvfs.datastore.known_directories`) before the kernel is told of it, so that a process that changes
a name in it tells the mount."""

import stat
from collections.abc import Callable, Sequence
from typing import TypeVar

from gateway.fuse.names.directory_streams import ListingEntry
from kvfs.datastore.known_directories import KnownDirectories
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.records import Inode
from kvfs.tree import tree
from kvfs.vfs.inode_holders import Holders

T = TypeVar("T")


class Introductions:
    """The directories that one mount introduces to its kernel."""

    def __init__(self, engine: Engine, known: KnownDirectories, holders: Holders) -> None:
        self._engine = engine
        self._known = known
        self._holders = holders

    async def read(self, fn: Callable[[Transaction], T]) -> T:
        """Runs a function that counts directories as known and reads their entries, in one turn
        with the processes that change names. On an embedded engine any process may change them, and
        they take turns at its writer lock; in a cluster this loop itself applies every change, and
        tells of it."""
        if self._engine.immediate:
            return await self._engine.transact(fn)
        return await self._engine.read(fn)

    def meet(self, ino: int, inode: Inode) -> None:
        """Prepares an inode of which the kernel is told. Call it within `read`."""
        if stat.S_ISDIR(inode.mode) and inode.nlink:
            self._known.add(ino)

    async def page(self, entries: list[ListingEntry]) -> list[ListingEntry]:
        """Returns the entries of which the kernel may be told: all but those that `is_strange`,
        which went meanwhile."""
        strangers = [each.ino for each in entries if self.is_strange(each)]
        if not strangers:
            return entries

        def meet(t: Transaction) -> dict[int, Inode]:
            met = {}
            for ino, inode in zip(strangers, tree.read_inodes(t, strangers), strict=True):
                if inode is not None and inode.nlink:
                    self._known.add(ino)
                    met[ino] = inode
            return met

        met = await self.read(meet)
        return [each._replace(inode=met.get(each.ino, each.inode)) for each in entries]

    def is_strange(self, entry: ListingEntry) -> bool:
        """Returns whether the entry is a directory that the kernel may not be told of. It knows `.`
        and `..`."""
        if not stat.S_ISDIR(entry.inode.mode) or entry.ino in self._known:
            return False
        return entry.name not in (b".", b"..")

    def unsaid(self, entries: Sequence[ListingEntry]) -> None:
        """Notes that the kernel was not told of these after all."""
        for each in entries:
            if not self._holders.keep(each.ino):
                self._known.forget(each.ino)
