"""The mounts of a node, and the changes by others that they are told of.

| changed by | mounts are told by | when |
|---|---|---|
| another process of this host | `follows`, `tell` | before that one is answered |
| another node | `tell_soon` | replaced contents at once, names as soon as `run` can |
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
        """Returns whether a namespace has one."""

    async def add(self, namespace: int, directory: Path) -> None:
        """Mounts a namespace at a directory."""

    async def set_read_only(self, namespace: int, *, read_only: bool) -> None:
        """Makes it refuse changes, or accept them again. Raises Busy, NotFound."""

    async def remove(self, namespace: int) -> None:
        """Unmounts it."""


class Mounts:
    """The present mounts. `local`: the embedded engine, in a cluster the replica's file."""

    def __init__(
        self, local: EmbeddedEngine, known: KnownDirectories, gone: GoneNames, holders: Holders
    ) -> None:
        self._local = local
        self._gone = gone
        self._known = known
        self._holders = holders
        self._changed: list[Changed] = []
        """Functions that each make a kernel forget what has changed, and return when it has."""
        self._replaced: list[Callable[[int], None]] = []
        """Functions told at once that this inode's data were replaced."""
        self._heard: list[Change] = []
        self._hearing = trio.Event()
        self.views: Views | None = None
        """The views, while there is a mount that can have some."""
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
        """Like `listening`, for the node's mount. It yields a function that takes the mount's
        description (a msgspec Struct), once that is known."""
        with self.listening(changed, replaced):
            try:
                yield self._describe
            finally:
                self.description = None

    @contextlib.contextmanager
    def listening(self, changed: Changed, replaced: Callable[[int], None]) -> Iterator[None]:
        """Tells a mount of changes while the block lasts: it should begin before the mount's first
        reply, which the kernel may remember. `replaced` is told at once of inodes whose content
        others replaced."""
        self._changed.append(changed)
        self._replaced.append(replaced)
        try:
            yield
        finally:
            self._changed.remove(changed)
            self._replaced.remove(replaced)

    @contextlib.contextmanager
    def viewed(self, views: Views) -> Iterator[None]:
        """Makes views available while the block lasts."""
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
        """Returns when every mount has forgotten these names. Raises Unavailable."""
        for changed in list(self._changed):
            await changed(changes)

    def remember(self, evicted: Sequence[Evicted]) -> None:
        """Records why these files' names went, for those who miss them."""
        for each in evicted:
            self._gone.add(each.entries, each.reason)

    async def tell_evicted(self, evicted: Sequence[Evicted]) -> None:
        """Like `tell`, for the names of evicted files. Raises Unavailable."""
        await self.tell(
            [Change(parent, name, each.ino) for each in evicted for parent, name in each.names]
        )

    async def tell_lost(self, evicted: Sequence[Evicted]) -> None:
        """Does what `remember` and `tell_evicted` do. Raises Unavailable."""
        self.remember(evicted)
        await self.tell_evicted(evicted)

    def tell_soon(self, written: Sequence[WrittenKey]) -> None:
        """Takes a commit of others that is in the replica: `run` tells of it."""
        for entry, reason in self._local.read_now(lambda t: lost(t, written)):
            self._gone.add([entry], reason)
        if changes := self.follows(written):
            self._heard += changes
            self._hearing.set()

    def follows(self, written: Sequence[WrittenKey]) -> list[Change]:
        """Returns the changes, committed by others, that mounts have to be told of; they know new
        contents when it returns."""
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
