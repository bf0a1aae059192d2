"""Commits transactions that were run on the metadata replica: many in one request, refused ones run
again."""

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any, Final, NamedTuple, Protocol

import trio

from kvfs.base import detach
from kvfs.base.clock import now
from kvfs.base.errors import Conflict, KvfsError, NoSpace, TooLarge, Unavailable
from kvfs.meta import keys
from kvfs.meta.asked_requests import ChangeWitness, asking
from kvfs.meta.engine import Transaction
from kvfs.meta.engine_layer import Layered
from kvfs.meta.exclusive import Excluded
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.lmdb.growth import NONE, Growth
from kvfs.meta.redis.calling import RetryingClient
from kvfs.meta.redis.log import Basis, Packed, Proposal, proposed, size
from kvfs.meta.redis.log_requests import LogRequests, Request
from kvfs.meta.redis.scripts import TOP
from kvfs.meta.replica.applier import Applied, Applier
from kvfs.meta.replica.follower import Follower
from kvfs.meta.replica.leader_batch import LeaderBatch, Waiting
from kvfs.meta.replica.local_namespaces import LocalNamespaces, is_range_so
from kvfs.meta.replica.local_writes import LocalWrites
from kvfs.meta.replica.private_group import inodes_among
from kvfs.meta.replica.replica_mark import ReplicaMark
from kvfs.meta.replica.replica_view import Base, Below, Settle, View
from kvfs.meta.shards.intention import read_intention
from kvfs.meta.shards.shard_map import ShardMap

LIMIT: Final = 128
"""Transactions in one request: beyond it the server would keep others waiting for milliseconds."""
MOST_BYTES: Final = 8 << 20
"""Bytes of one request."""
MOST_WAITING: Final = 4_096
"""Transactions that may wait: beyond it others are refused."""
_DONE: Final = ord("1")
_NAMESPACE: Final = keys.NAMESPACE[0]
Function = Callable[[Transaction], Any]
Groups = Callable[[Transaction], Iterable[int]]
"""Finds the private groups that are to be known, each time that a transaction is run."""


Admit = Callable[[Transaction, Sequence[bytes]], None]
"""Checks a transaction that is to write these keys; may read and write more. Raises Excluded."""


class Commits(Protocol):
    """Commits transactions, in whichever shard they belong."""

    async def commit(self, fn: Function, groups: Groups = ...) -> Any:
        """Does what `Proposer.commit` does."""


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
        turns: int = 0,
        *,
        is_told: bool = False,
    ) -> None:
        super().__init__()
        self.groups = groups
        self.is_told = is_told
        """Whether it is run on what the engine has of keys that are this node's own still."""
        self.of_turns = turns
        """`LocalNamespaces.turns` when what is given was found to be shared."""
        self.is_step = False
        """Whether it is part of a change over two shards."""
        self.is_aside = False
        """Whether it goes before another one, which waits for both."""
        self.end = end
        self.function = function
        self.given = given
        self.outcome = CommitOutcome()
        self.is_refused = False
        self.unplaced = 0
        """Closed files that lost their places by it."""
        self.nameless: list[Applied] = []
        """The records of files that lost their last name by it, unknown to its caller."""
        self.growth = NONE
        """Its growth, considered while the server's memory is full."""
        self.turns = False
        """Whether it writes a namespace's record: nothing goes after it in a request."""
        self.asking = 0 if function is None else asking.get()
        """The kernel's request in whose name the function is run; 0: none."""
        self.is_noted = False
        """Whether the function noted that request when it was run last."""


class Elsewhere(Exception):
    """A transaction is not, or not alone, of the shard that it was given to. Its caller never gets
    it, since it is run again where it belongs."""

    def __init__(self, parts: dict[int, Proposal], result: object, carried: set[int]) -> None:
        super().__init__(sorted(parts))
        self.parts = parts
        self.result = result
        self.carried = carried
        """Files that this node alone knows of, of other shards, which it read or wrote."""


class Intended(Exception):
    """A change over two shards is under way, which a change of TOP has to wait for."""


class Moving(Exception):
    """A transaction writes keys that are on their way to another shard, and waits for that."""


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
        privates: LocalWrites,
        locals_: LocalNamespaces,
        settle: Settle,
        head: tuple[int, int, bytes],
        shards: ShardMap,
        on_nameless: Callable[[Sequence[Applied]], None] = lambda _records: None,
        admit: Admit = lambda _t, _written: None,
        changes: ChangeWitness | None = None,
    ) -> None:
        """`settle` is run before private writes are made known. `head`: the node, its incarnation,
        and a name for this process at the server. `on_nameless` is told of files that lost their
        last name that way, once the replica has it; it must not wait. `changes` has noted
        what becomes of requests' changes; None: nobody asks."""
        self._changes = changes or ChangeWitness()
        self._local = local
        self._applier = applier
        self._follower = follower
        self._caller = caller
        self._node = head[0]
        self._requests = LogRequests(caller, head)
        self._privates = privates
        self._locals = locals_
        self._settle = settle
        self._on_nameless = on_nameless
        self._admit = admit
        self._shards = shards
        self._shard = applier.shard
        self._sent: set[int] = set()
        """The private groups that were sent to this shard."""
        self._is_asking = False
        self._asked = self._answers = 0
        """Requests that were sent, and those that were answered."""
        self.is_full = False
        """Whether the server had no memory for the last change that would add."""
        self.unplaced = 0
        """Files whose close was acknowledged, and that had lost their places when others were told
        of them."""
        self._turns = LeaderBatch[_Commit](self._turn)

    def is_ours(self, token: bytes) -> bool:
        """Returns whether the token is that of the request under way."""
        return self._is_asking and token == self._requests.token

    async def answered(self) -> bool:
        """Returns when the request under way is answered, or failed, if there is one; whether the
        replica has what it did."""
        asked, answers = self._asked, self._answers
        if not self._is_asking:
            return True
        await detach.aside()
        while self._is_asking and self._asked == asked:
            await self._applier.until_woken()
        return self._answers > answers

    async def commit(self, function: Function, groups: Groups = lambda _t: ()) -> Any:
        """Commits the function's writes, and the private ones of these groups; returns the
        function's result, or raises its error. Raises Unavailable: then it may be committed or not;
        Conflict, TooLarge, Excluded."""
        commit = _Commit(self._caller.end(), function, groups=groups)
        await self._wait(commit)
        return commit.outcome.get()

    async def tell(self, function: Function) -> Any:
        """Does what `commit` does, of what the engine has of namespaces that end being each node's
        own (`engine_layer`)."""
        commit = _Commit(self._caller.end(), function, is_told=True)
        await self._wait(commit)
        return commit.outcome.get()

    async def propose(self, given: Proposal, *, is_step: bool = False) -> bool:
        """Commits a proposal that was run elsewhere on this replica. False: it has to be run again,
        on the present replica. Raises what `commit` raises."""
        commit = _Commit(self._caller.end(), None, given, turns=self._locals.turns)
        commit.is_step = is_step
        await self._wait(commit)
        return not commit.is_refused

    async def until_idle(self) -> None:
        """Returns when nothing waits."""
        await self._turns.until_idle()

    def fail(self, error: Exception) -> None:
        """Fails all that wait."""
        self._turns.fail(error)

    async def _wait(self, commit: _Commit) -> None:
        self._follower.check_change()
        if len(self._turns.queue) >= MOST_WAITING:
            raise Unavailable(f"{MOST_WAITING} changes of the metadata wait already: try again")
        await detach.aside()
        await self._turns.wait(commit)

    async def _turn(self) -> None:
        """Runs those that wait, and proposes their writes."""
        queue, turns = self._turns.queue, self._turns
        packed: list[Packed] = []
        proposals: list[_Commit] = []
        mark, below = self._applier.mark, Below()

        def run(t: Transaction) -> dict[bytes, bytes | None]:
            self._run(t, packed, proposals, below)
            return self._whole(t, proposals, below)

        try:
            self._follower.check()
            whole = self._local.read_now(run)
            if proposals:
                turns.taken = list(proposals)
                away = self.is_full and proposals[-1].growth.takes_away
                takes = (b"away" if away else b"") + (b"turn" if proposals[-1].turns else b"")
                noted = [each.asking if each.is_noted else 0 for each in proposals]
                self._changes.about_to_send(self._shard, *self._requests.following, noted)
                results = await self._ask(mark, packed, proposals, takes, whole)
                self.is_full = self.is_full and away
                # Those that were done are private no more, those that were refused are so still.
                self._forget_sent()
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

    def _run(
        self, t: Transaction, packed: list[Packed], proposals: list[_Commit], below: Below
    ) -> None:
        """Runs the waiting transactions; those to be proposed are taken from the queue, and what
        they write is added to `below`."""
        queue, bytes_ = self._turns.queue, 0
        while queue and len(proposals) < LIMIT:
            commit = queue[0]
            if proposals and commit.is_told != proposals[-1].is_told:
                return  # of one key they read different values
            steps = self._steps(commit, t, below)
            parts = _packed(steps)
            bytes_ += sum(size(each.items) for each in parts)
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
                packed += parts
                for _ in steps[1:]:
                    aside = _Commit(commit.end, _nothing, is_told=commit.is_told)
                    aside.is_aside = True
                    proposals.append(aside)
                proposals.append(commit)
                commit.turns = any(_writes_namespace(step) for step, _ in steps)
                views = [view for _, view in steps if view is not None]
                commit.unplaced = sum(view.unplaced for view in views)
                commit.nameless = [
                    Applied(*each)
                    for view in views
                    if view.nameless
                    for each in view.left_nameless()
                ]
                for step, view in steps:
                    self._note_sent(inodes_among(step.writes))
                    if view is not None:
                        below.add(view)
                        self._note_sent(view.carried)
                if commit.turns:
                    return

    def _whole(
        self, t: Transaction, proposals: list[_Commit], below: Below
    ) -> dict[bytes, bytes | None]:
        """Returns all that the proposals write, with its values; nothing where the server has to
        look at them one by one, should nobody have committed since the replica's last entry."""
        if not self._requests.may_append or self.is_full:
            return {}
        if any(each.function is None or each.turns for each in proposals):
            return {}
        shadows, layer = self._privates.shadows, self._locals.layer
        there = Layered(t, layer.above()) if layer.stages else t
        return below.all(lambda key: shadows[key] if key in shadows else there.get(key))

    def _steps(
        self, commit: _Commit, t: Transaction, below: Below
    ) -> list[tuple[Proposal, View | None]]:
        """Returns the steps of one waiting commit, its own the last; none if it changed nothing, or
        has to be run again."""
        steps = self._run_one(commit, t, below)
        if self._shards.is_used and self._shard == TOP and not commit.is_step:
            packed = t.get(keys.INTENTION)
            if packed is not None:
                intention = read_intention(packed)
                if any(intention.meets(step) for step, _ in steps):
                    commit.conclude(Intended())
                    return []
            for step, _ in steps:
                step.reads[keys.INTENTION] = packed  # type: ignore[index]
        return steps

    def _run_one(
        self, commit: _Commit, t: Transaction, below: Below
    ) -> list[tuple[Proposal, View | None]]:
        is_local = self._locals.local_key
        base: Base = t
        if commit.is_told:
            base, is_local = Layered(t, self._locals.layer.above()), None
        view = View(base, self._local.node, below, self._privates, is_local=is_local)
        if commit.function is None:
            given = commit.given
            assert given is not None, "it is one or the other"
            is_outdated = commit.of_turns != self._locals.turns
            if is_outdated or not all(is_range_so(t, *each) for each in given.ranges):
                commit.is_refused = True
                return []
            touched = self._privates.touched((*given.reads, *given.writes), given.ranges)
            if self._shards.is_used:  # a range may reach over all namespaces
                touched = {ino for ino in touched if self._shards.of_inode(ino) == self._shard}
            if not touched:
                return [(given, None)]
            view.carry(self._settle, touched)
            try:
                if not commit.is_step:  # of a change that was admitted as a whole
                    self._admit(view, [*view.writes, *view.merges])
            except Excluded as error:
                commit.conclude(error)
                return []
            return [(view.proposal(), view), (given, None)]
        groups = list(commit.groups(t))
        self._run_asked(commit, commit.function, view, groups)
        if not view.is_needed:
            return []
        proposal = view.proposal()
        if not self._shards.is_used:
            return [(proposal, view)]
        if self._shards.shut and self._shards.is_shut([*proposal.writes, *dict(proposal.merges)]):
            commit.conclude(Moving())
            return []
        parts = self._shards.divided(proposal, self._shard)
        if parts.keys() - {self._shard}:
            parts = self._shards.divided(view.proposal(is_elsewhere=True), self._shard)
            carried = {ino for ino in view.carried if self._shards.of_inode(ino) != self._shard}
            commit.conclude(Elsewhere(parts, commit.outcome.value, carried))
            return []
        return [(parts[self._shard], view)]

    def _run_asked(
        self, commit: _Commit, function: Function, view: View, groups: Sequence[int]
    ) -> None:
        """Runs a function in the name of the request that it was given for: the task that does so
        may be another request's."""
        witness = self._changes.witness
        if witness is None or not commit.asking:
            commit.outcome = _run(function, view, self._settle, groups, self._admit)
            return
        witness.has_noted = False
        before = asking.set(commit.asking)
        try:
            commit.outcome = _run(function, view, self._settle, groups, self._admit)
        finally:
            asking.reset(before)
        commit.is_noted = witness.has_noted

    def _note_sent(self, inos: Iterable[int]) -> None:
        for ino in inos:
            self._privates.sent[ino] = False
            self._sent.add(ino)

    def _forget_sent(self) -> None:
        for ino in self._sent:
            self._privates.sent.pop(ino, None)
        self._sent.clear()

    async def _ask(
        self,
        mark: ReplicaMark,
        packed: list[Packed],
        proposals: list[_Commit],
        takes: bytes,
        whole: dict[bytes, bytes | None],
    ) -> bytes:
        """Returns a digit for each; none if the replica was too old. `whole`: what `_whole` says.
        Raises Unavailable, _Full."""
        run = b"here" if all(each.function is not None for each in proposals) else b"before"
        end = max(each.end for each in proposals)
        self._is_asking = True
        self._asked += 1
        try:
            sent_at = now()
            try:
                request = Request(packed, whole, run, takes, end)
                answer = await self._requests.send(mark, request)
            except NoSpace as error:
                raise _Full(error) from error
            if answer.status == "fenced":
                raise Unavailable(
                    f"node {self._node} was removed, or started again elsewhere: this one may"
                    " not write any more"
                )
            if not await self._follower.take(answer, sent_at):
                await self._follower.catch_up_by(self._caller)
            self._follower.committed(sent_at)
            self._answers += 1
            return answer.results or b"0" * len(proposals)
        finally:
            self._is_asking = False
            self._applier.wake_waiting()

    def _judge(self, commit: _Commit, is_done: bool) -> None:
        if is_done:
            self._changes.done(commit.asking if commit.is_noted else 0)
            self.unplaced += commit.unplaced
            if commit.nameless:
                self._on_nameless(commit.nameless)
            commit.conclude()
        elif commit.given is not None:
            commit.is_refused = True
            commit.conclude()
        elif trio.current_time() >= commit.end:
            commit.conclude(Conflict("others committed first until the deadline: try again"))

    def _refuse(self, error: NoSpace, proposals: list[_Commit]) -> None:
        """Refuses proposals for which the server has no memory, and of which it did nothing.
        Removals are asked for again, by themselves, and done all the same."""
        self._forget_sent()
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


def _packed(steps: list[tuple[Proposal, View | None]]) -> list[Packed]:
    """Returns the steps as they are sent: another process's was run on none before it in the
    request, but on what goes just before it."""
    elsewhere = Basis.AFTER if len(steps) > 1 else Basis.ALONE
    return [proposed(step, elsewhere if view is None else Basis.ALL) for step, view in steps]


def _writes_namespace(step: Proposal) -> bool:
    return _NAMESPACE in {key[0] for key in step.writes}


def _growth(steps: list[tuple[Proposal, View | None]]) -> Growth:
    return reduce(Growth.with_, (step.growth for step, _ in steps), NONE)


def _nothing(t: Transaction) -> None:
    """Changes nothing."""


def _run(
    function: Function, view: View, settle: Settle, inos: Sequence[int], admit: Admit
) -> CommitOutcome:
    try:
        result = function(view)
        if inos or view.is_needed:
            view.carry(settle, inos)
            admit(view, [*view.writes, *view.merges])
        return CommitOutcome(result)
    except Exception as error:
        view.give_up()
        return CommitOutcome(error=error)
