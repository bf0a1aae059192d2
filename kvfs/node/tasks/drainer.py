"""Empties a node that is drained, and reports the obstacles.

| a file here | treatment |
|---|---|
| nodes that stay have enough copies, or as many as possible | this node's copy goes |
| another node takes it | the same |
| in a store that another node shares | that node takes it over, its data file stays where it is |
| of a cache, when nothing could be moved for half a minute | it is evicted, unless it is in use |
| of a namespace whose names are each node's own, and another node takes it | it is evicted then |
| of such a one, when nothing was moved for half a minute | it is evicted, unless it is in use |
| durable, and nobody takes it | it stays; it is tried again, and the lack of space is reported |

Invariants
- No copy goes here before enough others are recorded.
- Nothing is evicted while no other node is there: it may be back soon.
- Nothing goes here once this node knows that the drain was stopped, however long the pass takes:
  what is written from then on stays. Others may still take what they are offered at that moment.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple

import trio

from kvfs.base.media import is_shared
from kvfs.base.retry import Persistence
from kvfs.meta import keys
from kvfs.meta.records import Flag, namespace_of
from kvfs.node.tasks.copier import Copies
from kvfs.policy import placement, replica_repair
from kvfs.policy.drain_report import DrainProgress, Obstacles
from kvfs.tree.copies import placements, replica_counts
from kvfs.tree.copies.replica_counts import HeldFile
from kvfs.tree.inodes import read_inodes

log = logging.getLogger(__name__)
_PAUSE_S: Final = 1.0
_STALLED_S: Final = 30.0
"""Longer than a lease: a node that was away for a moment is there again, or counts as lost."""
_PAGE: Final = 256

_TOLD_S: Final = 0.3
"""Time after which all nodes know that another one has a name."""
_OWN_AT_ONCE: Final = 2048


class TakenBlocks(NamedTuple):
    """The outcome of an offer of files of namespaces whose names are each node's own."""

    taken: dict[int, bytes]
    """The files that another node has now, and the checksum of what it has."""
    homeless: list[tuple[int, list[str]]]
    """Size and media of those that nobody has room for."""


Offer = Callable[[Sequence[int], Callable[[int], Awaitable[None]]], Awaitable[TakenBlocks]]
"""Has other nodes take such files; the second one waits until so many bytes may be moved."""
Evict = Callable[[int], Awaitable[bool]]
"""Evicts a cache's file that only this node has and nobody uses; returns whether it did. Raises
KvfsError, OSError."""


class _Stopped(Exception):
    """This node is not to be emptied any more, or has lost its lease: the pass ends."""


class Draining:
    """The draining of one node. `afford` waits until so many bytes may be moved; `drained` reports
    that nothing is left here."""

    def __init__(
        self,
        made: Copies,
        evict: Evict,
        offer: Offer,
        afford: Callable[[int], Awaitable[None]],
        drained: Callable[[], Awaitable[None]],
    ) -> None:
        self._copies = made
        self._me = made.me
        self._node = keys.pack_node(made.me)
        self._evict = evict
        self._offer = offer
        self._afford = afford
        self._drained = drained
        self._taken: dict[int, bytes] = {}
        """Files that another node has, with this checksum, and that go here soon."""
        self._progress: DrainProgress | None = None
        """None: this node is not being emptied."""
        self._moved_at: float | None = None
        """The time when a file last found another place, or the drain began; None: it has not."""
        self.obstacle = ""
        """The reason why the last pass did not empty the node; empty: there is none."""
        self.counters = {"drained_files": 0}

    def report(self) -> dict[str, Any]:
        """Returns the part of the node's status."""
        progress = self._progress
        return {
            "draining": None if progress is None else progress.report(trio.current_time()),
            "draining_obstacle": self.obstacle,
        }

    async def run(self) -> None:
        """Drains until cancelled."""
        draining = Persistence(log.warning, "the node cannot be drained of a file now")
        while True:
            try:
                self._check()
                await draining.attempt(self._pass)
            except _Stopped:
                self._progress, self._moved_at, self.obstacle = None, None, ""
                self._taken = {}
            await trio.sleep(_PAUSE_S)

    def _check(self) -> None:
        """Raises _Stopped unless this node is to be emptied, as far as it knows."""
        own = self._copies.snapshot().get(self._me)
        if own is None or not own.alive or own.state != "draining":
            raise _Stopped

    async def _pass(self) -> None:
        """Gives away the files here; when nothing is left, reports it. Raises _Stopped."""
        if self._moved_at is None or self._progress is None:
            self._moved_at = trio.current_time()
            self._progress = DrainProgress(*await self._count(), self._moved_at)
        after = left = 0
        found = Obstacles()
        engine = self._copies.engine
        while inos := await engine.read(
            lambda t, after=after: placements.held_by(t, self._node, after, _PAGE)  # type: ignore[misc]
        ):
            self._check()
            after = inos[-1]
            own = [ino for ino in inos if engine.is_local(namespace_of(ino))]
            left += await self._give_own(own, found) if own else 0
            inos = [ino for ino in inos if ino not in own]
            files = await engine.read(lambda t, inos=inos: replica_counts.look(t, inos))  # type: ignore[misc]
            found.in_use += len(inos) - len(files)
            left += len(inos) - len(files)
            for file in files:
                if await self._see_to(file, found):
                    self._progress.gone(file.inode.size)
                else:
                    left += 1
        left += await self._drop_taken(found)
        self.obstacle = found.describe(self._copies.snapshot(), self._me)
        if not left:
            await self._drained()
        else:
            self._progress.found(*await self._count())

    async def _count(self) -> tuple[int, int]:
        """Returns how many files this node has, and their bytes."""
        after = files = size = 0
        while inos := await self._copies.engine.read(
            lambda t, after=after: placements.held_by(t, self._node, after, _PAGE)  # type: ignore[misc]
        ):
            after = inos[-1]
            inodes = await self._copies.engine.read(lambda t, inos=inos: read_inodes(t, inos))  # type: ignore[misc]
            files += len(inos)
            size += sum(inode.size for inode in inodes if inode is not None)
            await trio.lowlevel.checkpoint()
        return files, size

    async def _see_to(self, file: HeldFile, found: Obstacles) -> bool:
        """Returns whether this node has nothing of the file any more; else `found` gets the
        reason. Raises _Stopped."""
        self._check()
        if is_shared(file.namespace.media):
            return await self._hand_over(file, found)
        refusals: dict[int, str] = {}
        made = await self._more(file, refusals)
        self._check()
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

    async def _give_own(self, own: Sequence[int], found: Obstacles) -> int:
        """Has other nodes take files of namespaces whose names are each node's own; returns how
        many are still here, but for those that go soon."""
        taken, homeless = await self._offer(own, self._afford)
        if taken:
            self._moved_at = trio.current_time()
        self._taken |= taken
        left = await self._drop_taken(found) if len(self._taken) >= _OWN_AT_ONCE else 0
        others = [ino for ino in own if ino not in taken]
        if self._is_stalled():
            return left + sum([not await self._evict_own(ino, found) for ino in others])
        for size, media in homeless:
            found.homeless(size, media)
        found.in_use += len(others) - len(homeless)  # soon they are sealed, or taken
        return left + len(others)

    async def _drop_taken(self, found: Obstacles) -> int:
        """Drops what other nodes have taken, once all know that; returns how much is in use, or has
        other content by now."""
        taken, self._taken = self._taken, {}
        if not taken:
            return 0
        await trio.sleep(_TOLD_S)
        left = 0
        for ino, checksum in taken.items():
            (inode,) = await self._copies.engine.read(lambda t: read_inodes(t, [ino]))  # noqa: B023
            if inode is None or inode.checksum == checksum:
                left += not await self._evict_own(ino, found)
            else:
                left += 1
                found.in_use += 1
        return left

    async def _evict_own(self, ino: int, found: Obstacles) -> bool:
        """Returns whether a file has gone here. Raises _Stopped."""
        self._check()
        (inode,) = await self._copies.engine.read(lambda t: read_inodes(t, [ino]))
        gone = await self._evict(ino)
        found.in_use += not gone
        self.counters["drained_files"] += gone
        if gone and self._progress is not None:
            self._progress.gone(inode.size if inode is not None else 0)
        return gone

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
