"""The files that are to be sealed, and when each of them is due.

A file is due when it has settled. One that could not be sealed is tried again, ever more rarely,
for as long as the engine lists it. Files of a cache namespace wait until nothing was published for
a moment, though no longer than ten seconds: reading them competes with programs that use the disk.

Invariant
- What waits is bounded; the engine lists all that is not sealed, and brings back what has no room.
"""

from collections.abc import Set
from typing import Final

import trio

from kvfs.datastore.index import Index
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.records import Flag, namespace_of
from kvfs.tree import lifecycle, namespaces
from kvfs.tree.copies import placements
from kvfs.tree.inodes import read_inodes

_SCAN_PERIOD_S: Final = 5.0
_SETTLED_S: Final = 1.0
"""Time since the last publish of the file: one that is rewritten at once is not worth a
checksum."""
_CALM_S: Final = 0.5
_PATIENCE_S: Final = 10.0
_LOOKED_AT: Final = 1024
_WAITING_LIMIT: Final = 16_384
_MAX_DELAY_S: Final = 60.0
_MAPPED_DELAY_S: Final = 4.0
"""Delay for a file that is mapped: nobody tells when its last mapping goes, and stores through it
are not published yet."""


class _Wait:
    """A file that is to be sealed."""

    __slots__ = ("delay_s", "due", "since")

    def __init__(self, now: float, delay_s: float = _SETTLED_S) -> None:
        self.since = now
        self.delay_s = delay_s
        self.due = now + delay_s


class SealQueue:
    """The queue of one node."""

    def __init__(self, engine: Engine, index: Index) -> None:
        self._engine = engine
        self._index = index
        self._waiting: dict[int, _Wait] = {}
        self._last_publish = 0.0
        self._next_scan = 0.0
        self._scanned = 0
        self.unpublished: set[int] = set()
        """Files that the sealer is at, and that were not published since it put them here."""

    def __contains__(self, ino: object) -> bool:
        return ino in self._waiting

    @property
    def calm_at(self) -> float:
        """The time at which nothing will have been published for a moment, by trio's clock."""
        return self._last_publish + _CALM_S

    def published(self, ino: int, version: int, blocks: int) -> None:
        """Notes that a file was published: it takes its place in the access order, and is due when
        it has settled."""
        self._index.add(ino, version, blocks)
        self.unpublished.discard(ino)
        now = trio.current_time()
        self._last_publish = now
        if len(self._waiting) < _WAITING_LIMIT or ino in self._waiting:
            self._waiting[ino] = _Wait(now)

    def is_unsettled(self, ino: int) -> bool:
        """Returns whether a file was published just now."""
        wait = self._waiting.get(ino)
        return wait is not None and trio.current_time() < wait.since + _SETTLED_S

    async def scan(self, now: float) -> None:
        """Takes up files that the engine lists and nobody told of: from before the start, by other
        processes, or beyond the bound of the memory."""
        if now < self._next_scan or len(self._waiting) >= _WAITING_LIMIT // 2:
            return
        after = self._scanned
        found = await self._engine.read(lambda t: lifecycle.unsealed(t, after, 1024))
        missing = [ino for ino in found if ino not in self._waiting]
        # What was removed a moment ago has left the index, and is not to come back.
        here = await self._engine.read(lambda t: placements.read_here(t, missing))
        for ino, inode in zip(missing, here, strict=True):
            if inode is not None and inode.flags & Flag.PUBLISHED:
                self._index.add_missing(ino, inode.version, inode.blocks)
                self._waiting[ino] = _Wait(now)
        self._scanned = found[-1] if found else 0
        if not found:
            self._next_scan = now + _SCAN_PERIOD_S

    async def due(self, now: float, most: int) -> list[int]:
        """Returns up to `most` of the files to be tried now, those that wait longest first."""
        due = [ino for ino, wait in self._waiting.items() if wait.due <= now]
        if now < self.calm_at:
            kinds = await self._engine.read(lambda t: cache_namespaces(t, due))
            due = [
                ino
                for ino in due
                if namespace_of(ino) not in kinds or now - self._waiting[ino].since >= _PATIENCE_S
            ]
        return await self._without_removed(due[:_LOOKED_AT], most)

    def tried(self, tried: list[int], sealed: set[int], mapped: Set[int]) -> None:
        """Notes which files were tried, which of them were sealed, and which are mapped: those that
        were not sealed are due again later, ever later."""
        now = trio.current_time()
        for ino in tried:
            wait = self._waiting.get(ino)
            if wait is None or (ino not in sealed and now < wait.due):
                continue
            del self._waiting[ino]
            if ino not in sealed:
                longest_s = _MAPPED_DELAY_S if ino in mapped else _MAX_DELAY_S
                again = _Wait(now, min(wait.delay_s * 2, longest_s))
                again.since = wait.since
                self._waiting[ino] = again

    # ---- inside

    async def _without_removed(self, due: list[int], most: int) -> list[int]:
        """Returns a batch of those that have a name: files that are replaced again and again must
        not hold up the others. The engine lists those that get a name later."""
        named: list[int] = []
        for start in range(0, len(due), most):
            part = due[start : start + most]
            inodes = await self._engine.read(lambda t, part=part: read_inodes(t, part))  # type: ignore[misc]
            for ino, inode in zip(part, inodes, strict=True):
                if inode is not None and inode.nlink:
                    named.append(ino)
                else:
                    del self._waiting[ino]
            if len(named) >= most:
                break
        return named[:most]


def cache_namespaces(t: Transaction, inos: list[int]) -> set[int]:
    """Returns the cache namespaces of these files."""
    numbers = {namespace_of(ino) for ino in inos}
    known = namespaces.records(t)
    return {number for number in numbers & known.keys() if known[number].kind == "cache"}
