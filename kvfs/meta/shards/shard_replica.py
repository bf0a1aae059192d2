"""A node's part in one shard: its log followed, and commits proposed to it."""

import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import Any, Final, NamedTuple

import trio

from kvfs.base.errors import KvfsError, Unavailable
from kvfs.meta.asked_requests import ChangeWitness
from kvfs.meta.exclusive_keeper import Exclusives
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.node_leases import Lost
from kvfs.meta.redis.calling import RetryingClient
from kvfs.meta.redis.location import EngineLocation
from kvfs.meta.redis.log import BEGIN, ENTER
from kvfs.meta.redis.scripts import TOP, Item, Script
from kvfs.meta.replica.applier import Applied, Applier
from kvfs.meta.replica.async_publisher import AsyncPublisher
from kvfs.meta.replica.committer import Proposer
from kvfs.meta.replica.follower import Follower
from kvfs.meta.replica.local_namespaces import LocalNamespaces
from kvfs.meta.replica.local_writes import LocalWrites
from kvfs.meta.replica.replica_mark import new_mark, read_mark
from kvfs.meta.replica.replica_view import Settle
from kvfs.meta.shards.shard_map import ShardMap

_RETRY_S: Final = 1.0
_log = logging.getLogger(__name__)


class ReplicaParts(NamedTuple):
    """All that the shards of a node's replica share."""

    local: EmbeddedEngine
    location: EngineLocation
    deadline_s: float
    node: int
    incarnation: int
    privates: LocalWrites
    locals: LocalNamespaces
    shards: ShardMap
    settle: Settle
    on_applied: Callable[[Sequence[Applied]], None]
    on_filled: Callable[[], None]
    must_follow: Callable[[int], bool]
    """Whether the shard of a namespace is followed, used or not."""
    give_back: Callable[[int], None]
    """Has this node's delegation of a namespace given back soon."""
    exclusives: Exclusives
    changes: ChangeWitness


class ShardReplica:
    """The replica of one shard."""

    def __init__(
        self,
        parts: ReplicaParts,
        make_known: Callable[[list[int]], Awaitable[None]],
        shard: int = TOP,
        is_current: Callable[[], Awaitable[bool]] | None = None,
        bring_back: Callable[[Collection[int]], Awaitable[bool]] | None = None,
    ) -> None:
        """`is_current`: whether TOP knows this run of the node as the latest. `bring_back`: of TOP,
        that of its follower."""
        self._is_current = is_current or _always
        self.shard = shard
        self.behind = AsyncPublisher(make_known, parts.privates.is_waiting)
        self._parts = parts
        self._scope = trio.CancelScope()
        self.is_new = False
        """Whether this node makes it."""
        self._is_heard = trio.Event()
        self.callers = [RetryingClient(parts.location, parts.deadline_s, shard) for _ in range(4)]
        self.proposing, asking, self._following, self._keeping = self.callers
        self._keep_lock = trio.Lock()
        self._kept = -1
        """The position of the log up to which the server was asked to keep it."""
        self.promise = ""
        """The commits that survive the server's death, as it said last."""
        self.applier = Applier(
            parts.local,
            new_mark("", parts.node),
            self._is_ours,
            parts.on_applied,
            parts.privates,
            parts.locals,
            parts.shards,
            shard,
            on_filled=parts.on_filled,
        )
        back = () if bring_back is None else (bring_back,)
        self.follower = Follower(self.applier, asking, self._following, *back)
        head = (parts.node, parts.incarnation, secrets.token_hex(8).encode())
        self.proposer = Proposer(
            parts.local,
            self.applier,
            self.follower,
            self.proposing,
            parts.privates,
            parts.locals,
            parts.settle,
            head,
            parts.shards,
            parts.on_applied,
            parts.exclusives.admit,
            parts.changes,
        )

    @property
    def is_whole(self) -> bool:
        """Whether it can be read."""
        return self.follower.whole.is_set()

    @property
    def heard_still_at(self) -> float:
        """The time when the replica held everything committed, at least, by `clock.now`, if the
        server that said so has been there since; else 0: one that took its place may have lost the
        last commits, and accepted others."""
        heard_at = self.follower.heard_at
        is_apart = max(self.proposing.apart_at, self._following.apart_at) >= heard_at
        return 0.0 if is_apart else heard_at

    @property
    def server(self) -> str:
        """The server that it follows, or that it tried last."""
        lines = self._following, self._keeping  # which is the first to ask
        return str(next((each for each in lines if each.connections), self._following).at)

    def started(self, _value: None = None) -> None:
        """Takes notice that it is up to date (as the `task_status` of its follower)."""
        self._is_heard.set()

    @contextlib.asynccontextmanager
    async def aside(self) -> AsyncIterator[RetryingClient]:
        """A client beside all else, of one task at a time."""
        async with self._keep_lock:
            yield self._keeping

    async def examine(self, cluster: str | None) -> str:
        """Does what `RetryingClient.examine` does."""
        async with self.aside() as caller:
            return await caller.examine(cluster)

    async def until_examined(self, cluster: str | None) -> str:
        """Does what `examine` does, however long the server takes to be there. Raises
        NotSupported, Conflict, Invalid."""
        complained = False
        while True:
            try:
                return await self.examine(cluster)
            except Unavailable as error:
                if not complained:
                    _log.warning("%s; trying again", error)
                complained = True
                await trio.sleep(_RETRY_S)

    async def call(self, *command: Item) -> Any:
        """Does what `RetryingClient.call` does, beside all else."""
        async with self.aside() as caller:
            return await caller.call(*command)

    async def script(self, script: Script, *arguments: Item) -> Any:
        """Does what `RetryingClient.script` does, beside all else."""
        async with self.aside() as caller:
            return await caller.script(script, *arguments)

    async def keep(self) -> None:
        """Has the server keep what was committed before the call (`promise` says how), unless it
        has nothing new of a namespace's shard. Raises Unavailable."""
        position = self.applier.mark.position
        if self.shard != TOP and position == self._kept:
            return
        async with self.aside() as caller:
            self.promise = await caller.keep()
        self._kept = position

    async def until_heard(self) -> None:
        """Returns when it was up to date once, however long its server takes to be there. Raises
        Lost where that has lost what the replica has: to wait would be no use."""
        while not self._is_heard.is_set():
            if isinstance(self.follower.failure, Lost):
                raise self.follower.failure
            with trio.move_on_after(_RETRY_S):
                await self._is_heard.wait()

    async def until_whole(self) -> None:
        """Returns when it is whole, or known to fail."""
        while not self.is_whole and self.follower.failure is None:
            await self.follower.whole.wait()

    async def _enter(self) -> None:
        """Fences earlier runs of this node in a namespace's shard. Raises Unavailable too if this
        one was fenced: it was removed, or started again elsewhere, before or since; and if the
        shard has no log any more."""
        node, incarnation = self._parts.node, self._parts.incarnation
        if self.is_new:
            await self.script(BEGIN)
        elif await self.call(b"HGET", self.proposing.state, b"position") is None:
            shown = self._parts.location.shown
            raise Unavailable(
                f"the engine {shown} lost the metadata of a namespace, by {self.proposing.at}:"
                " restore what that server had"
            )
        is_latest = await self.script(ENTER, node, incarnation)
        if not is_latest or not await self._is_current():
            raise Unavailable(f"node {node} was removed, or started again elsewhere")

    async def run(self, cluster: str) -> None:
        """Follows a namespace's shard until cancelled, or ended."""
        try:
            with self._scope:
                await self._until_entered(cluster)
                self.follower.failure = None
                mark = self._parts.local.read_now(lambda t: read_mark(t, self.shard))
                self.applier.mark = mark or new_mark(cluster, self._parts.node)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.behind.run)
                    await self.follower.run(self)
            with trio.move_on_after(self._parts.deadline_s):  # they are answered, or go elsewhere
                await self.proposer.until_idle()
                await self.follower.until_idle()
        finally:
            self.close()

    async def _until_entered(self, cluster: str) -> None:
        complained = False
        while True:
            try:
                await self.examine(cluster)
                return await self._enter()
            except KvfsError as error:  # whatever its server says: other namespaces go on
                self.follower.refused(error)
                if not complained:
                    _log.warning("namespace %d: %s; trying again", self.shard, error)
                complained = True
                await trio.sleep(_RETRY_S)

    def end(self) -> None:
        """Ends its following for good: nothing of what is on its way is applied."""
        self.applier.end()
        self._scope.cancel()

    def close(self) -> None:
        """Idempotent."""
        for caller in self.callers:
            caller.stop()

    def _is_ours(self, token: bytes) -> bool:
        return self.proposer.is_ours(token)


async def _always() -> bool:
    return True
