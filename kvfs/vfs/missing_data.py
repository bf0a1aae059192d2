"""The treatment of a file whose data file is not what its record says.

| data file | cache namespace | durable namespace |
|---|---|---|
| missing, with nowhere to fetch it from | the record is forgotten: a miss | an error |
| not as long as its seal | evicted: a miss | set aside: an error |

Where another node has the file, its copy takes the place of the torn one.

Invariants
- A door that finds either state asks here and looks again: so no order in which doors are asked
  changes an answer.
- A file that is open for writing has no seal, so a change in progress is never taken for damage.
"""

import os
from collections.abc import Awaitable, Callable

from kvfs.datastore.files import DataFiles
from kvfs.meta.engine import Engine
from kvfs.meta.records import Flag, Inode
from kvfs.tree.inodes import read_inodes
from kvfs.vfs.volume import Volume


def is_torn(inode: Inode, stat: os.stat_result) -> bool:
    """Whether a data file cannot be what was sealed. An unsealed record may lag behind its file."""
    return bool(inode.flags & Flag.SEALED) and stat.st_size != inode.size


async def _never(_: int) -> bool:
    """Nobody writes."""
    return False


class Missing:
    """Settles such files for one node. `damaged` sees to a data file that is not what was sealed;
    `is_elsewhere` says whether data may be fetched from other nodes or a cold tier. `is_written`:
    whether a file is open for writing here; then it has no seal when that returns."""

    def __init__(
        self,
        engine: Engine,
        files: DataFiles,
        volume: Volume,
        damaged: Callable[[int, Inode], Awaitable[None]],
        is_elsewhere: Callable[[], bool],
        is_written: Callable[[int], Awaitable[bool]] = _never,
    ) -> None:
        self._engine = engine
        self._files = files
        self._volume = volume
        self._damaged = damaged
        self._is_elsewhere = is_elsewhere
        self._is_written = is_written

    async def settle(self, ino: int) -> None:
        """Bring record and data file together, as the table says; nothing where they agree.

        Cancelled: done or not, never half. Raises Unavailable, NoSpace, OSError.
        """
        inode = await self._record(ino)
        if inode is None or not inode.nlink or not inode.flags & Flag.PUBLISHED:
            return
        try:
            stat = self._files.stat(ino, inode.version)
        except FileNotFoundError:
            if not self._is_elsewhere():
                await self._volume.discard_lost(ino)
            return
        if not is_torn(inode, stat) or await self._is_written(ino):
            return
        if await self._record(ino) == inode:
            await self._damaged(ino, inode)

    async def _record(self, ino: int) -> Inode | None:
        return (await self._engine.read(lambda t: read_inodes(t, [ino])))[0]
