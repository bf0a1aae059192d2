"""Files of the mount whose last close could not be recorded, since the engine was unreachable or
full, or the view through which they were written has gone. They stay open and are recorded as soon
as possible.

Their closes failed (EIO, ENOSPC), so the programs that wrote them do not count on the data; but
this host's mount shows what others do not, and their names are taken.

Invariants
- A late record goes past nobody: if another node has published since, or has taken the name, it is
  dropped (`Publishing`).
- Nobody gets such a file before it is recorded, except its writers: their close records it.
- Files that are still unrecorded when the daemon ends are in the state that a kill leaves.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from gateway.fuse.files.open_file import OpenFile
from kvfs.base.errors import KvfsError, NoSpace, Unavailable

_PAUSE_S: Final = 0.25
_PASSING: Final = (NoSpace, Unavailable)
log = logging.getLogger(__name__)


class Unrecorded:
    """The unrecorded closes of one mount. Each counts among its file's users."""

    def __init__(
        self,
        publish: Callable[[OpenFile], Awaitable[None]],
        close_unused: Callable[[OpenFile], None],
    ) -> None:
        self._publish = publish
        self._close_unused = close_unused
        self.files: dict[int, OpenFile] = {}
        """The files by inode. Other modules only read it."""
        self._arrived = trio.Event()

    def __contains__(self, ino: int) -> bool:
        return ino in self.files

    def add(self, file: OpenFile, error: KvfsError) -> None:
        """Takes a file whose last writer's close failed; if it may succeed another time, it is
        tried again."""
        if not isinstance(error, _PASSING) or file.ino in self.files:
            return
        log.warning("inode %x: its close is not recorded yet: %s", file.ino, error)
        self.keep(file)

    def keep(self, file: OpenFile) -> None:
        """Takes a file whose last writer's content is recorded soon."""
        if file.ino not in self.files:
            file.users += 1
            self.files[file.ino] = file
            self._arrived.set()

    async def record(self, file: OpenFile) -> None:
        """Records a file before a program gets it. Raises what `Publishing.publish` raises: after
        NoSpace or Unavailable it is tried again."""
        try:
            await self._publish(file)
        except _PASSING:
            raise
        except (KvfsError, OSError):
            self._end(file)
            raise
        self._end(file)

    async def run(self) -> None:
        """Records until cancelled."""
        while True:
            await self._arrived.wait()
            await self._try_each()
            if self.files:
                await trio.sleep(_PAUSE_S)
            else:
                self._arrived = trio.Event()

    async def close(self) -> None:
        """Records what can be recorded: the mount has gone."""
        await self._try_each()
        for file in list(self.files.values()):
            log.error("inode %x: its last close is not recorded", file.ino)
            self._end(file)

    async def _try_each(self) -> None:
        for file in list(self.files.values()):
            if file.writers:
                self._end(file)
                continue
            try:
                await self.record(file)
            except Unavailable:
                return
            except (KvfsError, OSError) as error:
                if not isinstance(error, _PASSING):
                    log.error("inode %x: its last close is not recorded: %s", file.ino, error)

    def _end(self, file: OpenFile) -> None:
        if self.files.pop(file.ino, None) is not None:
            file.users -= 1
            self._close_unused(file)
