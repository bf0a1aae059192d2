"""Drops inodes that lost their last name, or never got one, and that nobody will ever drop: of
clients in other processes that were killed, and of those that the node could not be told of.

Invariants
- An orphan stays while the mount holds it, while any process has its data file open or mapped, and
  for a minute after it became one: a client makes a file's record before its data file.
- Where the filesystem grants no leases, nobody knows who has a data file open: then all is left to
  the next start.
"""

import logging
import os
import stat
import time
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import trio

from kvfs.background.persist import Persistence
from kvfs.meta.interface import Engine
from kvfs.meta.records import Inode
from kvfs.namespace import lifecycle
from kvfs.namespace.inodes import read_inodes
from kvfs.store import lease
from kvfs.store.files import DataFiles

log = logging.getLogger(__name__)
_PERIOD_S: Final = 30.0
_AGE_NS: Final = 60_000_000_000
_BATCH: Final = 256


class Holds(Protocol):
    """What the mount holds."""

    def keep(self, ino: int) -> bool:
        """Whether somebody may still use the inode though its last link has gone."""


class Leftovers:
    """Finds them for one node; `drop_later` gets inode number and data version of each."""

    def __init__(
        self,
        engine: Engine,
        files: DataFiles,
        holders: Holds,
        drop_later: Callable[[int, int], None],
    ) -> None:
        self._engine = engine
        self._files = files
        self._holders = holders
        self._drop_later = drop_later

    async def run(self) -> None:
        """Look every half minute, until cancelled."""
        sweeping = Persistence(log.warning, "what killed clients left is looked for again later")
        while True:
            await trio.sleep(_PERIOD_S)
            await sweeping.attempt(lambda: self.sweep(time.time_ns() - _AGE_NS))

    async def sweep(self, before_ns: int) -> None:
        """Drop the orphans that became so before this time and that nobody uses."""
        after = 0
        while inos := await self._engine.read(
            lambda t, after=after: lifecycle.orphans(t, after, _BATCH)  # type: ignore[misc]
        ):
            await self.drop(inos, before_ns)
            after = inos[-1]
            await trio.lowlevel.checkpoint()

    async def drop(self, inos: Iterable[int], before_ns: int) -> None:
        """Of these inodes, drop the orphans that became so before this time and that nobody
        uses."""
        wanted = [ino for ino in inos if not self._holders.keep(ino)]
        inodes = await self._engine.read(lambda t: read_inodes(t, wanted))
        for ino, inode in zip(wanted, inodes, strict=True):
            if inode is None or inode.nlink or inode.ctime_ns >= before_ns:
                continue
            if not self._in_use(ino, inode):
                self._drop_later(ino, inode.version)

    def _in_use(self, ino: int, inode: Inode) -> bool:
        if not stat.S_ISREG(inode.mode):
            return False
        try:
            fd = self._files.open(ino, inode.version, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        try:
            return lease.is_unused(fd) is not True
        finally:
            os.close(fd)
