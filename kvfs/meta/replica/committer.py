"""Commits transactions that were run on the metadata replica: many in one request, refused ones run
again."""

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any, Final, NamedTuple

import trio

from kvfs.base import detach
from kvfs.base.clock import now
from kvfs.base.errors import Conflict, KvfsError, NoSpace, TooLarge, Unavailable
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.lmdb.growth import NONE, Growth
from kvfs.meta.redis.calling import RetryingClient
from kvfs.meta.redis.log import PROPOSE, Proposal, proposed, read_answer, size
from kvfs.meta.redis.scripts import Item
from kvfs.meta.replica.applier import Applier
from kvfs.meta.replica.follower import Follower
from kvfs.meta.replica.leader_batch import LeaderBatch, Waiting
from kvfs.meta.replica.local_writes import Privates, Settle, inodes_among
from kvfs.meta.replica.replica_mark import ReplicaMark
from kvfs.meta.replica.replica_view import Below, View

LIMIT: Final = 128
"""Transactions in one request: beyond it the server would keep others waiting for milliseconds."""
MOST_BYTES: Final = 8 << 20
"""Bytes of one request."""
MOST_WAITING: Final = 4_096
"""Transactions that may wait: beyond it others are refused."""
_DONE: Final = ord("1")
Function = Callable[[Transaction], Any]
Groups = Callable[[Transaction], Iterable[int]]
"""Finds the private groups that are to be known, each time that a transaction is run."""


class CommitOutcome(NamedTuple):
    """The value that one function returned, or the error that it raised."""

    value: object = None
    error: Exception | None = None

    def get(self) -> Any:
        """Returns the value, or raises its error."""
        if self.error is not None:
            raise self.error
        return self.value


class _Commit(Waiting):
    """A waiting transaction: a function to be run, or a proposal that another process ran
    already."""

    def __init__(
        self,
        end: float,
        function: Function | None,
        given: Proposal | None = None,
        groups: Groups = lambda _t: (),
    ) -> None:
        super().__init__()
        self.groups = groups
        self.is_aside = False
        """Whether it goes before another one, which waits for both."""
        self.end = end
        self.function = function
        self.given = given
        self.outcome = CommitOutcome()
        self.is_refused = False
        self.growth = NONE
        """Its growth, considered while the server's memory is full."""


class _Full(Exception):
    """The server, not this host, has no memory left."""

    def __init__(self, error: NoSpace) -> None:
        self.error = error


class Proposer:
    """The proposer of one replica. `engine` is this process's name at the server."""

    def __init__(
        self,
        local: EmbeddedEngine,
        applier: Applier,
        follower: Follower,
        caller: RetryingClient,
        privates: Privates,
        settle: Settle,
        head: tuple[int, int, bytes],
    ) -> None:
        """`settle` is run before private writes are made known. `head`: the node, its incarnation,
        and a name for this process at the server."""
        self._local = local
        self._applier = applier
        self._follower = follower
        self._caller = caller
        self._head = head
        self._privates = privates
        self._settle = settle
        self._number = 0
        self._is_asking = False
        self.is_full = False
        """Whether the server had no memory for the last change that would add."""
        self._turns = LeaderBatch[_Commit](self._turn)

    def is_ours(self, token: bytes) -> bool:
        """Returns whether the token is that of the request under way."""
        return self._is_asking and token == b"%b:%d" % (self._head[2], self._number)

    async def commit(self, function: Function, groups: Groups = lambda _t: ()) -> Any:
        """Commits the function's writes, and the private ones of these groups; returns the
        function's result, or raises its error. Raises Unavailable: then it may be committed or not;
        Conflict, TooLarge."""
        commit = _Commit(self._caller.end(), function, groups=groups)
        await self._wait(commit)
        return commit.outcome.get()

    async def propose(self, given: Proposal) -> bool:
        """Commits a proposal that was run elsewhere on this replica. False: it has to be run again,
        on the present replica. Raises what `commit` raises."""
        commit = _Commit(self._caller.end(), None, given)
        await self._wait(commit)
        return not commit.is_refused

    async def make_known(self, inos: Iterable[int]) -> None:
        """Commits the private writes of these inodes, all of them or none. Raises what `commit`
        raises."""
        await self.commit(_nothing, lambda _t: inos)

    def fail(self, error: Exception) -> None:
        """Fails all that wait."""
        self._turns.fail(error)

    async def _wait(self, commit: _Commit) -> None:
        self._follower.check()
        if len(self._turns.queue) >= MOST_WAITING:
            raise Unavailable(f"{MOST_WAITING} changes of the metadata wait already: try again")
        await detach.aside()
        await self._turns.wait(commit)

    async def _turn(self) -> None:
        """Runs those that wait, and proposes their writes."""
        queue, turns = self._turns.queue, self._turns
        arguments: list[Item] = []
        proposals: list[_Commit] = []
        mark = self._applier.mark
        try:
            self._follower.check()
            self._local.read_now(lambda t: self._run(t, arguments, proposals))
            if proposals:
                turns.taken = list(proposals)
                takes = self.is_full and proposals[-1].growth.takes_away
                results = await self._ask(mark, arguments, proposals, takes_away=takes)
                self.is_full = self.is_full and takes
                # Those that were done are private no more, those that were refused are so still.
                self._privates.sent.clear()
                for commit, result in zip(proposals, results, strict=True):
                    self._judge(commit, result == _DONE)
        except _Full as full:
            self._refuse(full.error, proposals)
        except KvfsError as error:
            self._fail(error, proposals)
        # A step that only makes keys known ahead of another commit is run again with that one.
        queue.extendleft(
            each for each in reversed(proposals) if not each.is_done and not each.is_aside
        )

    def _run(self, t: Transaction, arguments: list[Item], proposals: list[_Commit]) -> None:
        """Runs the waiting transactions; those to be proposed are taken from the queue."""
        queue, below, bytes_ = self._turns.queue, Below(), 0
        while queue and len(proposals) < LIMIT:
            commit = queue[0]
            steps = self._steps(commit, t, below)
            items = [item for step, _ in steps for item in proposed(step)]
            bytes_ += size(items)
            if bytes_ > MOST_BYTES and proposals:
                return
            commit.growth = _growth(steps) if self.is_full else NONE
            if proposals and commit.growth.takes_away != proposals[-1].growth.takes_away:
                return
            queue.popleft()
            if bytes_ > MOST_BYTES:
                what = f"{bytes_} bytes of metadata in one change: {MOST_BYTES} are the limit"
                commit.conclude(TooLarge(what))
                bytes_ = 0
            elif not steps:
                commit.conclude()
            else:
                arguments += items
                for _ in steps[1:]:
                    aside = _Commit(commit.end, _nothing)
                    aside.is_aside = True
                    proposals.append(aside)
                proposals.append(commit)
                for step, view in steps:
                    self._privates.sent.update(inodes_among(step.writes))
                    if view is not None:
                        below.add(view)
                        self._privates.sent.update(view.carried)

    def _steps(
        self, commit: _Commit, t: Transaction, below: Below
    ) -> list[tuple[Proposal, View | None]]:
        """Returns the steps of one waiting commit, its own the last; none if it changed nothing."""
        view = View(t, self._local.node, below, self._privates)
        if commit.function is None:
            given = commit.given
            assert given is not None, "it is one or the other"
            touched = self._privates.touched((*given.reads, *given.writes), given.ranges)
            if not touched:
                return [(given, None)]
            view.carry(self._settle, touched)
            return [(view.proposal(), view), (given, None)]
        commit.outcome = _run(commit.function, view, self._settle, list(commit.groups(t)))
        return [(view.proposal(), view)] if view.is_needed else []

    async def _ask(
        self,
        mark: ReplicaMark,
        arguments: list[Item],
        proposals: list[_Commit],
        *,
        takes_away: bool,
    ) -> bytes:
        """Returns a digit for each; none if the replica was too old. Raises Unavailable, _Full."""
        self._number += 1
        self._is_asking = True
        try:
            sent_at = now()
            is_here = all(each.function is not None for each in proposals)
            run = b"here" if is_here else b"before"
            state: list[Item] = [self._number, mark.position, mark.token, run]
            away = b"away" if takes_away else b""
            end = max(each.end for each in proposals)
            try:
                found = await self._caller.script(
                    PROPOSE, *self._head, *state, away, *arguments, end=end
                )
            except NoSpace as error:
                raise _Full(error) from error
            answer = read_answer(found)
            if answer.status == "fenced":
                raise Unavailable(
                    f"node {self._head[0]} was removed, or started again elsewhere: this one may"
                    " not write any more"
                )
            if not self._follower.take(answer, sent_at):
                await self._follower.catch_up_by(self._caller)
            return answer.results or b"0" * len(proposals)
        finally:
            self._is_asking = False

    def _judge(self, commit: _Commit, is_done: bool) -> None:
        if is_done:
            commit.conclude()
        elif commit.given is not None:
            commit.is_refused = True
            commit.conclude()
        elif trio.current_time() >= commit.end:
            commit.conclude(Conflict("others committed first until the deadline: try again"))

    def _refuse(self, error: NoSpace, proposals: list[_Commit]) -> None:
        """Refuses proposals for which the server has no memory, and of which it did nothing.
        Removals are asked for again, by themselves, and done all the same."""
        self._privates.sent.clear()
        was_full, self.is_full = self.is_full, True
        for each in proposals:
            if was_full:
                each.conclude(error)

    def _fail(self, error: KvfsError, proposals: list[_Commit]) -> None:
        failure: Exception = error
        if self._follower.whole.is_set() and self._follower.failure is None:
            failure = self._follower.failed(error)
        for each in proposals:
            each.conclude(failure)
        self._turns.fail(failure)


def _growth(steps: list[tuple[Proposal, View | None]]) -> Growth:
    return reduce(Growth.with_, (step.growth for step, _ in steps), NONE)


def _nothing(t: Transaction) -> None:
    """Changes nothing."""


def _run(function: Function, view: View, settle: Settle, inos: Sequence[int]) -> CommitOutcome:
    try:
        result = function(view)
        if inos or view.is_needed:
            view.carry(settle, inos)
        return CommitOutcome(result)
    except Exception as error:
        view.writes.clear()
        view.merges.clear()
        return CommitOutcome(error=error)
