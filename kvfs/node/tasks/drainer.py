"""Empties a node that is drained, and reports the obstacles.

| a file here | treatment |
|---|---|
| nodes that stay have enough copies, or as many as possible | this node's copy goes |
| another node takes it | the same |
| in a store that another node shares | that node takes it over, its data file stays where it is |
| of a cache, when nothing could be moved for half a minute | it is evicted, unless it is in use |
| durable, and nobody takes it | it stays; it is tried again, and the lack of space is reported |

Invariants
- No copy goes here before enough others are recorded.
- Nothing is evicted while no other node is there: it may be back soon.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import trio

from kvfs.base.media import is_shared
from kvfs.base.retry import Persistence
from kvfs.meta import keys
from kvfs.meta.records import Flag
from kvfs.node.tasks.copier import Copies
from kvfs.policy import placement, replica_repair
from kvfs.policy.drain_obstacles import Obstacles
from kvfs.tree.copies import placements, replica_counts
from kvfs.tree.copies.replica_counts import HeldFile

log = logging.getLogger(__name__)
_PAUSE_S: Final = 1.0
_STALLED_S: Final = 30.0
"""Longer than a lease: a node that was away for a moment is there again, or counts as lost."""
_PAGE: Final = 256

Evict = Callable[[int], Awaitable[bool]]
"""Evicts a cache's file that only this node has and nobody uses; returns whether it did. Raises
KvfsError, OSError."""


class Draining:
    """The draining of one node. `afford` waits until so many bytes may be moved; `drained` reports
    that nothing is left here."""

    def __init__(
        self,
        made: Copies,
        evict: Evict,
        afford: Callable[[int], Awaitable[None]],
        drained: Callable[[], Awaitable[None]],
    ) -> None:
        self._copies = made
        self._me = made.me
        self._node = keys.pack_node(made.me)
        self._evict = evict
        self._afford = afford
        self._drained = drained
        self._left: int | None = None
        self._moved_at: float | None = None
        """The time when a file last found another place, or the drain began; None: it has not."""
        self.obstacle = ""
        """The reason why the last pass did not empty the node; empty: there is none."""
        self.counters = {"drained_files": 0}

    def report(self) -> dict[str, Any]:
        """Returns the part of the node's status."""
        return {"draining_files_left": self._left, "draining_obstacle": self.obstacle}

    async def run(self) -> None:
        """Drains until cancelled."""
        draining = Persistence(log.warning, "the node cannot be drained of a file now")
        while True:
            own = self._copies.snapshot().get(self._me)
            if own is not None and own.alive and own.state == "draining":
                await draining.attempt(self._pass)
            else:
                self._left, self._moved_at, self.obstacle = None, None, ""
            await trio.sleep(_PAUSE_S)

    async def _pass(self) -> None:
        """Gives away the files here; when nothing is left, reports it."""
        if self._moved_at is None:
            self._moved_at = trio.current_time()
        after = left = 0
        found = Obstacles()
        engine = self._copies.engine
        while inos := await engine.read(
            lambda t, after=after: placements.held_by(t, self._node, after, _PAGE)  # type: ignore[misc]
        ):
            after = inos[-1]
            files = await engine.read(lambda t, inos=inos: replica_counts.look(t, inos))  # type: ignore[misc]
            found.in_use += len(inos) - len(files)
            left += len(inos) - len(files)
            for file in files:
                left += not await self._see_to(file, found)
            self._left = left
        self.obstacle = found.describe(self._copies.snapshot(), self._me)
        if not left:
            await self._drained()

    async def _see_to(self, file: HeldFile, found: Obstacles) -> bool:
        """Returns whether this node has nothing of the file any more; else `found` gets the
        reason."""
        if is_shared(file.namespace.media):
            return await self._hand_over(file, found)
        refusals: dict[int, str] = {}
        made = await self._more(file, refusals)
        # Fewer than are wanted may be all that the others can hold.
        if any(host.is_open for host in self._copies.snapshot().alive([*file.holders, *made])):
            gone = await self._let_go(file)
            found.in_use += not gone
            if gone:
                self._moved_at = trio.current_time()
            return gone
        if file.namespace.kind == "cache" and self._is_stalled():
            gone = await self._let_go(file) or await self._evict(file.ino)
            found.in_use += not gone
            return gone
        if refusals:
            found.refused(refusals)
        else:
            found.homeless(file.inode.size, file.namespace.media)
        return False

    async def _hand_over(self, file: HeldFile, found: Obstacles) -> bool:
        """Returns whether another node takes over a file in a store that both share."""
        refusals: dict[int, str] = {}
        if not file.inode.flags & Flag.SEALED:
            found.in_use += 1  # soon it is
            return False
        if await self._copies.hand_over(file, refusals):
            self.counters["drained_files"] += 1
            self._moved_at = trio.current_time()
            return True
        if refusals:
            found.refused(refusals)
        else:
            found.shared += 1
        return False

    async def _more(self, file: HeldFile, refusals: dict[int, str]) -> list[int]:
        """Makes others take the file, as many as it lacks; returns those that did. A file for which
        no node has space costs no time."""
        snapshot, size, media = self._copies.snapshot(), file.inode.size, file.namespace.media
        missing = replica_repair.judge(snapshot, file.ino, file.holders, file.wanted).missing
        if not missing or not placement.choose(
            snapshot, file.ino, size, 1, holders=file.holders, media=media
        ):
            return []
        await self._afford(size)
        return await self._copies.make(file, missing, refusals=refusals)

    async def _let_go(self, file: HeldFile) -> bool:
        gone = await self._copies.brings.let_go(file.ino)
        self.counters["drained_files"] += gone
        return gone

    def _is_stalled(self) -> bool:
        """Returns whether no file found another place for long, though others are there."""
        if self._moved_at is None or trio.current_time() - self._moved_at < _STALLED_S:
            return False
        return any(host.number != self._me for host in self._copies.snapshot().open)
