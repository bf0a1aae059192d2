"""Opens of files that other nodes replaced before their data had arrived here.

An open names an inode, not a file. If that was replaced meanwhile (ESTALE), the kernel looks the
name up again and opens what is there now, once: if that, too, is replaced while it is fetched, the
program is told ESTALE for a name that was there all the time. Therefore the look-up fetches the
data: it can look the name up again as often as it likes.

Invariants
- Only the look-up that follows such an open, by the same thread, waits for data; for a bounded
  time, since it keeps programs from making files in that directory.
- In a cache namespace a caller is told no more than that the name is not there.
"""

import stat
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from kvfs.base import detach
from kvfs.base.errors import Conflict, KvfsError, NotFound, Stale
from kvfs.datastore.files import DataFiles
from kvfs.meta.records import Inode
from kvfs.transfer.transfer import SMALL_BYTES
from kvfs.transfer.transfers import Transfers

_THREADS: Final = 256
_MOST_S: Final = 1.0
Found = tuple[int, Inode]


class OvertakenOpens:
    """The overtaken opens of one mount."""

    def __init__(self, transfers: Transfers, files: DataFiles) -> None:
        self._transfers = transfers
        self._files = files
        self._threads: dict[int, None] = {}
        """Threads whose last open failed so, the one that failed last at the end."""

    def failed(self, thread: int) -> bool:
        """Notes that a thread's open failed. Returns whether the one before failed, too. 0: the
        thread is not seen."""
        if thread in self._threads:
            del self._threads[thread]
            return True
        if thread:
            self._threads[thread] = None
            if len(self._threads) > _THREADS:
                del self._threads[next(iter(self._threads))]
        return False

    def ended(self, thread: int) -> None:
        """Notes that the thread has opened something, or that there is no such name."""
        if self._threads:
            self._threads.pop(thread, None)

    def __contains__(self, thread: int | None) -> bool:
        return thread in self._threads

    async def settled(self, found: Found, look: Callable[[], Awaitable[Found]]) -> Found:
        """Returns what a look-up found, or finds now: with its data here, if they arrive in time.
        Raises what `look` raises."""
        if self._needs_no_data(*found):
            return found
        await detach.aside()
        with trio.move_on_after(_MOST_S):
            while not await self._bring(*found):
                found = await look()
        return found

    def _needs_no_data(self, ino: int, inode: Inode) -> bool:
        if not stat.S_ISREG(inode.mode) or inode.size > SMALL_BYTES:
            return True
        return self._files.has(ino, inode.version)

    async def _bring(self, ino: int, inode: Inode) -> bool:
        """Returns False if the file was replaced meanwhile. Its open reports whatever else keeps
        its data away."""
        if self._needs_no_data(ino, inode):
            return True
        try:
            await self._transfers.begin(ino, inode).whole()
        except (Conflict, NotFound, Stale):
            return False
        except (KvfsError, OSError):
            pass
        return True
