"""Withdraws seals that other nodes put on files which are open for writing here.

Opening a file for writing withdraws its seal. But the node that published it last may be about to
seal it then: it seals its own data file, while the one here, which has the same version, is being
written. A file that is open for writing has no seal: otherwise doors beside the mount would take
the change in progress for damage, or give it out as the sealed content.

Invariants
- Only the version whose data file is here is unsealed: this node could not seal again what others
  have published since.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Final

import trio

from kvfs.base.errors import KvfsError
from kvfs.base.retry import Persistence
from kvfs.datastore.files import DataFiles
from kvfs.meta import keys
from kvfs.meta.engine import Engine, Transaction, itself, transact_each
from kvfs.meta.records import Flag, Inode
from kvfs.tree import lifecycle
from kvfs.tree.inodes import read_inodes

_INODE: Final = keys.INODE[0]
log = logging.getLogger(__name__)


class Unsealer:
    """The unsealer of one node. `writes`: whether a file is open for writing here, or about to
    be."""

    def __init__(self, engine: Engine, files: DataFiles, writes: Callable[[int], bool]) -> None:
        self._engine = engine
        self._files = files
        self._writes = writes
        self._heard: set[int] = set()
        self._hearing = trio.Event()

    def applied(self, changed: Iterable[bytes]) -> None:
        """Takes the keys that others changed by commits."""
        for key in changed:
            if key[0] == _INODE:
                ino = keys.unpack_u64(key, 1)
                if self._writes(ino):
                    self._heard.add(ino)
                    self._hearing.set()

    async def run(self) -> None:
        """Withdraws seals until cancelled."""
        persistence = Persistence(log.warning, "a file that is written here has another's seal")
        while True:
            await self._hearing.wait()
            self._hearing = trio.Event()
            await persistence.attempt(self._take_back_heard)

    async def is_written(self, ino: int) -> bool:
        """Returns whether the file is open for writing here: then it has no seal when this returns.
        Raises Unavailable, NoSpace."""
        if not self._writes(ino):
            return False
        await self._take_back([ino])
        return True

    async def _take_back_heard(self) -> None:
        inos, self._heard = list(self._heard), set()
        try:
            await self._take_back(inos)
        except KvfsError:
            self._heard.update(inos)
            self._hearing.set()
            raise

    async def _take_back(self, inos: list[int]) -> None:
        def fn(t: Transaction, part: list[int]) -> list[None]:
            for ino, inode in zip(part, read_inodes(t, part), strict=True):
                if inode is not None and self._writes(ino) and self._is_sealed_here(ino, inode):
                    lifecycle.reopen(t, ino)
            return []

        await transact_each(self._engine, inos, itself, fn)

    def _is_sealed_here(self, ino: int, inode: Inode) -> bool:
        return bool(inode.flags & Flag.SEALED) and self._files.has(ino, inode.version)
