"""Changes behind the kernel's back: entries, inodes and listings that it must forget, and orphans
to drop.

| the kernel | what is done |
|---|---|
| takes each name within the deadline | the names are forgotten one by one |
| does not: a directory's lock is held for long | its caches are dropped: every name at once |
| goes on holding it | the same for each change, until the first name was taken |
| cannot drop them (before Linux 6.16) | Unavailable; they are forgotten when the lock is free |
"""

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Sequence
from typing import Final

import trio

from gateway.fuse.channel.device import Notifier
from gateway.fuse.operations import Operations
from kvfs.base.errors import Unavailable
from kvfs.meta.engine import Engine
from kvfs.tree import inodes
from kvfs.tree.changes import Change
from kvfs.vfs import kernel_notify

_DEADLINE_S: Final = 5.0
_DROP_DEADLINE_S: Final = 2.0
"""Both together are less than a client waits."""
_TOO_SLOW: Final = "the kernel did not take an invalidation in time"
log = logging.getLogger(__name__)


class KernelNotifier:
    """Tells the kernel of one mount to forget, by threads that write to its device.

    `drops`: the kernel can forget all names at once. `numbers` returns the numbers of the kernel's
    inodes of a file, the present one first.
    """

    def __init__(
        self,
        device: int,
        *,
        drops: bool,
        numbers: Callable[[int], Sequence[int]] = lambda ino: (ino,),
    ) -> None:
        self.device = device
        """Its descriptor."""
        self._drops = drops
        self._notifier = Notifier(device)
        self._held: Notifier | None = None
        """A notifier that the kernel holds in a lock, or once held."""
        self._token = trio.lowlevel.current_trio_token()
        self._numbers = numbers
        self._closed = False
        """Whether it is closed: from then on there is nothing to forget, and the device's number
        may be another's."""

    def _say(self, message: bytes) -> None:
        if not self._closed:
            self._notifier.tell(message)

    def _say_now(self, message: bytes) -> None:
        if not self._closed:
            with contextlib.suppress(OSError):  # it does not know the inode, or the mount has gone
                os.write(self.device, message)

    def entry(self, parent: int, name: bytes) -> None:
        """Makes the kernel forget the name, and its absence too. Raises Unavailable."""
        held = self._is_held()
        self._say(kernel_notify.EVERY_NAME if held else kernel_notify.entry(parent, name))

    def removed(self, parent: int, name: bytes, ino: int) -> None:
        """Like `entry`, for a name that was the inode's last. Raises Unavailable."""
        if self._is_held():
            self._say(kernel_notify.EVERY_NAME)
        else:
            self._say(kernel_notify.removed(parent, name, self._numbers(ino)[0]))

    def inode(self, ino: int, *, pages: bool) -> None:
        """Makes the kernel forget the attributes; with `pages` a directory's listing too. Raises
        Unavailable."""
        for number in self._numbers(ino):
            self._say(kernel_notify.inode(number, pages=pages))

    def attributes(self, ino: int) -> None:
        """Makes the kernel forget the attributes of an inode that is in use before it returns: that
        waits for no lock."""
        for number in self._numbers(ino):
            self._say_now(kernel_notify.inode(number, pages=False))

    def listing(self, ino: int) -> None:
        """Does the same for the parts of a directory's listing that the kernel keeps, where it
        keeps no whole one: that waits for no lock either."""
        self._say_now(kernel_notify.inode(ino, pages=True))

    def content_soon(self, ino: int) -> None:
        """Makes the kernel forget a file's content and attributes. Raises Unavailable."""
        self.inode(ino, pages=True)

    async def content(self, ino: int) -> None:
        """Returns when the kernel has forgotten a file's content and attributes. Raises Unavailable
        after a deadline."""
        self.inode(ino, pages=True)
        await self.settled()

    async def forget(self, changes: Sequence[Change], gone: Collection[int]) -> None:
        """Returns when the kernel has forgotten every named entry, and what follows from it.
        `gone`: the inodes among them whose last link went. Raises Unavailable.

        Directories are named too: a name that the kernel does not know is in none of its entries,
        but missing in its listing."""
        for parent, name, ino in changes:
            if name and ino in gone:
                self.removed(parent, name, ino)
            elif name:
                self.entry(parent, name)
            if ino:
                self.inode(ino, pages=False)
        for parent in {change.parent for change in changes if change.parent}:
            self.inode(parent, pages=True)
        await self.settled()

    def every_name(self) -> None:
        """Makes the kernel forget all names, if it can. Raises Unavailable."""
        if self._drops:
            self._say(kernel_notify.EVERY_NAME)
        else:
            log.error("a mount may show names that went until it is mounted anew")

    async def settled(self) -> None:
        """Returns when the kernel has taken all earlier messages, or every name was dropped because
        that took too long, or the mount has gone. Raises Unavailable after a deadline."""
        notifier = self._notifier
        if await self._taken(_DEADLINE_S) or self._closed:
            return
        if self._notifier is notifier:
            self._start_over()
        if not await self._taken(_DROP_DEADLINE_S):
            raise Unavailable(_TOO_SLOW)

    async def close(self) -> bool:
        """Ends the threads. Returns whether they ended in time. Later messages go nowhere."""
        self._closed = True
        threads = [each for each in (self._notifier, self._held) if each is not None]
        ended = [await trio.to_thread.run_sync(each.close, _DEADLINE_S) for each in threads]
        return all(ended)

    def _is_held(self) -> bool:
        return self._held is not None and not self._held.ended

    def _start_over(self) -> None:
        """Drops every name and goes on with a new thread; the old one is left in the lock. At most
        one is left so: the messages of the new one wait for no lock."""
        if not self._drops or self._is_held():
            raise Unavailable(_TOO_SLOW)
        log.warning("%s: its caches are dropped", _TOO_SLOW)
        self._held = self._notifier
        # Whoever holds the lock may list the directory, and link what the listing said before.
        queued = self._held.abandon(kernel_notify.EVERY_NAME)
        left = [each for each in queued if not kernel_notify.is_of_entry(each[0])]
        self._notifier = Notifier(self.device, [(kernel_notify.EVERY_NAME, None), *left])

    async def _taken(self, deadline_s: float) -> bool:
        if self._closed:
            return True
        done = trio.Event()
        self._notifier.flush(lambda: self._tell(done))
        with trio.move_on_after(deadline_s):
            await done.wait()
        return done.is_set()

    def _tell(self, done: trio.Event) -> None:
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(done.set)


class Invalidator:
    """Applies changes made by other processes of the node, and by eviction, to one mount."""

    def __init__(self, operations: Operations, notifier: KernelNotifier) -> None:
        self._operations = operations
        self._notifier = notifier

    async def changed(self, changes: Sequence[Change]) -> None:
        """Like `KernelNotifier.forget`; inodes that lost their last link are dropped once nobody
        holds them. Raises Unavailable."""
        lost_link = self._operations.orphans.lost_link
        gone = {ino for _, _, ino in changes if ino and await lost_link(ino)}
        await self._notifier.forget(changes, gone)

    async def changed_beside(self, changes: Sequence[Change]) -> None:
        """Does the same for changes made through another connection of this node, which sees to the
        inodes."""
        gone = await unlinked(self._operations.engine, changes)
        await self._notifier.forget(changes, gone)


async def unlinked(engine: Engine, changes: Sequence[Change]) -> set[int]:
    """Returns the inodes among these that have no link any more. Raises Unavailable."""
    inos = [ino for _, _, ino in changes if ino]
    if not inos:
        return set()
    found = await engine.read(lambda t: inodes.read_inodes(t, inos))
    return {ino for ino, inode in zip(inos, found, strict=True) if inode is None or not inode.nlink}
