"""Data files of a node of a cluster that nobody speaks of any more: their content was replaced, or
their file removed, while the node was away; or a kill came between a data file and its record.

| data file | record | done |
|---|---|---|
| of the record's version, held by this node | there | nothing: it is as it should be |
| the same, not recorded as held | another node has it, or it is not sealed | it goes |
| the same | nobody else has it, sealed | compared with its checksum: recorded, or it goes |
| of another version | there | it goes |
| any | none, and its number is not reserved | it goes |

Invariants
- A data file younger than the sweep's limit stays: who made it may be about to record it.
- What is open in this process stays, whatever its record says: it goes when it is closed.
"""

import logging
import os
import time
from collections.abc import Callable
from itertools import islice
from typing import Final, Protocol

import trio

from kvfs.background.persist import Persistence
from kvfs.background.unlinking import Name, unlink_each
from kvfs.meta import keys
from kvfs.meta.interface import Engine, Transaction
from kvfs.meta.records import Flag, Inode
from kvfs.namespace import placements
from kvfs.namespace.inodes import read_inode, read_inodes
from kvfs.store.checksum import checksum
from kvfs.store.files import DataFiles
from kvfs.store.index import Index, Sealed

log = logging.getLogger(__name__)
_BATCH: Final = 256
_PERIOD_S: Final = 3600.0
_AGE_S: Final = 60.0


class Holds(Protocol):
    """What this process has open."""

    def busy(self, ino: int) -> bool:
        """Whether a handle is open."""

    @property
    def let_go(self) -> Callable[[int], None]:
        """Closes a data file that is kept open though no handle is."""


class Strays:
    """Finds them for one node."""

    def __init__(self, engine: Engine, files: DataFiles, index: Index, holders: Holds) -> None:
        self._engine = engine
        self._files = files
        self._index = index
        self._holders = holders
        self._alone: list[Name] = []
        self.counters = {"strays_removed": 0, "strays_kept": 0}

    async def run(self) -> None:
        """Look at all data files once, and every hour, until cancelled. The first time what was
        made since the start is left alone."""
        sweeping = Persistence(log.warning, "data files that nobody needs stay for now")
        before_ns = time.time_ns()
        while True:
            await sweeping.attempt(lambda: self.sweep(before_ns))  # noqa: B023
            await trio.sleep(_PERIOD_S)
            before_ns = time.time_ns() - int(_AGE_S * 1e9)

    async def sweep(self, before_ns: int) -> None:
        """Look at the data files that were made, or got their name, before this time."""
        everything = self._files.scan()
        while batch := list(islice(everything, _BATCH)):
            await self._judge([name for name in batch if self._is_older(name, before_ns)])
            await trio.lowlevel.checkpoint()

    def _is_older(self, name: Name, before_ns: int) -> bool:
        try:
            return self._files.stat(*name).st_ctime_ns < before_ns
        except FileNotFoundError:
            return False

    async def _judge(self, names: list[Name]) -> None:
        gone, alone = await self._engine.read(lambda t: _strays(t, names))
        for name in alone:
            if not await self._adopt(name):
                gone.append(name)
        await self._remove([name for name in gone if not self._holders.busy(name[0])])

    async def _remove(self, names: list[Name]) -> None:
        for ino, _ in names:
            self._holders.let_go(ino)
        failed = await unlink_each(self._files, names)
        gone = [name for name in names if name not in failed]
        self._index.remove([ino for ino, version in gone if self._is_indexed(ino, version)])
        self.counters["strays_removed"] += len(gone)
        for error in failed.values():
            raise error

    def _is_indexed(self, ino: int, version: int) -> bool:
        entry = self._index.get(ino)
        return entry is not None and entry.version == version

    async def _adopt(self, name: Name) -> bool:
        """Whether the data file is what its record says, and is recorded now."""
        ino, version = name
        inode = await self._engine.read(lambda t: read_inode(t, ino))
        found = await trio.to_thread.run_sync(self._read, name, inode.size)
        if found is None:
            return False
        chunks, combined, blocks = found

        def hold(t: Transaction) -> bool:
            now = read_inodes(t, [ino])[0]
            if now is None or (now.version, now.checksum) != (version, combined):
                return False
            placements.hold(t, ino, version)
            return True

        if not await self._engine.transact(hold):
            return False
        self._index.store([Sealed(ino, version, chunks, blocks)])
        self.counters["strays_kept"] += 1
        return True

    def _read(self, name: Name, size: int) -> tuple[bytes, bytes, int] | None:
        try:
            fd = self._files.open_unseen(*name)
        except OSError:
            return None
        try:
            os.fsync(fd)
            stat = os.fstat(fd)
            found = checksum(fd, size) if stat.st_size == size else None
        except OSError as error:
            log.warning("the data file %s cannot be read: %s", self._files.path(*name), error)
            found = None
        finally:
            os.close(fd)
        return None if found is None else (found.chunks, found.combined, stat.st_blocks)


def _strays(t: Transaction, names: list[Name]) -> tuple[list[Name], list[Name]]:
    """Those that are to go, and those that nobody else has."""
    gone: list[Name] = []
    alone: list[Name] = []
    inos = [ino for ino, _ in names]
    own = placements.holding(t, inos, t.node)
    for name, inode, held in zip(names, read_inodes(t, inos), own, strict=True):
        if inode is None:
            if t.get(keys.reserved(name[0])) is None:
                gone.append(name)
        elif inode.version != name[1]:
            gone.append(name)
        elif held is None or held.version != name[1]:
            (alone if _is_needed(t, name[0], inode) else gone).append(name)
    return gone, alone


def _is_needed(t: Transaction, ino: int, inode: Inode) -> bool:
    return bool(inode.flags & Flag.SEALED and inode.nlink) and not placements.is_held(t, ino)
