"""Keeps a metadata replica up to date: fills a new one, follows the log, tells how fresh it is.

| the server says | action |
|---|---|
| ok, behind | the sent entries are applied |
| gap | the replica is read anew; until it is whole nothing is read of it |
| astray, lost | nothing is built on it: all is refused until it is repaired (`kvfs rebuild`) |

A replica is as fresh as the moment at which a request was sent that brought everything new:
`heard_at`, by a clock that goes on while the machine sleeps.
"""

import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final

import trio

from kvfs.base import detach
from kvfs.base.clock import now
from kvfs.base.errors import EngineAway, KvfsError, NoSpace, Unavailable
from kvfs.meta.node_leases import Lost
from kvfs.meta.redis.calling import RetryingClient
from kvfs.meta.redis.log import (
    ENTRIES,
    POSITION,
    LogEntry,
    LogReply,
    read_answer,
    read_entries,
)
from kvfs.meta.redis.scripts import TOP
from kvfs.meta.replica.applier import Applier
from kvfs.meta.replica.filling.filler import Filler
from kvfs.meta.replica.leader_batch import LeaderBatch, Waiting

_BLOCK_S: Final = 0.5
"""Time for which the server holds a request when there is nothing new."""
_GATHER_S: Final = 0.025
"""Time between two reads of the log under load: a read costs as much as many entries, and each of
this node's own commits would end the wait for nothing."""
_BURST: Final = 5
_CALM_PER_S: Final = 250
"""Entries of the log that are read at once: so many, and as many more each second. A reader waits
for a file that was just closed, and few other commits are no load."""
_RETRY_S: Final = 0.25
_FULL_RETRY_S: Final = 5.0
"""Time until the next attempt where this node has no space: each may read all that the server
has."""
_FEWER: Final = 64
"""One part in so many of its keys that the server has to lose until all is read anew for that."""
_log = logging.getLogger(__name__)


async def _cannot(_shards: Collection[int]) -> bool:
    return False


class _CatchUp(Waiting):
    """A caller that waits until the replica holds all of before its call."""

    def __init__(self) -> None:
        super().__init__()
        self.since = now()


class Follower:
    """The follower of one replica. `asking` serves look-ups that need certainty, `following` the
    log."""

    def __init__(
        self,
        applier: Applier,
        asking: RetryingClient,
        following: RetryingClient,
        bring_back: Callable[[Collection[int]], Awaitable[bool]] = _cannot,
    ) -> None:
        """`bring_back` has all of namespaces here, to the ends of their own logs; returns whether
        it is."""
        self._bring_back = bring_back
        self._applier = applier
        self._asking = asking
        self._following = following
        self._whose = "" if applier.shard == TOP else f"namespace {applier.shard}: "
        """How messages begin."""
        self._turns = LeaderBatch[_CatchUp](self._ask_for_all)
        self._filler = Filler(applier, following, self._catch_up_here, self._apply)
        self.whole = trio.Event()
        self.heard_at = 0.0
        """The time, by `now`, at which the replica held everything committed; 0: not heard yet, or
        the engine has lost that."""
        self.known_at = 0.0
        """The same time, whatever the engine has lost since."""
        self._committed_at = self._committing_since = 0.0
        """The times, likewise, at which this node's last commit was sent, which brought everything,
        and the first of those that came less than _GATHER_S apart."""
        self._was_behind = False
        """Whether the last such question brought anything: then the next is likely to."""
        self._full_at = 0
        """The number of the server's keys when this node had no space for them; 0: it had."""
        self._is_short = False
        """Whether what has gone is dropped before anything is read anew."""
        self.failure: Unavailable | None = None
        """The reason why everything is refused until the engine is heard again."""
        self._is_lacking_space = False
        """Whether that is a lack of space on this host."""
        self._heard_again = trio.lowlevel.ParkingLot()

    async def take(self, answer: LogReply, sent_at: float) -> bool:
        """Applies an answer to a request sent at `sent_at`; returns whether that was everything.
        Raises Unavailable."""
        status = answer.status
        if status in ("ok", "behind"):
            if not self._applier.follows(answer.entries):
                status = "gap"
            else:
                await self._apply(answer.entries)
                if status == "ok":
                    self._heard(sent_at)
                return status == "ok"
        if status == "gap":
            self._unwhole()
            raise Unavailable("the metadata replica is being read anew: try again")
        self.failure, self._is_lacking_space = self._lost(status), False
        self.heard_at = 0.0
        raise self.failure

    async def _apply(self, entries: Sequence[LogEntry]) -> None:
        """Applies entries, which follow. Those by which namespaces come back from shards of their
        own need all of these here, with the ends of their logs: else all is read anew. Raises
        Unavailable then, too."""
        applier = self._applier
        if back := applier.returning(entries):
            is_here = await self._bring_back(back)
            if not applier.follows(entries):
                raise Unavailable("the metadata replica is being read anew: try again")
            # Others may have applied them meanwhile.
            applier.brought_back = applier.returning(entries) if is_here else set()
        applier.apply(entries)
        applier.brought_back = set()
        if applier.is_overtaken:
            if self.whole.is_set():
                self.begin_anew()
            raise Unavailable("the metadata replica is being read anew: try again")

    def committed(self, sent_at: float) -> None:
        """Takes notice of an answered commit of this node, which brought everything of before."""
        if sent_at - self._committed_at >= _GATHER_S:
            self._committing_since = sent_at
        self._committed_at = sent_at

    async def catch_up(self) -> None:
        """Returns when the replica holds everything that was committed before the call. Raises
        Unavailable.

        All waiting callers share a request."""
        self.check()
        await detach.aside()
        await self._turns.wait(_CatchUp())

    def check(self) -> None:
        """Raises EngineAway at once if the engine did not answer the last caller, Unavailable if
        the replica is not whole, or has no space for what others committed."""
        if not self.whole.is_set():
            reason = self.failure or "the metadata replica is being read: try again"
            raise Unavailable(str(reason))
        if self.failure is not None:
            raise (EngineAway if self.is_away else Unavailable)(str(self.failure))

    @property
    def is_away(self) -> bool:
        """Whether the engine does not answer, or has lost what the replica has, which is whole."""
        has_failed = self.failure is not None and not self._is_lacking_space
        return has_failed and self.whole.is_set()

    async def until_heard(self) -> None:
        """Returns when the engine is not away."""
        while self.is_away:
            await self._heard_again.park()

    async def until_heard_again(self) -> None:
        """Returns when the engine is heard the next time, or the replica begins to be read anew; at
        once while it is away."""
        if not self.is_away:
            await self._heard_again.park()

    def check_change(self) -> None:
        """Does what `check` does, before a change: none is sent whose answer finds no space here.
        Raises NoSpace too."""
        if self._applier.is_short:
            raise NoSpace(self._applier.refusal)
        self.check()

    def refused(self, error: KvfsError) -> None:
        """Notes why it is not begun; whoever waits until it is whole learns it."""
        self.failure = Unavailable(str(error))
        waited, self.whole = self.whole, trio.Event()
        waited.set()

    def failed(self, error: KvfsError) -> Unavailable:
        """Notes that the engine did not answer in time: others fail at once, until it is heard.
        Returns the error."""
        self.failure = Unavailable(str(error))
        self._is_lacking_space = isinstance(error, NoSpace)
        self._turns.fail(self.failure)
        return self.failure

    async def run(self, task_status: "trio.TaskStatus[None]") -> None:
        """Fills the replica, then follows, until cancelled. Started when it is whole, and up to
        date. Raises Lost and NoSpace before that, of the shard of all: to wait would be no use."""
        complained = is_started = False
        while True:
            try:
                if not self.whole.is_set():
                    await self.fill()
                await self.catch_up_by(self._following)
                if complained:
                    _log.warning("%sthe engine is heard again", self._whose)
                    complained = False
                is_started = True
                task_status.started()
                task_status = trio.TASK_STATUS_IGNORED
                await self._follow()
            except KvfsError as error:
                is_awaited = not is_started and self._applier.shard == TOP
                if is_awaited and isinstance(error, Lost):
                    raise
                if not complained:
                    _log.warning("%sthe metadata are not up to date: %s", self._whose, error)
                complained = True
                if isinstance(error, Unavailable) and self.whole.is_set() and not self.failure:
                    self.failed(error)
                if not isinstance(error, NoSpace):
                    await trio.sleep(_RETRY_S)
                elif is_awaited and self._is_short:
                    raise
                else:
                    await self._make_room(is_awaited=is_awaited)

    async def _follow(self) -> None:
        """Follows until something is not as expected: at once, under load every _GATHER_S; not
        while this node's own commits bring what there is. Raises Unavailable."""
        burst, read_at = 0.0, -math.inf
        key = self._following.log
        options = (b"COUNT", ENTRIES, b"BLOCK", round(_BLOCK_S * 1000), b"STREAMS", key)
        while self.whole.is_set():
            if self._is_told_anyway():
                await trio.sleep(_GATHER_S)
                continue
            sent_at, position = now(), self._applier.mark.position
            found = await self._following.call(b"XREAD", *options, b"%d-0" % position)
            entries = read_entries(found[0][1]) if found else []
            if not entries or not self._applier.follows(entries):
                await self.catch_up_by(self._following)
                continue
            await self._apply(entries)
            if len(entries) < ENTRIES:
                self._heard(sent_at)
            before, read_at = read_at, now()
            burst = max(0.0, burst - (read_at - before) * _CALM_PER_S) + len(entries)
            if burst > _BURST:
                burst = min(burst, 2 * _BURST)
                await trio.sleep(_GATHER_S)

    async def _make_room(self, *, is_awaited: bool) -> None:
        """Returns when it is to be tried again, after a lack of space here. Where the server has
        fewer keys by now, or a start waits, the replica is read anew, and drops first what has
        gone: by the log what was added comes first."""
        with contextlib.suppress(Unavailable):
            count = await self._following.call(b"HLEN", self._following.values)
            self._full_at = self._full_at or count
            if is_awaited or count < self._full_at - self._full_at // _FEWER:
                self._full_at, self._is_short = count, True
                if self.whole.is_set():
                    self.begin_anew()
                return
        await trio.sleep(_FULL_RETRY_S)

    def _is_told_anyway(self) -> bool:
        """Returns whether commits of this node follow each other closely, so that the next answer
        comes as soon as a read of the log would."""
        is_busy = self._committed_at > self._committing_since
        return is_busy and now() - self._committed_at < _GATHER_S

    async def catch_up_by(self, caller: RetryingClient) -> None:
        """Like `catch_up`, for a caller that has a connection of its own."""
        is_all = False
        while not is_all:
            mark, sent_at = self._applier.mark, now()
            if not self._was_behind and await self._has_all(caller):
                self._heard(sent_at)
                return
            answer = read_answer(await caller.script(POSITION, mark.position, mark.token))
            self._was_behind = bool(answer.entries)
            is_all = await self.take(answer, sent_at)

    async def _has_all(self, caller: RetryingClient) -> bool:
        """Returns whether the replica has all that the server has, by a question that costs it a
        tenth of a script's, or has it when this node's own request under way is answered."""
        mark = self._applier.mark
        position, token = await caller.call(b"HMGET", caller.state, b"position", b"token")
        if None in (position, token) or int(position) <= mark.position:
            return (position, token) == (b"%d" % mark.position, mark.token)
        return await self._applier.has_or_makes(int(position), token)

    async def _catch_up_here(self) -> None:
        await self.catch_up_by(self._following)

    async def until_idle(self) -> None:
        """Returns when nobody waits."""
        await self._turns.until_idle()

    async def _ask_for_all(self) -> None:
        """Does one turn for all waiting callers; those need none who waited when a request was sent
        whose answer has brought everything meanwhile."""
        turns = self._turns
        turns.taken, waiting = list(turns.queue), list(turns.queue)
        turns.queue.clear()
        try:
            if any(each.since > self.heard_at for each in waiting):
                await self.catch_up_by(self._asking)
        except KvfsError as error:
            failure = self.failed(error) if self.whole.is_set() else error
            for each in waiting:
                each.conclude(failure)
            return
        for each in waiting:
            each.conclude()

    async def fill(self) -> None:
        """Reads the replica anew unless it is whole. Raises Unavailable, NoSpace: it is to be begun
        again."""
        if self._applier.mark.filled is not None:
            _log.info("%sreading all metadata from the engine", self._whose)
            await self._filler.fill(is_short=self._is_short)
            self._full_at, self._is_short = 0, False
        self.whole.set()

    def begin_anew(self) -> None:
        """Begins to read the replica anew."""
        self.whole = trio.Event()
        self._heard_again.unpark_all()
        self.heard_at = 0.0
        self._applier.begin(self._applier.mark.position, self._applier.mark.token)

    def _unwhole(self) -> None:
        """Begins to read the replica anew: the log without its missing part is useless."""
        if self._applier.mark.filled is None:
            _log.warning(
                "%sthe engine's log does not reach back to this replica: it is read anew",
                self._whose,
            )
        self.begin_anew()

    def _heard(self, sent_at: float) -> None:
        self.failure = None
        self._heard_again.unpark_all()
        if self.whole.is_set():
            self.heard_at = max(self.heard_at, sent_at)
            self.known_at = self.heard_at

    def _lost(self, status: str) -> Lost:
        what = "lost its metadata" if status == "lost" else "went back to older metadata"
        return Lost(
            f"{self._whose}the engine {self._asking.location.shown} {what}: nothing is built on"
            " that; restore what it had, or recreate the metadata with kvfs rebuild"
        )
