"""Keeps as many copies of each file as its namespace wants, on nodes that are there.

| what happens | what is looked at |
|---|---|
| a file is closed | this file, once it was quiet for a moment |
| a node's lease ends | all that it held |
| ten minutes pass | all that this node holds |

Each time the first of a file's live holders acts, the others do not (`policy.repair`). A node that
is drained gives all away by itself (`draining`).

Invariants
- Repair keeps to a rate; copies of what was just closed do not wait for it.
- What could not be done is tried again with the next look.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

import trio

from kvfs.background.copies import Copies
from kvfs.background.draining import Draining, Evict
from kvfs.background.persist import Persistence
from kvfs.meta import keys
from kvfs.meta.records import Flag, namespace_of
from kvfs.namespace import copies, placements
from kvfs.namespace.copies import Copied
from kvfs.policy import repair
from kvfs.policy.pace import Pace

log = logging.getLogger(__name__)
_TICK_S: Final = 0.5
_QUIET_S: Final = 1.5
"""Since a close: by then a file that stays as it is was sealed."""
_PATIENCE_S: Final = 15.0
"""For a seal; what is written all the time gets copies of what was closed last."""
_ROUTINE_S: Final = 600.0
_FIRST_S: Final = 15.0
_PAGE: Final = 256
_MOST_WAITING: Final = 65_536
_WORKERS: Final = 8


class _Due:
    """A file that may need copies."""

    __slots__ = ("at", "fresh", "since")

    def __init__(self, at: float, since: float, fresh: bool) -> None:
        self.at = at
        self.since = since
        self.fresh = fresh


class Keeper:
    """That of one node. `bytes_per_s`: of repair; `drained` says that nothing is left here."""

    def __init__(
        self,
        made: Copies,
        bytes_per_s: int,
        evict: Evict,
        drained: Callable[[], Awaitable[None]],
    ) -> None:
        self._copies = made
        self._me = made.me
        self._engine = made.engine
        self._draining = Draining(made, evict, self._afford, drained)
        self._rate = bytes_per_s
        self._pace = Pace(bytes_per_s, 0.0)
        self._waiting: dict[int, _Due] = {}
        self._working: set[int] = set()
        self._lacking: set[int] = set()
        self._seen: dict[int, bool] = {}
        self._slots = trio.Semaphore(_WORKERS)
        self._without = 0
        self.counters = self._draining.counters

    def published(self, ino: int) -> None:
        """A file was closed here."""
        namespace = self._engine.namespace(namespace_of(ino))
        if namespace is not None and namespace.replicas and len(self._waiting) < _MOST_WAITING:
            now = trio.current_time()
            since = self._waiting[ino].since if ino in self._waiting else now
            self._waiting[ino] = _Due(now + _QUIET_S, since, fresh=True)

    @property
    def lacking(self) -> int:
        """Files that lack copies which this node is to have made."""
        return len(self._lacking)

    @property
    def obstacle(self) -> str:
        """What keeps this node from being drained, for people; empty: nothing."""
        return self._draining.obstacle

    def report(self) -> dict[str, Any]:
        """For the node's status: what this node is to see to."""
        return {
            "under_replicated": self.lacking,
            "without_holder": self._without,
            "waiting": len(self._waiting),
            "in_progress": len(self._working),
            **self._draining.report(),
        }

    async def run(self) -> None:
        """Until cancelled."""
        self._pace = Pace(self._rate, trio.current_time())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            nursery.start_soon(self._patrol)
            nursery.start_soon(self._work)
            nursery.start_soon(self._draining.run)

    # ---- looking

    async def _watch(self) -> None:
        """Nodes that go."""
        watching = Persistence(log.warning, "files of a node that went are looked at later")
        while True:
            await watching.attempt(self._look_around)
            await trio.sleep(_TICK_S)

    async def _look_around(self) -> None:
        seen = {host.number: host.alive for host in self._copies.snapshot()}
        gone = [each for each, was_there in self._seen.items() if was_there and not seen.get(each)]
        self._seen = seen
        for number in gone:
            if number != self._me:
                await self._look_at_held(number)

    async def _patrol(self) -> None:
        patrolling = Persistence(log.warning, "copies are looked after later")
        await trio.sleep(_FIRST_S)
        while True:
            await patrolling.attempt(lambda: self._look_at_held(self._me))
            await trio.sleep(_ROUTINE_S)

    async def _look_at_held(self, number: int) -> None:
        """All files that a node has something of."""
        node, after, without = keys.pack_node(number), 0, 0
        while inos := await self._engine.read(
            lambda t, after=after: placements.held_by(t, node, after, _PAGE)  # type: ignore[misc]
        ):
            after = inos[-1]
            files = await self._engine.read(lambda t, inos=inos: copies.look(t, inos))  # type: ignore[misc]
            without += self._judge(files)
            await trio.lowlevel.checkpoint()
        if number != self._me:
            self._without = without

    def _judge(self, files: Iterable[Copied]) -> int:
        """Take up what this node is to see to; how many files nobody there has."""
        snapshot, now, without = self._copies.snapshot(), trio.current_time(), 0
        for file in files:
            verdict = repair.judge(snapshot, file.ino, file.holders, file.wanted)
            without += verdict.actor is None
            mine = verdict.actor == self._me and verdict.missing > 0
            (self._lacking.add if mine else self._lacking.discard)(file.ino)
            if mine and file.ino not in self._waiting and len(self._waiting) < _MOST_WAITING:
                self._waiting[file.ino] = _Due(now, now, fresh=False)
        return without

    # ---- acting

    async def _work(self) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                now = trio.current_time()
                due = [ino for ino, each in self._waiting.items() if each.at <= now]
                for ino in due:
                    if ino in self._working:
                        continue
                    await self._slots.acquire()
                    self._working.add(ino)
                    nursery.start_soon(self._see_to, ino, self._waiting.pop(ino))
                await trio.sleep(_TICK_S)

    async def _see_to(self, ino: int, due: _Due) -> None:
        try:
            await Persistence(log.warning, "a copy could not be made, it is tried again").attempt(
                lambda: self._replicate(ino, due), pause_s=0
            )
        finally:
            self._working.discard(ino)
            self._slots.release()

    async def _replicate(self, ino: int, due: _Due) -> None:
        file = await self._copies.look(ino)
        if file is None:
            self._lacking.discard(ino)
            return
        now = trio.current_time()
        if due.fresh and not file.inode.flags & Flag.SEALED and now - due.since < _PATIENCE_S:
            self._waiting.setdefault(ino, _Due(now + _QUIET_S, due.since, fresh=True))
            return
        verdict = repair.judge(self._copies.snapshot(), ino, file.holders, file.wanted)
        # What was closed here is this node's to copy, whoever else may have it already.
        if verdict.missing and (due.fresh or verdict.actor == self._me):
            if not due.fresh:
                await self._afford(file.inode.size)
            made = await self._copies.make(file, verdict.missing)
            if len(made) < verdict.missing:
                self._lacking.add(ino)
                return
        self._lacking.discard(ino)

    async def _afford(self, size: int) -> None:
        await trio.sleep(self._pace.spend(size, trio.current_time()))
