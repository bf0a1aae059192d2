"""Opens of files that other nodes replaced before their data had arrived here.

An open names an inode, not a file. If that was replaced meanwhile (ESTALE), the kernel looks the
name up again and opens what is there now, once: if that, too, is replaced while it is fetched, the
program is told ESTALE for a name that was there all the time. Therefore the look-up fetches the
data: it can look the name up again as often as it likes. It keeps them open for that open, which
gets what the name led to: that this node has the data is known to others a little later, and where
they replace the file before, its record goes with its data.

Invariants
- What is kept for an open goes with it, with what the kernel knows of the inode, or after two
  seconds: the open follows its look-up at once, or never comes.
- Only the look-up that follows such an open, by the same thread, waits for data; for a bounded
  time, since it keeps programs from making files in that directory.
- In a cache namespace a caller is told no more than that the name is not there.
"""

import os
import stat
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import trio

from kvfs.base import detach
from kvfs.base.errors import Conflict, KvfsError, NotFound, Stale
from kvfs.datastore.files import DataFiles
from kvfs.meta.records import Inode
from kvfs.transfer.transfer import SMALL_BYTES
from kvfs.vfs.missing_data import is_torn
from kvfs.vfs.open import DataFetcher

_MOST: Final = 256
"""Threads that are remembered, and files that are kept open."""
_MOST_S: Final = 1.0
_KEPT_S: Final = 2.0
Found = tuple[int, Inode]


class KeptData(NamedTuple):
    """The data file that a look-up found, open for reading."""

    inode: Inode
    fd: int
    until: float
    """When it goes if nobody has opened it."""


class OvertakenOpens:
    """The overtaken opens of one mount."""

    def __init__(self, node: DataFetcher, files: DataFiles) -> None:
        self._node = node
        self._files = files
        self._threads: dict[int, None] = {}
        """Threads whose last open failed so, the one that failed last at the end."""
        self._kept: dict[int, KeptData] = {}
        """By inode, what look-ups keep open, the last at the end."""
        self._came = trio.Event()

    async def run(self) -> None:
        """Closes what is kept and not opened in time, until cancelled."""
        while True:
            await self._came.wait()
            self._came = trio.Event()
            while self._kept:
                ino, kept = next(iter(self._kept.items()))
                await trio.sleep_until(kept.until)
                if self._kept.get(ino) is kept:
                    self.forget(ino)

    def failed(self, thread: int) -> bool:
        """Notes that a thread's open failed. Returns whether the one before failed, too. 0: the
        thread is not seen."""
        if thread in self._threads:
            del self._threads[thread]
            return True
        if thread:
            self._threads[thread] = None
            if len(self._threads) > _MOST:
                del self._threads[next(iter(self._threads))]
        return False

    def ended(self, thread: int, ino: int = 0) -> None:
        """Notes that the thread has opened something, the inode, or that there is no such name."""
        if self._threads:
            self._threads.pop(thread, None)
        if self._kept:
            self.forget(ino)

    @property
    def is_any(self) -> bool:
        """Whether any thread's last open failed so."""
        return bool(self._threads)

    def __contains__(self, thread: int | None) -> bool:
        return thread in self._threads

    async def settled(self, found: Found, look: Callable[[], Awaitable[Found]]) -> Found:
        """Returns what a look-up found, or finds now: with its data here and kept for the open that
        follows, if they arrive in time. Raises what `look` raises."""
        if self._keep(*found):
            return found
        await detach.aside()
        with trio.move_on_after(_MOST_S):
            while await self._bring(found[0]) and not self._keep(*found):
                found = await look()
        return found

    def take(self, ino: int) -> KeptData | None:
        """Returns what is kept for an open of the inode; the caller closes it."""
        return self._kept.pop(ino, None) if self._kept else None

    def forget(self, ino: int) -> None:
        """Closes what is kept for an open of the inode: there is none."""
        kept = self.take(ino)
        if kept is not None:
            os.close(kept.fd)

    def forget_all(self) -> None:
        """Closes all that is kept."""
        for ino in list(self._kept):
            self.forget(ino)

    def _keep(self, ino: int, inode: Inode) -> bool:
        """Keeps a file's data for its open. Returns False if they are not here."""
        if not stat.S_ISREG(inode.mode) or inode.size > SMALL_BYTES:
            return True  # nothing is to be fetched, or not before the open
        try:
            fd = self._files.open(ino, inode.version, os.O_RDONLY)
        except OSError:
            return False
        self.forget(ino)
        if is_torn(inode, os.fstat(fd)):
            os.close(fd)
            return True  # the open sees that, and has it mended
        self._kept[ino] = KeptData(inode, fd, trio.current_time() + _KEPT_S)
        self._came.set()
        if len(self._kept) > _MOST:
            self.forget(next(iter(self._kept)))
        return True

    async def _bring(self, ino: int) -> bool:
        """Returns when the data are here, or the file was replaced meanwhile; False if something
        else keeps them away, which the open reports."""
        try:
            while await self._node.bring(ino) == "coming":
                pass
        except (Conflict, NotFound, Stale):
            return True
        except (KvfsError, OSError):
            return False
        return True
