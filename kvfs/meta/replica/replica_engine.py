"""The engine of a node in a cluster: a replica of all metadata in LMDB, whose changes are committed
by a server (Redis or Valkey).

Invariants
- A read sees one moment of the whole; it is at most as old as `heard_at` says. `catch_up` brings it
  up to now.
- A transaction whose `transact` returned is committed at the server, and in the replica; writes
  that are private to this node (`private`) in the replica alone, until another node has to know.
- Nothing is committed on a basis that the server does not have any more.

A cache of reads would not do: a prompt asks for many names that are not there, each for the first
time, and only a node that has all names can tell that by itself. The price is some 400 bytes a file
on each node.
"""

import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, cast

import trio

from kvfs.base.errors import Unavailable
from kvfs.meta import keys
from kvfs.meta.delegations import Delegated
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb.embedded_engine import Database, EmbeddedEngine
from kvfs.meta.records import Namespace, namespace_of, unpack_namespace
from kvfs.meta.redis.calling import RetryingClient, locate
from kvfs.meta.redis.log import Proposal
from kvfs.meta.replica.applier import Applied, Applier
from kvfs.meta.replica.async_publisher import Behind
from kvfs.meta.replica.committer import Function, Proposer
from kvfs.meta.replica.follower import Follower
from kvfs.meta.replica.local_writes import Privates, Settle
from kvfs.meta.replica.recalls import PATIENCE_S, Recalls
from kvfs.meta.replica.replica_mark import ReplicaMark, check_mirror

T = TypeVar("T")
DEADLINE_S: Final = 10.0
_RETRY_S: Final = 1.0
_log = logging.getLogger(__name__)


class MirrorEngine:
    """The replica in `local`, of the metadata at `url`, which must be those of `cluster` (None:
    anybody's). All methods but `read_now` belong to the event loop that runs `run`."""

    immediate = False
    reads_immediate = True

    def __init__(
        self,
        local: EmbeddedEngine,
        url: str,
        *,
        node: int,
        incarnation: int = 0,
        cluster: str | None = None,
        deadline_s: float = DEADLINE_S,
        on_applied: Callable[[Sequence[Applied]], None] = lambda _applied: None,
        settle: Settle = lambda _t, _ino, _published_at: None,
        is_alive: Callable[[int], bool] = lambda _node: True,
    ) -> None:
        """`settle` handles the name of a private inode that is to be known. `on_applied` is told
        what others changed, when it is in the replica; it must not wait. `is_alive`: whether
        another node holds its lease. Raises Invalid, NotSupported (the URL)."""
        location = locate(url)
        self.local = local
        self.node = node
        self._cluster = cluster
        self._callers = [RetryingClient(location, deadline_s) for _ in range(4)]
        self._proposing, asking, following, self._keeping = self._callers
        self._privates = Privates(local)
        self._on_applied = on_applied
        self._applier = Applier(
            *(local, _new_mark("", node), self._is_ours, self._applied, self._privates),
            on_filled=self._look_for_recalls,
        )
        self._follower = Follower(self._applier, asking, following)
        name = secrets.token_hex(8).encode()
        head = (node, incarnation, name)
        self._proposer = Proposer(
            local,
            self._applier,
            self._follower,
            self._proposing,
            self._privates,
            settle,
            head,
        )
        self._behind = Behind(self._make_known)
        self._recalls = Recalls(node, self._privates, self._proposer, is_alive)
        self._keep_lock = trio.Lock()
        self._is_closed = False
        local.node = keys.pack_node(node)

    # ---- how it is

    @property
    def position(self) -> int:
        """The number of the last commit that the replica holds."""
        return self._applier.mark.position

    @property
    def server(self) -> str:
        """The server that was asked last, of those of the URL or of their cluster."""
        return str(self._proposing.at)

    @property
    def is_full(self) -> bool:
        """Whether the server had no memory for the last change that would add."""
        return self._proposer.is_full

    @property
    def refusal(self) -> str | None:
        """The reason why the replica cannot take the commits of others (its disk is full, for one),
        or None."""
        return self._applier.refusal

    @property
    def heard_at(self) -> float:
        """The time when the replica held everything committed, at least, by `clock.now`; 0: it is
        not fit for use."""
        return self._follower.heard_at

    @property
    def round_trips(self) -> int:
        """Requests sent for transactions and look-ups so far."""
        return sum(caller.requests for caller in self._callers[:2])

    # ---- what the core asks

    def read_now(self, fn: Callable[[Transaction], T]) -> T:
        """Like `read`, from any thread."""
        if not self._follower.whole.is_set():
            self._follower.check()
        return self.local.read_now(fn)

    def namespace(self, number: int) -> Namespace | None:
        """Returns the record of a namespace, None if there is none: it is asked for several times a
        file, so it is remembered while it stays. It must not be changed. Raises Unavailable."""
        known = self._applier.namespaces
        if number not in known or not self._follower.whole.is_set():
            value = self.read_now(lambda t: t.get(keys.namespace(number)))
            known[number] = None if value is None else unpack_namespace(value)
        return known[number]

    async def read(self, fn: Callable[[Transaction], T]) -> T:
        """Runs `fn` on the replica; never suspends. Raises Unavailable while it is not whole."""
        return self.read_now(fn)

    async def transact(
        self, fn: Callable[[Transaction], T], *, private: int = 0, behind: bool = False
    ) -> T:
        """Runs `fn` on the replica, and commits. Cancelled while it waits: nothing was committed;
        once it was sent, it is waited for, at most until the deadline.

        `private`: an inode that `fn` makes or changes, and nothing else but its entry: if possible
        it is committed on this node alone, at once, and others know of it with the next transaction
        that reads or writes any of it; `behind`: they shall know of it soon.

        Raises Unavailable (it may be committed or not), Conflict, TooLarge."""
        self._check_open()
        wanted: Function = fn
        if private and not (behind and self._behind.is_full):
            self._follower.check()
            done = self._privates.commit(fn, private, is_published=behind)
            if done.is_done:
                if behind:
                    self._behind.add([private])
                return cast("T", done.result)
            if done.lacks_delegation:
                wanted = self._recalls.taking(namespace_of(private), fn)
        result: T = await self._commit(wanted)
        return result

    async def propose(self, proposal: Proposal) -> bool:
        """Commits a proposal that another process ran on this replica. False: it must be run again,
        on the present replica. Cancelled, raises: as for `transact`."""
        self._check_open()
        return await self._proposer.propose(proposal)

    async def recall(self, namespace_id: int) -> None:
        """Prepares for another process that removes a directory of the namespace: all files that
        other nodes made there are known then. Raises Busy, Unavailable, Conflict, NoSpace."""
        self._check_open()
        await self._recalls.recall(namespace_id, trio.current_time() + PATIENCE_S)

    async def catch_up(self) -> None:
        """Returns when the replica holds everything that was committed anywhere before the call:
        one round trip, which all waiting callers share. Raises Unavailable."""
        self._check_open()
        await self._follower.catch_up()

    async def sync(self) -> None:
        """Makes everything committed before the call kept as `promise` says; what this host keeps
        for itself survives power loss. Raises Unavailable."""
        await self.promise()

    async def promise(self) -> str:
        """Like `sync`; returns which commits survive the server's death."""
        self._check_open()
        await self._behind.drain()
        await self.local.sync()
        async with self._keep_lock:
            return await self._keeping.keep()

    # ---- what the node asks of the file

    def generation(self) -> int:
        """Like `EmbeddedEngine.generation`."""
        return self.local.generation()

    def database(self, name: bytes) -> Database:
        """Like `EmbeddedEngine.database`: of this node alone."""
        return self.local.database(name)

    async def run(self, task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Follows the cluster until cancelled; started when the replica is whole and up to date,
        however long the server takes to be there. Raises Invalid, NotSupported, Conflict: the
        server is unsuitable."""
        try:
            cluster = await self._examined()
            mark = check_mirror(self.local, cluster, self.node)
            self._applier.mark = mark or _new_mark(cluster, self.node)
            self._privates.load()
            if mark is None:
                self._privates.forget()
            self._behind.add(self._privates.published())
            async with trio.open_nursery() as nursery:
                try:
                    await nursery.start(self._follower.run)
                    nursery.start_soon(self._behind.run)
                    nursery.start_soon(self._recalls.run)
                    self._look_for_recalls()
                    task_status.started()
                    await trio.sleep_forever()
                finally:  # before its tasks are waited for: requests under way are not cancelled
                    self.close()
        finally:
            self.close()

    def close(self) -> None:
        """Gives up the work under way, and the connections; idempotent. The file is the
        caller's."""
        self._is_closed = True
        for caller in self._callers:
            caller.stop()

    async def _examined(self) -> str:
        complained = False
        while True:
            try:
                return await self._keeping.examine(self._cluster)
            except Unavailable as error:
                if not complained:
                    _log.warning("%s; trying again", error)
                complained = True
                await trio.sleep(_RETRY_S)

    def _check_open(self) -> None:
        if self._is_closed:
            raise Unavailable("the engine is closed")

    async def _commit(self, fn: Function) -> Any:
        """Commits; delegations of others that must go first are recalled. Raises Busy too."""
        end = 0.0
        while True:
            try:
                return await self._proposer.commit(fn)
            except Delegated as found:
                end = end or trio.current_time() + PATIENCE_S
                await self._recalls.recall(found.namespace_id, end)

    def _look_for_recalls(self) -> None:
        self.local.read_now(self._recalls.found)

    def _applied(self, applied: Sequence[Applied]) -> None:
        self._recalls.applied(applied)
        self._on_applied(applied)

    async def _make_known(self, inos: list[int]) -> None:
        private = [ino for ino in inos if ino in self._privates.groups]
        if private:
            await self._proposer.make_known(private)

    def _is_ours(self, token: bytes) -> bool:
        return self._proposer.is_ours(token)


def _new_mark(cluster: str, node: int) -> ReplicaMark:
    """Returns the mark of a replica that holds nothing yet."""
    return ReplicaMark(cluster=cluster, node=node, position=0, token=b"", filled=b"")
