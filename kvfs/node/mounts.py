"""The mounts of a node, and what they are told of what others changed.

| who changed it | what mounts are told | when |
|---|---|---|
| another process of this host | `follows`, `tell` | before that one is answered |
| another node | `tell_soon` | which contents are others now at once, names as soon as `run` can |
"""

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import trio

from kvfs.base.retry import Persistence
from kvfs.cluster.change_feed import WrittenKey, heard, lost
from kvfs.datastore.known_directories import KnownDirectories
from kvfs.datastore.removal_reasons import GoneNames
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.tree.changes import Change
from kvfs.tree.lifecycle import Evicted
from kvfs.vfs.inode_holders import Holders
from kvfs.vfs.miss_counters import Misses

log = logging.getLogger(__name__)

Changed = Callable[[Sequence[Change]], Awaitable[None]]


class Views(Protocol):
    """Mounts of single namespaces, beside the node's mount and belonging to it."""

    def __contains__(self, namespace: int) -> bool:
        """Returns whether it has one."""

    async def add(self, namespace: int, directory: Path, answers: Path) -> None:
        """Mounts a namespace at a directory. `answers`: a file that is locked while who serves from
        there may answer."""

    async def set_read_only(self, namespace: int, *, read_only: bool) -> None:
        """Has it refuse changes, or takes them again. Raises Busy, NotFound."""

    async def remove(self, namespace: int) -> None:
        """Unmounts it."""


class Mounts:
    """The mounts that there are now. `local`: the embedded engine, in a cluster the mirror's
    file."""

    def __init__(
        self, local: EmbeddedEngine, known: KnownDirectories, gone: GoneNames, holders: Holders
    ) -> None:
        self._local = local
        self._gone = gone
        self._known = known
        self._holders = holders
        self._changed: list[Changed] = []
        """Each makes its kernel forget what has changed, and returns when it has."""
        self._replaced: list[Callable[[int], None]] = []
        """Told at once: this inode's data are others now."""
        self._heard: list[Change] = []
        self._hearing = trio.Event()
        self.views: Views | None = None
        """While there is a mount that can have some."""
        self.view_changes = trio.Event()
        """Set, and replaced, when `views` comes or goes, and when a mount is described."""
        self.misses = Misses(gone)
        self.description: dict[str, Any] | None = None
        """The mount's description, in JSON's types, once that is known."""

    def __bool__(self) -> bool:
        return bool(self._changed)

    @contextlib.contextmanager
    def mounted(
        self, changed: Changed, replaced: Callable[[int], None]
    ) -> Iterator[Callable[[object], None]]:
        """Like `listening`, for the node's mount. What it yields takes what describes the mount (a
        msgspec Struct), once that is known."""
        with self.listening(changed, replaced):
            try:
                yield self._describe
            finally:
                self.description = None

    @contextlib.contextmanager
    def listening(self, changed: Changed, replaced: Callable[[int], None]) -> Iterator[None]:
        """While it lasts, a mount hears of changes: let it begin before the mount's first reply,
        which the kernel may remember. `replaced` is told at once of inodes whose content others
        replaced."""
        self._changed.append(changed)
        self._replaced.append(replaced)
        try:
            yield
        finally:
            self._changed.remove(changed)
            self._replaced.remove(replaced)

    @contextlib.contextmanager
    def viewed(self, views: Views) -> Iterator[None]:
        """While it lasts, views can be had."""
        self._set_views(views)
        try:
            yield
        finally:
            self._set_views(None)

    def _set_views(self, views: Views | None) -> None:
        self.views = views
        self._look_at_views()

    def _look_at_views(self) -> None:
        self.view_changes.set()
        self.view_changes = trio.Event()

    def _describe(self, info: object) -> None:
        self.description = msgspec.to_builtins(info)
        self._look_at_views()

    async def tell(self, changes: Sequence[Change]) -> None:
        """Every mount has forgotten these names when it returns. Raises Unavailable."""
        for changed in list(self._changed):
            await changed(changes)

    def remember(self, evicted: Sequence[Evicted]) -> None:
        """Whoever misses these files' names learns why they went."""
        for each in evicted:
            self._gone.add(each.entries, each.reason)

    async def tell_evicted(self, evicted: Sequence[Evicted]) -> None:
        """Like `tell`, the names of files that were evicted. Raises Unavailable."""
        await self.tell(
            [Change(parent, name, each.ino) for each in evicted for parent, name in each.names]
        )

    async def tell_lost(self, evicted: Sequence[Evicted]) -> None:
        """Like `remember` and `tell_evicted`. Raises Unavailable."""
        self.remember(evicted)
        await self.tell_evicted(evicted)

    def tell_soon(self, written: Sequence[WrittenKey]) -> None:
        """Others committed this, and it is in the replica: `run` tells of it."""
        for entry, reason in self._local.read_now(lambda t: lost(t, written)):
            self._gone.add([entry], reason)
        if changes := self.follows(written):
            self._heard += changes
            self._hearing.set()

    def follows(self, written: Sequence[WrittenKey]) -> list[Change]:
        """Returns the changes that mounts have to be told of, since others committed them; new
        contents they know when it returns."""
        found = self._local.read_now(
            lambda t: heard(t, written, self._known.__contains__, self._holders.keep)
        )
        for ino in found.contents:
            self._holders.let_go(ino)
            if self._holders.keep(ino):
                for replaced in self._replaced:
                    replaced(ino)
        return found.changes

    async def run(self) -> None:
        """Tells what `tell_soon` was given, until cancelled."""
        telling = Persistence(log.warning, "a mount may show what others changed, for a while")
        while True:
            await self._hearing.wait()
            self._hearing = trio.Event()
            changes, self._heard = self._heard, []
            await telling.attempt(partial(self.tell, changes), pause_s=0)
