"""The files that may be evicted: those used longest ago, while nobody uses them.

Invariant
- A file is in use while any part of this process has it open, the kernel knows of a descriptor or a
  mapping anywhere (a lease on the data file), or another node counts on it.
"""

import os
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Final, Protocol

import trio

from kvfs.datastore import file_lease
from kvfs.datastore.files import DataFiles
from kvfs.datastore.index import Index
from kvfs.meta.engine import Engine
from kvfs.meta.records import Flag, Inode
from kvfs.node.tasks.eviction.surplus_replicas import Spare
from kvfs.policy import eviction
from kvfs.tree.inodes import BLOCK, read_inodes

_BATCH: Final = 64
"""Files in one transaction: about 2 ms of the event loop."""
_PASSES: Final = 16
MOST_LOOKED_AT: Final = _BATCH * _PASSES
"""Files at the cold end that are looked at for one batch."""

Name = tuple[int, int]
"""Inode and version of a file."""
Among = Callable[[list[int]], Awaitable[list[int]]]
"""Leaves some of the files, in their order."""


class EvictionHolds(Protocol):
    """The files that this process has open."""

    def in_use(self, ino: int) -> bool:
        """Returns whether a handle is open. A data file that was only kept open has been closed
        then."""

    def dropping(self, inos: Iterable[int]) -> AbstractContextManager[None]:
        """Keeps data files of these inodes from coming while the block lasts, which drops them."""


class EvictionCandidates:
    """The candidates of one node. Each choice is of up to `need` bytes, and passes over a bounded
    number of those in use; it raises what `Engine.read` raises."""

    def __init__(
        self,
        engine: Engine,
        files: DataFiles,
        index: Index,
        holders: EvictionHolds,
        is_kept: Callable[[int], bool],
        spare: Spare | None,
    ) -> None:
        """`is_kept`: whether a file stays for now, because another node counts on it. `spare`: in a
        cluster the surplus replicas."""
        self._engine = engine
        self._files = files
        self._index = index
        self._holders = holders
        self._is_kept = is_kept
        self._replicas = spare
        self.passed_over = 0
        """Files that were not chosen because they were in use, since the start."""

    async def coldest(self, namespace_ids: list[int], need: int) -> list[Name]:
        """Returns the coldest files of these namespaces that may go."""
        return await self._choose(namespace_ids, need, None)

    async def alone(self, namespace_ids: list[int], need: int) -> list[Name]:
        """Returns the coldest that may go and that no other node has."""
        among = None if self._replicas is None else partial(self._alone, self._replicas)
        return await self._choose(namespace_ids, need, among)

    async def surplus(self, spare: Spare, namespace_ids: list[int], need: int) -> list[Name]:
        """Returns the coldest that may go and that other nodes have too."""
        return await self._choose(namespace_ids, need, partial(self._spare, spare))

    async def choose_from(self, inos: list[int], need: int) -> list[Name]:
        """Returns those of these files that may go, in their order."""
        inodes = await self._engine.read(lambda t: read_inodes(t, inos))
        found = list(zip(inos, inodes, strict=True))
        if gone := [ino for ino, inode in found if inode is None]:
            self._index.remove(gone)
        evictable = (
            (ino, BLOCK * inode.blocks)
            for ino, inode in found
            if inode is not None and self._evictable(ino, inode)
        )
        versions = {ino: inode.version for ino, inode in found if inode is not None}
        return [(ino, versions[ino]) for ino in eviction.choose(evictable, need)]

    def pass_over(self, inos: Iterable[int]) -> None:
        """Has files that were chosen and may not go leave the cold end, as if they were used."""
        for ino in inos:
            self._index.touch(ino)

    def in_use(self, ino: int, inode: Inode) -> bool:
        """Returns whether anybody uses a file now."""
        if self._holders.in_use(ino) or self._is_kept(ino):
            return True
        try:
            fd = self._files.open(ino, inode.version, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        try:
            return file_lease.is_unused(fd) is False
        finally:
            os.close(fd)

    # ---- inside

    async def _choose(self, namespace_ids: list[int], need: int, among: Among | None) -> list[Name]:
        for number in range(1, _PASSES + 1):
            limit = _BATCH * number if among else _BATCH
            orders = [self._index.coldest(number, limit) for number in namespace_ids]
            inos = eviction.coldest(orders, limit)
            chosen = await self.choose_from(await among(inos) if among else inos, need)
            if chosen or len(inos) < limit:
                return chosen
            await trio.lowlevel.checkpoint()
        return []

    async def _spare(self, spare: Spare, inos: list[int]) -> list[int]:
        """Returns the files that other nodes have too, in their order. Files of a durable namespace
        that no other node has leave the cold end: they free nothing."""
        there, needed = await self._engine.read(lambda t: spare.look(t, inos))
        for ino in needed:
            self._index.touch(ino)
        return [ino for ino in inos if ino in there]

    async def _alone(self, spare: Spare, inos: list[int]) -> list[int]:
        """Returns the files that no other node has, in their order: the others go without their
        names, if not now then once this node's copy is recorded."""
        there, _ = await self._engine.read(lambda t: spare.look(t, inos))
        return [ino for ino in inos if ino not in there]

    def _evictable(self, ino: int, inode: Inode) -> bool:
        """Returns whether the file may go now; one that may not is as good as used, and leaves the
        cold end."""
        if inode.blocks and inode.flags & Flag.PUBLISHED and inode.nlink:
            if not self.in_use(ino, inode):
                return True
            self.passed_over += 1
        self._index.touch(ino)
        return False
