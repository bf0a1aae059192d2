"""The connections of one node to the kernel: its mount, and views of single namespaces (`view`).
Each has a superblock, and therefore names, attributes and pages, of its own. What programs change
through one is forgotten in the kernel's memory of the others.

| changed through one | the others forget |
|---|---|
| a name comes, goes or stands for another inode | the name, the listing, the inode's attributes |
| attributes; a file is opened for writing | the inode's attributes |
| what was written is published | the inode's attributes, pages where it has any |

They are told behind the reply, within milliseconds; changes of the other doors come by `Mounts`.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio

from gateway.fuse.notify.invalidation import KernelNotifier
from kvfs.base.errors import Unavailable
from kvfs.base.retry import Persistence
from kvfs.tree.changes import Change

_MOST: Final = 16_384
"""Most changes that wait for one kernel; beyond, it forgets every name instead."""
log = logging.getLogger(__name__)

Forget = Callable[[Sequence[Change]], Awaitable[None]]


class Neighbour:
    """One connection."""

    def __init__(
        self,
        group: "Neighbours",
        shows: Callable[[int], bool],
        forget: Forget,
        forget_every_name: Callable[[], None],
        forget_attributes: Callable[[int], None],
    ) -> None:
        """`shows`: whether the connection shows an inode. `forget` returns when its kernel has
        forgotten what these changes made untrue, and raises Unavailable."""
        self._group = group
        self._shows = shows
        self._forget = forget
        self._forget_every_name = forget_every_name
        self._heard: dict[Change, None] = {}
        self._hearing = trio.Event()
        self._overheard = False
        """Whether there were more changes than could be kept."""
        self.forget_attributes = forget_attributes
        self.others: list[Neighbour] = []
        """The other connections. Empty if there are none, which costs a request no call."""

    def tell(self, *changes: Change) -> None:
        """Tells the others that callers of this connection have made these changes."""
        for other in self.others:
            other._hear(changes)

    def _hear(self, changes: Sequence[Change]) -> None:
        heard = self._heard
        for change in changes:
            if self._shows(change.parent or change.ino):
                heard[change] = None
        if len(heard) > _MOST:
            # Of what is left the listings are forgotten, and every name.
            self._overheard = True
            self._heard = dict.fromkeys(Change(each, b"", 0) for each in {c.parent for c in heard})
        if heard:
            self._hearing.set()

    async def run(self) -> None:
        """Makes its kernel forget what the others tell, until cancelled."""
        telling = Persistence(log.warning, "what was changed elsewhere may show late")
        while True:
            await self._hearing.wait()
            self._hearing = trio.Event()
            await telling.attempt(self._forget_heard)

    async def _forget_heard(self) -> None:
        """Makes its kernel forget the changes; what fails is tried again. Raises Unavailable."""
        changes, self._heard = self._heard, {}
        overheard, self._overheard = self._overheard, False
        try:
            if overheard:
                self._forget_every_name()
            await self._forget(list(changes))
        except Unavailable:
            self._heard = changes | self._heard
            self._overheard = self._overheard or overheard
            self._hearing.set()
            raise

    def leave(self) -> None:
        """Notes that the connection has ended."""
        self._group._leave(self)


class Neighbours:
    """The connections of one node. Used from the event loop."""

    def __init__(self) -> None:
        self._all: list[Neighbour] = []

    def join(
        self,
        shows: Callable[[int], bool],
        forget: Forget,
        forget_every_name: Callable[[], None],
        forget_attributes: Callable[[int], None],
    ) -> Neighbour:
        """Returns another connection; until it leaves, it is told of the others' changes."""
        made = Neighbour(self, shows, forget, forget_every_name, forget_attributes)
        self._all.append(made)
        self._introduce()
        return made

    def _leave(self, one: Neighbour) -> None:
        if one in self._all:
            self._all.remove(one)
            self._introduce()

    def _introduce(self) -> None:
        for each in self._all:
            each.others = [other for other in self._all if other is not each]

    def forget_attributes(self, ino: int) -> None:
        """Makes every kernel ask again for the attributes of an inode."""
        for each in self._all:
            each.forget_attributes(ino)


class MountMemory:
    """The memory of the mount's kernel and those of its views (`KernelMemory`): the
    mount's alone has pages, all have attributes."""

    def __init__(self, notifier: KernelNotifier, neighbours: Neighbours) -> None:
        """`notifier`: the mount's."""
        self.attributes: Final = neighbours.forget_attributes
        self.content_soon: Final = notifier.content_soon
        self._notifier = notifier

    async def content(self, ino: int) -> None:
        """Returns when they have forgotten a file's content and attributes. Raises Unavailable."""
        self.attributes(ino)
        await self._notifier.content(ino)
