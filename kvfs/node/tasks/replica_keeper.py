"""Keeps as many copies of each file as its namespace wants, on nodes that are there.

| event | files examined |
|---|---|
| a file is closed | this file, once it was quiet for a moment |
| another node gives up its copy | this file |
| a node's lease ends | all that it held |
| a node is drained, removed or given data again | all that this node holds |
| this node has its lease again | the same |
| a node comes, or a minute passes | all that lacked copies |
| ten minutes pass | all that this node holds |

Each time the first of a file's live holders acts, the others do not (`policy.replica_repair`); the
node that found that a file lacks copies works on it until it has them, since a new first holder
does not know of it. A node that is drained gives everything away by itself (`drainer`).

Invariants
- Repair keeps to a rate; copies of files just closed do not wait for it.
- Work that failed is tried again with the next look.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any, Final

import trio

from kvfs.base.errors import KvfsError
from kvfs.base.retry import PAUSE_S, Persistence
from kvfs.meta import keys
from kvfs.meta.records import Flag, namespace_of
from kvfs.node.tasks.copier import Copies
from kvfs.node.tasks.drainer import Draining, Evict, Offer
from kvfs.policy import replica_repair
from kvfs.policy.pace import Pace
from kvfs.tree.copies import placements, replica_counts
from kvfs.tree.copies.replica_counts import HeldFile

log = logging.getLogger(__name__)
_TICK_S: Final = 0.5
_QUIET_S: Final = 1.5
"""Time since a close: by then a file that stays as it is was sealed."""
_PATIENCE_S: Final = 15.0
"""Patience for a seal; a file that is written all the time gets copies of its last closed
content."""
_AGAIN_S: Final = 60.0
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
    """The keeper of one node. `bytes_per_s`: the rate of repair; `drained` reports that nothing is
    left here."""

    def __init__(
        self,
        made: Copies,
        bytes_per_s: int,
        evict: Evict,
        offer: Offer,
        drained: Callable[[], Awaitable[None]],
    ) -> None:
        self._copies = made
        self._me = made.me
        self._engine = made.engine
        self._draining = Draining(made, evict, offer, self._afford, drained)
        self._rate = bytes_per_s
        self._pace = Pace(bytes_per_s, 0.0)
        self._waiting: dict[int, _Due] = {}
        self._working: set[int] = set()
        self._lacking: set[int] = set()
        self._seen: dict[int, tuple[bool, str]] | None = None
        """Whether each node was there, and its state, at our last look."""
        self._owed: set[int] = set()
        """Nodes that went, and whose files were not examined yet."""
        self._owes_own = False
        """Whether this node's own files were not examined yet."""
        self._again_at = 0.0
        self._failing = Persistence(log.warning, "a copy could not be made, it is tried again")
        self._slots = trio.Semaphore(_WORKERS)
        self._without: dict[int, int] = {}
        """The number of files that no present node has, by the node that went."""
        self.counters = self._draining.counters

    def published(self, ino: int) -> None:
        """Notes that a file was closed here."""
        if self._promises(ino) and len(self._waiting) < _MOST_WAITING:
            now = trio.current_time()
            since = self._waiting[ino].since if ino in self._waiting else now
            self._waiting[ino] = _Due(now + _QUIET_S, since, fresh=True)

    def given_up(self, inos: Iterable[int]) -> None:
        """Notes that other nodes do not have these files any more."""
        now = trio.current_time()
        for ino in inos:
            if len(self._waiting) >= _MOST_WAITING:
                self._owes_own = True
                return
            if ino not in self._waiting and self._promises(ino):
                self._waiting[ino] = _Due(now + _QUIET_S, now, fresh=False)

    def _promises(self, ino: int) -> bool:
        """Returns whether it keeps copies of a file; of those whose names are each node's own,
        `node.siblings` does."""
        namespace = self._engine.namespace(namespace_of(ino))
        return namespace is not None and bool(namespace.replicas) and not namespace.is_peer

    @property
    def lacking(self) -> int:
        """Files that lack copies which this node must have made."""
        return len(self._lacking)

    @property
    def obstacle(self) -> str:
        """The reason why this node cannot be drained, for people; empty: there is none."""
        return self._draining.obstacle

    def report(self) -> dict[str, Any]:
        """Returns this node's pending work, for its status."""
        return {
            "under_replicated": self.lacking,
            "without_holder": sum(self._without.values()),
            "waiting": len(self._waiting),
            "in_progress": len(self._working),
            **self._draining.report(),
        }

    async def run(self) -> None:
        """Keeps copies until cancelled."""
        self._pace = Pace(self._rate, trio.current_time())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            nursery.start_soon(self._patrol)
            nursery.start_soon(self._work)
            nursery.start_soon(self._draining.run)

    # ---- looking

    async def _watch(self) -> None:
        """Watches for nodes that go."""
        watching = Persistence(log.warning, "files of a node that went are looked at later")
        await watching.repeat(self._look_around, _TICK_S)

    async def _look_around(self) -> None:
        """Examines the files of nodes that changed. Work that failed is still owed."""
        self._compare({host.number: (host.alive, host.state) for host in self._copies.snapshot()})
        for number in sorted(self._owed - {self._me}):
            await self._look_at_held(number)
            self._owed.discard(number)
        if self._owes_own and self._sees_to_own():
            self._owes_own = False
            try:
                await self._look_at_held(self._me)
            except BaseException:
                self._owes_own = True
                raise
        if trio.current_time() >= self._again_at:
            self._try_again()

    def _sees_to_own(self) -> bool:
        """Returns whether it handles this node's own files: on a draining node, `drainer` handles
        everything here."""
        own = self._copies.snapshot().get(self._me)
        return own is not None and own.alive and own.state != "draining"

    def _compare(self, seen: dict[int, tuple[bool, str]]) -> None:
        """Compares the nodes with those seen before."""
        before, self._seen = self._seen, seen
        if before is None or before == seen:
            return
        dead = {number for number, (alive, _) in seen.items() if not alive}
        # Files that no present node has are counted anew for all nodes that are away.
        self._owed = dead | {number for number in self._owed if number in seen}
        self._without = {number: n for number, n in self._without.items() if number in dead}
        states = {number: state for number, (_, state) in seen.items()}
        self._owes_own |= any(states.get(number) != state for number, (_, state) in before.items())
        if self._me in dead:  # what it judges meanwhile, it judges as a node that is not there
            self._owes_own = True
        self._try_again()

    def _try_again(self) -> None:
        """Tries again to make the missing copies; a page of them if they are many."""
        now = trio.current_time()
        self._again_at = now + _AGAIN_S
        for ino in islice(self._lacking, _MOST_WAITING - len(self._waiting)):
            self._waiting.setdefault(ino, _Due(now, now, fresh=False))

    async def _patrol(self) -> None:
        patrolling = Persistence(log.warning, "copies are looked after later")
        step = partial(self._look_at_held, self._me)
        await patrolling.repeat(step, _ROUTINE_S, first_s=_FIRST_S)

    async def _look_at_held(self, number: int) -> None:
        """Examines all files of which a node has anything."""
        node, after, without = keys.pack_node(number), 0, 0
        while inos := await self._engine.read(
            lambda t, after=after: placements.held_by(t, node, after, _PAGE)  # type: ignore[misc]
        ):
            after = inos[-1]
            files = await self._engine.read(lambda t, inos=inos: replica_counts.look(t, inos))  # type: ignore[misc]
            without += self._judge(files, number)
            await trio.lowlevel.checkpoint()
        if number != self._me:
            self._without[number] = without

    def _judge(self, files: Iterable[HeldFile], held_by: int) -> int:
        """Takes up this node's work; returns how many files no present node has, of which this
        holder is the first."""
        snapshot, now, without = self._copies.snapshot(), trio.current_time(), 0
        for file in files:
            verdict = replica_repair.judge(snapshot, file.ino, file.holders, file.wanted)
            without += verdict.actor is None and held_by == min(file.holders, default=held_by)
            mine = verdict.missing > 0 and self._sees_to(file.ino, verdict.actor)
            (self._lacking.add if mine else self._lacking.discard)(file.ino)
            if mine and file.ino not in self._waiting and len(self._waiting) < _MOST_WAITING:
                self._waiting[file.ino] = _Due(now, now, fresh=False)
        return without

    def _sees_to(self, ino: int, actor: int | None) -> bool:
        return actor == self._me or (ino in self._lacking and actor is not None)

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
            await self._replicate(ino, due)
        except (KvfsError, OSError) as error:
            self._failing.complain(error)
            self._waiting.setdefault(ino, _Due(trio.current_time() + PAUSE_S, due.since, due.fresh))
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
        verdict = replica_repair.judge(self._copies.snapshot(), ino, file.holders, file.wanted)
        # What was closed here is this node's to copy, whoever else may have it already.
        if verdict.missing and (due.fresh or self._sees_to(ino, verdict.actor)):
            self._lacking.add(ino)
            if not due.fresh:
                await self._afford(file.inode.size)
            made = await self._copies.make(file, verdict.missing)
            if len(made) < verdict.missing:
                return
        self._lacking.discard(ino)

    async def _afford(self, size: int) -> None:
        await trio.sleep(self._pace.spend(size, trio.current_time()))
