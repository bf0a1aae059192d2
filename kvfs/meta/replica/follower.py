"""Keeps a metadata replica up to date: fills a new one, follows the log, tells how fresh it is.

| the server says | action |
|---|---|
| ok, behind | the sent entries are applied |
| gap | the replica is read anew; until it is whole nothing is read of it |
| astray, lost | nothing is built on it: all is refused until it is repaired (`kvfs rebuild`) |

A replica is as fresh as the moment at which a request was sent that brought everything new:
`heard_at`, by a clock that goes on while the machine sleeps.
"""

import logging
from collections import deque
from typing import Final

import trio

from kvfs.base import detach
from kvfs.base.clock import now
from kvfs.base.errors import KvfsError, Unavailable
from kvfs.meta.redis.calling import RetryingClient
from kvfs.meta.redis.log import BEGIN, ENTRIES, PAGE, POSITION, LogReply, read_answer, read_entries
from kvfs.meta.replica.applier import Applier
from kvfs.meta.replica.leader_batch import LeaderBatch, Waiting

_BLOCK_S: Final = 0.5
"""Time for which the server holds a request when there is nothing new."""
_GATHER_S: Final = 0.01
_OFTEN: Final = 8
"""If the last so many answers to this node's own requests came within as many times _GATHER_S, the
log is read every _GATHER_S: those answers bring the others' commits just as soon, and each of its
own commits would end the wait for nothing."""
_PAGE_KEYS: Final = 2_000
_RETRY_S: Final = 0.25
_log = logging.getLogger(__name__)


class Follower:
    """The follower of one replica. `asking` serves look-ups that need certainty, `following` the
    log."""

    def __init__(self, applier: Applier, asking: RetryingClient, following: RetryingClient) -> None:
        self._applier = applier
        self._asking = asking
        self._following = following
        self._turns = LeaderBatch[Waiting](self._ask_for_all)
        self.whole = trio.Event()
        self._taken_at = deque[float](maxlen=_OFTEN)
        """Times of the latest answers to other tasks' requests."""
        self.heard_at = 0.0
        """The time, by `now`, at which the replica held everything committed; 0: not heard yet."""
        self.failure: Unavailable | None = None
        """The reason why everything is refused until the engine is heard again."""

    def take(self, answer: LogReply, sent_at: float) -> bool:
        """Applies an answer to a request sent at `sent_at`; returns whether that was everything.
        Raises Unavailable."""
        self._taken_at.append(now())
        status = answer.status
        if status in ("ok", "behind"):
            if not self._applier.follows(answer.entries):
                status = "gap"
            else:
                self._applier.apply(answer.entries)
                if status == "ok":
                    self._heard(sent_at)
                return status == "ok"
        if status == "gap":
            self._unwhole()
            raise Unavailable("the metadata replica is being read anew: try again")
        self.failure = self._lost(status)
        self.heard_at = 0.0
        raise self.failure

    async def catch_up(self) -> None:
        """Returns when the replica holds everything that was committed before the call. Raises
        Unavailable.

        All waiting callers share a request."""
        self.check()
        await detach.aside()
        await self._turns.wait(Waiting())

    def check(self) -> None:
        """Raises Unavailable at once if the engine did not answer the last caller, or the replica
        is not whole."""
        if self.failure is not None:
            raise Unavailable(str(self.failure))
        if not self.whole.is_set():
            raise Unavailable("the metadata replica is being read: try again")

    def failed(self, error: KvfsError) -> Unavailable:
        """Notes that the engine did not answer in time: others fail at once, until it is heard.
        Returns the error."""
        self.failure = Unavailable(str(error))
        self._turns.fail(self.failure)
        return self.failure

    async def run(self, task_status: "trio.TaskStatus[None]") -> None:
        """Fills the replica, then follows, until cancelled. Started when it is whole, and up to
        date."""
        complained = False
        while True:
            try:
                if not self.whole.is_set():
                    await self._fill()
                await self.catch_up_by(self._following)
                if complained:
                    _log.warning("the engine is heard again")
                    complained = False
                task_status.started()
                task_status = trio.TASK_STATUS_IGNORED
                await self._follow()
            except KvfsError as error:
                if not complained:
                    _log.warning("the metadata are not up to date: %s", error)
                complained = True
                await trio.sleep(_RETRY_S)

    async def _follow(self) -> None:
        """Follows until something is not as expected. Raises Unavailable."""
        key = self._following.log
        options = (b"COUNT", ENTRIES, b"BLOCK", round(_BLOCK_S * 1000), b"STREAMS", key)
        while self.whole.is_set():
            sent_at, position = now(), self._applier.mark.position
            found = await self._following.call(b"XREAD", *options, b"%d-0" % position)
            entries = read_entries(found[0][1]) if found else []
            if not entries or not self._applier.follows(entries):
                await self.catch_up_by(self._following)
                continue
            self._applier.apply(entries)
            if len(entries) < ENTRIES:
                self._heard(sent_at)
            if self._asks_often():
                await trio.sleep(_GATHER_S)

    def _asks_often(self) -> bool:
        taken = self._taken_at
        return len(taken) == _OFTEN and now() - taken[0] < _OFTEN * _GATHER_S

    async def catch_up_by(self, caller: RetryingClient) -> None:
        """Like `catch_up`, for a caller that has a connection of its own."""
        is_all = False
        while not is_all:
            mark, sent_at = self._applier.mark, now()
            found = await caller.script(POSITION, mark.position, mark.token)
            is_all = self.take(read_answer(found), sent_at)

    async def _ask_for_all(self) -> None:
        """Does one turn for all waiting callers."""
        turns = self._turns
        turns.taken, waiting = list(turns.queue), list(turns.queue)
        turns.queue.clear()
        try:
            await self.catch_up_by(self._asking)
        except KvfsError as error:
            failure = self.failed(error) if self.whole.is_set() else error
            for each in waiting:
                each.conclude(failure)
            return
        for each in waiting:
            each.conclude()

    async def _fill(self) -> None:
        applier = self._applier
        if applier.mark.filled is None:
            self.whole.set()
            return
        if not applier.mark.filled:
            position, token = await self._following.script(BEGIN)
            applier.begin(int(position), token)
        _log.info("reading all metadata from the engine")
        is_last = False
        while not is_last:
            found = await self._following.script(PAGE, applier.mark.filled or b"", _PAGE_KEYS)
            is_last = found[0] == 1
            applier.fill(found[1][::2], found[1][1::2], is_last=is_last)
            # What was read is as of now: it is only whole with all that was logged since it began.
            await self.catch_up_by(self._following)
        applier.finish()
        self.whole.set()

    def _unwhole(self) -> None:
        """Begins to read the replica anew: the log without its missing part is useless."""
        if self._applier.mark.filled is None:
            _log.warning("the engine's log does not reach back to this replica: it is read anew")
        self.whole = trio.Event()
        self.heard_at = 0.0
        self._applier.begin(self._applier.mark.position, self._applier.mark.token)

    def _heard(self, sent_at: float) -> None:
        self.failure = None
        if self.whole.is_set():
            self.heard_at = max(self.heard_at, sent_at)

    def _lost(self, status: str) -> Unavailable:
        what = "lost its metadata" if status == "lost" else "went back to older metadata"
        return Unavailable(
            f"the engine {self._asking.location.shown} {what}: nothing is built on that; restore"
            " what it had, or recreate the metadata with kvfs rebuild"
        )
