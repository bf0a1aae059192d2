"""The treatment of a file whose data differ from what was sealed.

| step, cache | after a kill here | step, durable | after a kill here |
|---|---|---|---|
| 1 names removed | recovery finishes it | 1 into quarantine | opens are refused |
| 2 mounts told, the rest dropped | the same | 2 logged | - |

If another node has the file, neither: the data file goes into quarantine, this node's copy is given
up, and the file fetched again; then the damaged one is unlinked. After a kill in between, others
have it.

Invariants
- Nobody is given these bytes by a later open; a program that has the file open goes on.
- The rest of a durable file is not thrown away: an administrator may prefer it to nothing.
"""

import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import trio

from kvfs.base.errors import Corrupt, KvfsError, Unreached
from kvfs.datastore.files import DataFiles
from kvfs.datastore.quarantine_directory import Reason
from kvfs.meta import keys
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.records import Inode, namespace_of
from kvfs.tree import lifecycle, namespaces, tree

log = logging.getLogger(__name__)


class DamagedFileHolds(Protocol):
    """The files that this process has open."""

    @property
    def let_go(self) -> Callable[[int], None]:
        """Closes a data file that is kept open though no handle is."""


class OtherCopies(Protocol):
    """The other nodes of a cluster."""

    async def have(self, ino: int) -> bool:
        """Returns whether another present node has the whole file."""

    async def replace(self, ino: int) -> bool:
        """Gives up this node's copy and fetches it anew; False if it is the last one, and stays.
        Raises KvfsError, OSError."""


class DamagedFiles:
    """Handles damaged files for one node. `tell` makes mounts forget names, `drop` drops inodes
    without any."""

    def __init__(
        self,
        engine: Engine,
        files: DataFiles,
        holders: DamagedFileHolds,
        tell: Callable[[Sequence[lifecycle.Evicted]], Awaitable[None]],
        drop: Callable[[Sequence[int]], Awaitable[None]],
        others: Callable[[], OtherCopies | None],
    ) -> None:
        """`others` returns the other nodes; None: on a lone node, and before they can be asked."""
        self._engine = engine
        self._files = files
        self._holders = holders
        self._tell = tell
        self._drop = drop
        self._others = others
        self.counters = {"damage_mended": 0}

    async def found(self, ino: int, inode: Inode) -> None:
        """Handles the damaged data file of this record. Raises KvfsError, OSError."""
        name = await self._name(ino)
        if await self._is_mended(ino, inode, name):
            return
        if await self._is_evicted(ino):
            log.warning("%s is damaged: it does not match its checksum; it is evicted", name)
            return
        left = await self._quarantine(ino, inode)
        log.error("%s is damaged: it does not match its checksum; what is left: %s", name, left)

    async def unreadable(self, ino: int, inode: Inode, error: OSError) -> None:
        """Handles a data file that its disk does not give: one of a cache is evicted. Raises
        Unreached, of a cache, if another node has it; Corrupt, of a durable one, which stays."""
        name, others = await self._name(ino), self._others()
        said = f"{name}: its data file {error.filename} cannot be read ({error.strerror})"
        record = await self._engine.read(lambda t: namespaces.get(t, namespace_of(ino)))
        if record.kind != "cache":
            raise Corrupt(f"{said}: look at its disk and the kernel's log")
        if others is not None and await others.have(ino):
            miss = Unreached(said)
            miss.at = keys.file_entry(inode.parent, inode.name)
            raise miss
        if await self._is_evicted(ino):
            log.warning("%s; it is evicted", said)

    async def _name(self, ino: int) -> str:
        path = await self._engine.read(lambda t: tree.path_of(t, ino))
        return path.decode(errors="backslashreplace")

    async def _is_evicted(self, ino: int) -> bool:
        """Evicts a file of a cache; returns whether it did."""
        now = time.time_ns()
        evicted = await self._engine.transact(lambda t: _evict(t, ino, now))
        if evicted is None:
            return False
        await self._tell([evicted])
        await self._drop([ino])
        return True

    async def _is_mended(self, ino: int, inode: Inode, name: str) -> bool:
        """Returns whether others have the file, whatever became of this node's copy."""
        others = self._others()
        if others is None or not await others.have(ino):
            return False
        damaged = await self._quarantine(ino, inode)
        try:
            if not await others.replace(ino):
                return False
        except (KvfsError, OSError) as error:
            log.warning("%s was damaged here, and is not brought again yet: %s", name, error)
            return True
        if damaged is not None:
            os.unlink(damaged)
        self.counters["damage_mended"] += 1
        log.warning("%s was damaged here: another node's copy is in its place", name)
        return True

    async def _quarantine(self, ino: int, inode: Inode) -> str | None:
        """Moves the data file into quarantine and returns its path there; None: it was there
        before."""
        path = await trio.to_thread.run_sync(
            self._files.quarantine, ino, inode.version, Reason.DAMAGED
        )
        self._holders.let_go(ino)
        return path


def _evict(t: Transaction, ino: int, now: int) -> lifecycle.Evicted | None:
    """Evicts the file; does nothing if it is durable."""
    if namespaces.get(t, namespace_of(ino)).kind != "cache":
        return None
    return lifecycle.evict(t, ino, now, "damaged")
