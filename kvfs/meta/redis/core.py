"""The engine within one event loop: what it knows, and the one task that commits.

Invariants
- A commit is one script on each shard it writes: it is done wholly or not at all, and only if all
  that its transactions read there is still so.
- A shard is sent one commit at a time, so that one whose answer was lost is known by its number.
- Nobody waits much longer than the deadline: then Unavailable or Conflict.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

import trio

from kvfs.base.errors import KvfsError, Unavailable
from kvfs.meta.engine import Transaction
from kvfs.meta.redis.asking import NOWHERE, Asker, Step, contended, together
from kvfs.meta.redis.committing import LIMIT, Function, Group, Outcome, prepare
from kvfs.meta.redis.connecting import Server
from kvfs.meta.redis.crossing import Committer
from kvfs.meta.redis.known import Known, Missing, Moment
from kvfs.meta.redis.location import Location
from kvfs.meta.redis.reading import advance, reading
from kvfs.meta.redis.scripts import Changes
from kvfs.meta.redis.sharding import REGISTER, TOP, Layout, pack_shards, unpack_shards

T = TypeVar("T")
_MOST_KNOWN: Final = 100_000


class _Waiting:
    """A transaction that waits to be committed."""

    def __init__(self, function: Function, end: float) -> None:
        self.function = function
        self.end = end
        self.wanted = True
        """False: whoever waited was cancelled."""
        self.done = trio.Event()
        self.outcome: Outcome | None = None


class _Attempt:
    """A group with what its commit checks and writes, as of when its functions ran."""

    def __init__(self, group: Group, waiting: list[_Waiting], known: Known) -> None:
        self.group = group
        self.waiting = [waiting[place] for place in group.members]
        self.changes = group.changes(known)
        self.expected = {
            shard: known.moments[shard].token if shard in known.moments else NOWHERE
            for shard in group.shards
        }
        self.end = max(each.end for each in self.waiting)
        self.written = {shard for shard, changes in self.changes.items() if changes.writes}


class Core:
    """Reads and commits, while `run` runs. All methods are for tasks of its loop."""

    def __init__(self, location: Location, deadline_s: float, cluster: str | None) -> None:
        self._location = location
        self._deadline_s = deadline_s
        self.cluster = cluster
        """Whose the metadata are; known when it runs."""
        self._queue: list[_Waiting] = []
        self._arrived = trio.Event()
        self._registered = {TOP}
        self._is_closed = False
        self._syncing = trio.Lock()
        self._syncs_begun = 0
        self._synced = 0
        """The last that was done, by its number."""
        self._promise = ""
        self._server: Server
        self._committer: Committer
        self._asker: Asker
        self._known: Known

    @property
    def round_trips(self) -> int:
        """Requests sent so far."""
        return self._server.round_trips

    @property
    def asker(self) -> Asker:
        """For callers who keep what is known themselves."""
        return self._asker

    @property
    def layout(self) -> Layout:
        return self._server.layout

    async def run(self, task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Keep connections and commit, until cancelled. Raises Unavailable, NotSupported, Invalid,
        Conflict before it has started."""
        async with trio.open_nursery() as nursery:
            self._server = Server(self._location, nursery, self._deadline_s)
            self._committer = Committer(self._server)
            self._asker = Asker(self._server, self._committer)
            self.cluster = await self._server.examine(self.cluster)
            self._known = Known(self._server.layout)
            task_status.started()
            try:
                await self._commit_all()
            finally:
                self._is_closed = True
                self._conclude(self._queue, Outcome(error=closed()))

    async def read(self, fn: Callable[[Transaction], T]) -> T:
        """Run `fn` on a read-only view. Cancelled: nothing happened."""
        await trio.lowlevel.checkpoint()
        self._bound()
        steps = reading(fn, self._known, self._asker.clock)
        end = self._server.end()
        while not isinstance(step := advance(steps), Outcome):
            await self._asker.fetch(self._known, step, end)
        result: T = step.get()
        return result

    async def transact(self, fn: Callable[[Transaction], T]) -> T:
        """Run `fn` and commit. Cancelled while it has not been sent: nothing was committed; else it
        is waited for, at most until the deadline."""
        await trio.lowlevel.checkpoint()
        if self._is_closed:
            raise closed()
        waiting = _Waiting(fn, self._server.end())
        self._queue.append(waiting)
        self._arrived.set()
        try:
            await waiting.done.wait()
        except trio.Cancelled:
            waiting.wanted = False
            if waiting in self._queue:
                self._queue.remove(waiting)
                raise
            with trio.CancelScope(shield=True):
                await waiting.done.wait()
            if waiting.outcome is None:
                raise
        assert waiting.outcome is not None
        result: T = waiting.outcome.get()
        return result

    async def sync(self) -> str:
        """Have the servers keep what was committed, as far as they can; what they promise."""
        wanted = self._syncs_begun + 1
        async with self._syncing:
            # One that began while this one waited will do for both.
            if self._synced < wanted:
                self._syncs_begun += 1
                number = self._syncs_begun
                shards = [TOP]
                if self.layout is Layout.NAMESPACES:
                    shards = await self.read(lambda t: unpack_shards(t.get(REGISTER)))
                self._promise = await self._server.sync(shards)
                self._synced = number
            return self._promise

    # ---- committing

    async def _commit_all(self) -> None:
        while True:
            await self._arrived.wait()
            batch, self._queue = self._queue[:LIMIT], self._queue[LIMIT:]
            try:
                await self._commit_some(batch)
            except KvfsError as error:
                self._conclude(batch, Outcome(error=error))
            except trio.Cancelled:
                self._conclude(batch, Outcome(error=closed()))
                raise
            finally:
                self._queue[:0] = [each for each in batch if self._is_left(each)]
            if not self._queue:
                self._arrived = trio.Event()

    def _is_left(self, waiting: _Waiting) -> bool:
        """Whether it has to be tried again."""
        if waiting.done.is_set():
            return False
        if not waiting.wanted:
            waiting.done.set()
            return False
        if trio.current_time() >= waiting.end:
            self._conclude([waiting], Outcome(error=contended()))
            return False
        return True

    async def _commit_some(self, batch: list[_Waiting]) -> None:
        """Run them, commit those that can be, fetch for the others what they miss."""
        self._bound()
        prepared = prepare([each.function for each in batch], self._known)
        attempts = [_Attempt(group, batch, self._known) for group in prepared.groups]
        new = {shard for each in attempts for shard in each.written} - self._registered
        if new and self.layout is Layout.NAMESPACES:
            await self._register(new)
            return
        steps: list[Step] = [partial(self._commit, attempt) for attempt in attempts]
        if prepared.missing:
            end = max(each.end for each in batch)
            steps.append(partial(self._asker.fetch, self._known, prepared.missing, end))
        await together(steps)

    async def _register(self, shards: set[int]) -> None:
        """Enter shards before anything is written in them."""

        def enter(t: Transaction) -> None:
            found = set(unpack_shards(t.get(REGISTER)))
            if shards - found:
                t.put(REGISTER, pack_shards(sorted(found | shards)))

        waiting = _Waiting(enter, self._server.end())
        while not waiting.done.is_set():
            prepared = prepare([enter], self._known)
            if prepared.missing:
                await self._asker.fetch(self._known, prepared.missing, waiting.end)
            else:
                await self._commit(_Attempt(prepared.groups[0], [waiting], self._known))
        if waiting.outcome is not None:
            waiting.outcome.get()
        self._registered |= shards

    async def _commit(self, attempt: _Attempt) -> None:
        try:
            done = await self._committed(attempt)
        except KvfsError as error:
            self._conclude(attempt.waiting, Outcome(error=error))
            return
        if done:
            for waiting, outcome in zip(attempt.waiting, attempt.group.outcomes, strict=True):
                self._conclude([waiting], outcome)

    async def _committed(self, attempt: _Attempt) -> bool:
        """Whether it is committed; else what it read is fetched anew. Raises Unavailable."""
        if trio.current_time() >= attempt.end:
            raise contended()
        if len(attempt.group.shards) > 1:
            done = await self._committer.cross(attempt.changes, attempt.expected, attempt.end)
            for shard in attempt.group.shards:
                self._known.forget(shard)
            return done
        for shard, changes in attempt.changes.items():
            return await self._commit_one(shard, changes, attempt)
        return True

    async def _commit_one(self, shard: int, changes: Changes, attempt: _Attempt) -> bool:
        kind = b"write" if changes.writes else b"check"
        asked, expected = self._asker.next(), attempt.expected[shard]
        answer, token = await self._committer.send(kind, shard, changes, expected, attempt.end)
        if answer[0] == b"done":
            if changes.writes:
                self._learn_commit(shard, changes, answer[1], Moment(token, asked))
        elif answer[0] == b"again":
            self._known.forget(shard)
        elif answer[0] == b"busy":
            await self._committer.resolve(shard, answer[1], attempt.end)
            return False
        else:
            views = [(view, Missing()) for view in attempt.group.views]
            await self._asker.fetch(self._known, views, attempt.end)
            return False
        return True

    def _learn_commit(self, shard: int, changes: Changes, before: bytes, moment: Moment) -> None:
        """Ours is committed, after the commit `before`."""
        known = self._known
        last = known.moments.get(shard)
        if last is not None and last.token != before:
            if last.asked > moment.asked:
                return
            known.forget(shard)
        known.learn((key for key, _ in changes.reads), (value for _, value in changes.reads))
        known.write(changes.writes)
        known.moments[shard] = (
            moment if last is None else Moment(moment.token, max(moment.asked, last.asked))
        )

    def _conclude(self, waiting: Sequence[_Waiting], outcome: Outcome) -> None:
        for each in waiting:
            if not each.done.is_set():
                each.outcome = outcome
                each.done.set()

    def _bound(self) -> None:
        if len(self._known) > _MOST_KNOWN:
            self._known.clear()


def closed() -> Unavailable:
    """What is raised of an engine that is closed."""
    return Unavailable("the engine is closed")
