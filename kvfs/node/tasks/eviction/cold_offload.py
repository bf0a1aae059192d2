"""Frees the space of files that the cold tier has: their names stay, their data files go.

| step | on disk | in the engine |
|---|---|---|
| 1 data file unlinked | nothing | its blocks still count |
| 2 recorded | nothing | blocks 0 |
| 3 index entry removed | nothing | the same |

After a kill between 1 and 3 the next eviction does the rest, or the file's return corrects it.

Invariants
- Between the check of the record, the check that the data file is unused, and step 1, nothing of
  this process runs: nobody opens it for writing in between.
- An open file is passed over; an open afterwards has it fetched back.
"""

import os
from collections.abc import Callable, Iterable
from typing import Final

import trio

from kvfs.datastore import file_lease
from kvfs.datastore.files import DataFiles
from kvfs.datastore.index import Index
from kvfs.meta.engine import Engine, Transaction, transact_each
from kvfs.meta.records import Inode, namespace_of
from kvfs.node.tasks.cold_tier import ColdTier
from kvfs.tree import namespaces
from kvfs.tree.copies import cold_copies
from kvfs.tree.copies.cold_copies import Object
from kvfs.tree.inodes import BLOCK, read_inodes

Name = tuple[int, int]
_PATIENT_S: Final = 2.0
_PRESSED_S: Final = 5.0


class Releaser:
    """The releaser of one node. `in_use` tells whether this process uses a file, after closing
    those that it only keeps open."""

    def __init__(
        self,
        engine: Engine,
        files: DataFiles,
        index: Index,
        tier: ColdTier,
        in_use: Callable[[int], bool],
    ) -> None:
        self._engine = engine
        self._files = files
        self._index = index
        self._tier = tier
        self._in_use = in_use
        self.counters = {"released_files": 0, "released_bytes": 0}

    @property
    def is_sending(self) -> bool:
        """Whether space will be free soon: files are on their way to the cold tier."""
        return self._tier.is_sending

    async def release(self, chosen: list[Name], *, patient: bool) -> tuple[int, list[Name]]:
        """Sends files of namespaces that ask for it to the cold tier, and frees their space.
        Returns the bytes freed, and the files to be evicted in the ordinary way. Not `patient`:
        files of a cache are, if the tier has not taken them soon."""
        inodes, wanting, caches = await self._engine.read(lambda t: _look(t, chosen))
        rest, wanted = [], []
        for name, inode in zip(chosen, inodes, strict=True):
            if inode is None or namespace_of(name[0]) not in wanting:
                rest.append(name)
            elif (kept := cold_copies.object_of(name[0], inode)) is not None:
                wanted.append(kept)
        there = await self._engine.read(lambda t: cold_copies.there(t, wanted))
        missing = [each for each in wanted if each not in there]
        if missing:
            there += await self._tier.demote(missing, _PATIENT_S if patient else _PRESSED_S)
        freed = await self._let_go(there)
        if not patient or self._tier.is_away:
            left = [each for each in missing if each not in there]
            rest += [(e.ino, e.version) for e in left if namespace_of(e.ino) in caches]
        return freed, rest

    async def _let_go(self, kept: list[Object]) -> int:
        there, inodes = await self._engine.read(
            lambda t: (cold_copies.there(t, kept), read_inodes(t, [each.ino for each in kept]))
        )
        blocks = {each: inode.blocks for each, inode in zip(kept, inodes, strict=True) if inode}
        gone: list[Object] = []
        fds: list[int] = []
        for each in there:
            self._unlink(each, gone, fds)
        try:
            released = await transact_each(self._engine, gone, _inode_of, _release)
        finally:
            await _close_all(fds)
        self._index.remove(each.ino for each in released)
        freed = sum(BLOCK * blocks[each] for each in released)
        self.counters["released_files"] += len(released)
        self.counters["released_bytes"] += freed
        return freed

    def _unlink(self, each: Object, gone: list[Object], fds: list[int]) -> None:
        """Does step 1, which takes no time: the blocks are given back when the descriptor is
        closed."""
        if self._in_use(each.ino):
            return
        try:
            fd = self._files.open(each.ino, each.version, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            gone.append(each)
            return
        fds.append(fd)
        if file_lease.is_unused(fd) is not False:
            self._files.unlink(each.ino, each.version)
            gone.append(each)


async def _close_all(fds: Iterable[int]) -> None:
    """Closes them in a thread: the last close of a large file takes its time."""

    def close() -> None:
        for fd in fds:
            os.close(fd)

    with trio.CancelScope(shield=True):
        await trio.to_thread.run_sync(close)


def _inode_of(each: Object) -> int:
    return each.ino


def _release(t: Transaction, gone: list[Object]) -> list[Object]:
    return [each for each in gone if cold_copies.release(t, each)]


def _look(t: Transaction, chosen: list[Name]) -> tuple[list[Inode | None], set[int], set[int]]:
    """Returns records, the namespaces that ask for the cold tier (where names are each node's own
    that is not done here: `cold_blocks`), and those that are caches."""
    found = namespaces.records(t)
    return (
        read_inodes(t, [ino for ino, _ in chosen]),
        {number for number, each in found.items() if each.cold and not each.is_peer},
        {number for number, each in found.items() if each.kind == "cache"},
    )
