"""What changed behind the kernel's back: entries, inodes and listings that it must forget, and
orphans to drop.

Two notifiers: the device's own (a thread, see `device.Notifier`) and libfuse's, for libfuse mode.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import pyfuse3
import trio

from gateway.fuse.device import Notifier
from gateway.fuse.operations import Operations
from kvfs.changes import Change
from kvfs.errors import Unavailable

_THREADS: Final = 4
_DEADLINE_S: Final = 5.0
_TOO_SLOW: Final = "the kernel did not take an invalidation in time"


class KernelNotifier(Protocol):
    """Tells the kernel to forget."""

    def entry(self, parent: int, name: bytes) -> None:
        """The kernel forgets the name, its absence too."""

    def inode(self, ino: int, *, pages: bool) -> None:
        """The kernel forgets the attributes; with `pages` a directory's listing too."""

    async def settled(self) -> None:
        """Returns when all that was said before has been taken. Raises Unavailable after a
        deadline."""


class DeviceNotifier:
    """Notifications written to /dev/fuse by a thread."""

    def __init__(self, device: int) -> None:
        self._notifier = Notifier(device)
        self._token = trio.lowlevel.current_trio_token()

    def entry(self, parent: int, name: bytes) -> None:
        self._notifier.invalidate_entry(parent, name)

    def inode(self, ino: int, *, pages: bool) -> None:
        self._notifier.invalidate_inode(ino, pages=pages)

    async def settled(self) -> None:
        done = trio.Event()
        self._notifier.flush(lambda: self._tell(done))
        with trio.move_on_after(_DEADLINE_S) as scope:
            await done.wait()
        if scope.cancelled_caught:
            raise Unavailable(_TOO_SLOW)

    def _tell(self, done: trio.Event) -> None:
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(done.set)

    async def close(self) -> bool:
        """End the thread; whether it ended in time."""
        return await trio.to_thread.run_sync(self._notifier.close, _DEADLINE_S)


class LibfuseNotifier:
    """libfuse's own calls, in a worker thread: they wait for locks of the kernel, which it may hold
    until the event loop has answered."""

    def __init__(self) -> None:
        self._pending: list[Callable[[], None]] = []
        self._limiter = trio.CapacityLimiter(_THREADS)
        """Of its own: what hangs in the kernel must not take the threads of everybody else."""

    def entry(self, parent: int, name: bytes) -> None:
        where, which = pyfuse3.InodeT(parent), pyfuse3.FileNameT(name)
        self._pending.append(lambda: pyfuse3.invalidate_entry(where, which))

    def inode(self, ino: int, *, pages: bool) -> None:
        which = pyfuse3.InodeT(ino)
        self._pending.append(lambda: pyfuse3.invalidate_inode(which, attr_only=not pages))

    async def settled(self) -> None:
        pending, self._pending = self._pending, []
        with trio.move_on_after(_DEADLINE_S) as scope:
            await trio.to_thread.run_sync(
                _invalidate, pending, abandon_on_cancel=True, limiter=self._limiter
            )
        if scope.cancelled_caught:
            raise Unavailable(_TOO_SLOW)


def _invalidate(pending: Sequence[Callable[[], None]]) -> None:
    for invalidate in pending:
        with contextlib.suppress(FileNotFoundError):  # the kernel does not know it
            invalidate()


class Invalidator:
    """Applies changes made by other processes of the node, and by eviction, to one mount."""

    def __init__(self, operations: Operations, notifier: KernelNotifier) -> None:
        self._operations = operations
        self._notifier = notifier

    async def changed(self, changes: Sequence[Change]) -> None:
        """The kernel has forgotten every named entry, and what follows from it, when this returns;
        inodes that lost their last link are dropped once nobody holds them. Raises Unavailable.

        Directories are named too: a name that the kernel does not know is in none of its entries,
        but missing in its listing.
        """
        for change in changes:
            if change.name:
                self._notifier.entry(change.parent, change.name)
            if change.ino:
                self._notifier.inode(change.ino, pages=False)
                await self._operations.lost_link(change.ino)
        for parent in {change.parent for change in changes}:
            self._notifier.inode(parent, pages=True)
        await self._notifier.settled()
