"""Drops inodes that lost their last name, or never got one, and that no process will ever drop:
those of clients in other processes that were killed, and those of which the node could not be told.

Invariants
- An orphan stays while the mount holds it, while any process has its data file open or mapped, and
  for a minute after it became one: a client makes a file's record before its data file.
- A reserved number without a data file stays for an hour: its process may yet make the file. Each
  process that ends without giving its numbers back leaves up to 255.
- In a cluster each node drops its own data files; any node may drop an orphan of which no node has
  data.
- If the filesystem grants no leases, nobody knows who has a data file open: then everything is left
  to the next start.
"""

import logging
import os
import stat
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, Protocol

import trio

from kvfs.base.descriptors import closing
from kvfs.base.retry import Persistence
from kvfs.datastore import file_lease
from kvfs.datastore.files import DataFiles
from kvfs.meta import keys
from kvfs.meta.engine import Engine, Transaction, itself, transact_each
from kvfs.meta.records import Inode
from kvfs.tree import lifecycle, reserved_inodes
from kvfs.tree.copies import placements
from kvfs.tree.inodes import read_inodes

log = logging.getLogger(__name__)
_PERIOD_S: Final = 30.0
_AGE_NS: Final = 60_000_000_000
_UNUSED_S: Final = 3600.0
"""Twice as long as a process uses the numbers that it reserved (`kvfs.vfs.stage`)."""
_BATCH: Final = 256


class OrphanHolds(Protocol):
    """The inodes that the mount holds."""

    def keep(self, ino: int) -> bool:
        """Returns whether the inode may still be used though its last link has gone."""


class Leftovers:
    """Finds them for one node; `drop_later` gets inode number and data version of each."""

    def __init__(
        self,
        engine: Engine,
        files: DataFiles,
        holders: OrphanHolds,
        drop_later: Callable[[int, int], None],
    ) -> None:
        self._engine = engine
        self._files = files
        self._holders = holders
        self._drop_later = drop_later
        self._unused: dict[int, float] = {}
        """Reserved numbers without a data file, and when each was found so first."""

    async def run(self) -> None:
        """Searches every half minute, until cancelled."""
        sweeping = Persistence(log.warning, "what killed clients left is looked for again later")
        await sweeping.repeat(
            lambda: self.sweep(time.time_ns() - _AGE_NS), _PERIOD_S, first_s=_PERIOD_S
        )

    async def sweep(self, before_ns: int) -> None:
        """Drops the orphans that became so before this time and that nobody uses."""
        after = 0
        while inos := await self._engine.read(
            lambda t, after=after: lifecycle.orphans(t, after, _BATCH)  # type: ignore[misc]
        ):
            await self.drop(inos, before_ns)
            after = inos[-1]
            await trio.lowlevel.checkpoint()
        await self._abandon(before_ns)

    async def _abandon(self, before_ns: int) -> None:
        """Makes orphans of reserved numbers that have an unused data file, and releases those of
        which nobody makes a file."""
        after, now = 0, trio.current_time()
        unused: dict[int, float] = {}
        while inos := await self._engine.read(
            lambda t, after=after: reserved_inodes.reserved(t, after, _BATCH)  # type: ignore[misc]
        ):
            after = inos[-1]
            left: list[int] = []
            idle: list[int] = []
            for ino in inos:
                made = self._made_ns(ino)
                if made is not None:
                    if made < before_ns and not self._is_open(ino, 0):
                        left.append(ino)
                elif now - (since := self._unused.get(ino, now)) >= _UNUSED_S:
                    idle.append(ino)
                else:
                    unused[ino] = since
            await transact_each(self._engine, left, itself, partial(_abandon, time.time_ns()))
            await transact_each(self._engine, idle, itself, _release)
            await trio.lowlevel.checkpoint()
        self._unused = unused

    def _made_ns(self, ino: int) -> int | None:
        """Returns when the data file of a reserved number was made; None: there is none."""
        try:
            return self._files.stat(ino, 0).st_ctime_ns
        except FileNotFoundError:
            return None

    async def drop(self, inos: Iterable[int], before_ns: int) -> None:
        """Drops those of these inodes that became orphans before this time and that nobody uses."""
        wanted = [ino for ino in inos if not self._holders.keep(ino)]
        wanted = await self._engine.read(lambda t: [ino for ino in wanted if _concerns(t, ino)])
        inodes = await self._engine.read(lambda t: read_inodes(t, wanted))
        for ino, inode in zip(wanted, inodes, strict=True):
            if inode is None or inode.nlink or inode.ctime_ns >= before_ns:
                continue
            if not self._in_use(ino, inode):
                self._drop_later(ino, inode.version)

    def _in_use(self, ino: int, inode: Inode) -> bool:
        return stat.S_ISREG(inode.mode) and self._is_open(ino, inode.version)

    def _is_open(self, ino: int, version: int) -> bool:
        try:
            fd = self._files.open(ino, version, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        with closing(fd):
            return file_lease.is_unused(fd) is not True


def _abandon(now_ns: int, t: Transaction, left: list[int]) -> list[None]:
    reserved_inodes.abandon(t, left, now_ns)
    return []


def _release(t: Transaction, idle: list[int]) -> list[None]:
    reserved_inodes.release(t, idle)
    return []


def _concerns(t: Transaction, ino: int) -> bool:
    """Returns whether this node is to drop it."""
    if not t.node or t.get(keys.placement(ino, t.node)) is not None:
        return True
    return not placements.is_held(t, ino)
