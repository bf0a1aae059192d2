"""Transactions for a process that is no node: a copy of the metadata, their rebuilding.

It makes a metadata replica in a temporary directory (TMPDIR: some 400 bytes a file), which is read
from the server at its first use, and proposes as a node does it (`kvfs.meta.redis.log`), so
replicas hear of it. The server keeps no order of its keys: whoever wants ranges needs them all.

Invariants
- Everything that a run of the function reads existed at one moment after the call began; of
  namespaces with shards of their own, each at a moment of its own.
- A transaction whose answer was lost is not committed twice: it has a number that grows.
"""

import secrets
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import trio

from kvfs.base.clock import now
from kvfs.base.errors import Conflict, NotSupported, Unavailable
from kvfs.meta import exclusive, keys
from kvfs.meta.engine import Transaction
from kvfs.meta.exclusive import REVOKED_S, Excluded
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.redis.about import read_info
from kvfs.meta.redis.calling import RetryingClient, locate
from kvfs.meta.redis.log import Proposal
from kvfs.meta.redis.restoring import discard_shards
from kvfs.meta.redis.scripts import TOP
from kvfs.meta.replica.applier import Applier
from kvfs.meta.replica.committer import Proposer
from kvfs.meta.replica.follower import Follower
from kvfs.meta.replica.local_namespaces import LocalNamespaces
from kvfs.meta.replica.local_writes import LocalWrites
from kvfs.meta.replica.replica_mark import new_mark
from kvfs.meta.replica.replica_view import View
from kvfs.meta.shards.shard_map import ShardMap, is_half_moved

T = TypeVar("T")
DEADLINE_S: Final = 10.0
_NOBODY: Final = 0
"""Stands in for a node's number and incarnation."""


class _Shard(NamedTuple):
    """A shard of the replica."""

    caller: RetryingClient
    follower: Follower
    proposer: Proposer


class DirectEngine:
    """The metadata at `url` (`location.HELP`), for threads without an event loop. `node`: as which
    node transactions run. `deadline_s` bounds each request, and how long a transaction is tried.
    Raises Unavailable, NotSupported, Invalid; NoSpace (the temporary directory)."""

    def __init__(
        self,
        url: str,
        *,
        node: bytes = b"",
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._location = locate(url)
        self._caller = RetryingClient(self._location, deadline_s)
        self._shards = ShardMap()
        self._all: dict[int, _Shard] = {}
        self._turn = trio.Lock()
        self._stop = trio.Event()
        started: Future[trio.lowlevel.TrioToken] = Future()
        self._thread = threading.Thread(
            target=trio.run, args=(self._serve, started), name="kvfs-engine", daemon=True
        )
        self._thread.start()
        self._token = started.result()
        self._directory = tempfile.TemporaryDirectory(prefix="kvfs-engine-")
        self._local: EmbeddedEngine | None = None
        try:
            self._cluster = self._call(self._caller.examine, None)
            self._local = EmbeddedEngine(self._directory.name)
            self._local.node = node
            self._privates, self._locals = LocalWrites(self._local), LocalNamespaces(self._local)
            self._all = {TOP: self._opened(TOP, self._caller)}
            self._shards.followed = self._all
        except BaseException:
            self.close()
            raise

    def read_now(self, fn: Callable[[Transaction], T]) -> T:
        """Runs `fn` on a read-only view. Raises Unavailable."""
        local: EmbeddedEngine = self._call(self._catch_up)
        return local.read_now(lambda t: fn(View(t, local.node, writable=False)))

    def transact_now(self, fn: Callable[[Transaction], T]) -> T:
        """Runs `fn` and commits its writes. Raises Unavailable: then it may be committed or not;
        Conflict, NoSpace, TooLarge, NotSupported (it changes two shards), Busy (other nodes change
        names there all the time)."""
        end = now() + self._caller.deadline_s
        while True:
            local: EmbeddedEngine = self._call(self._catch_up)
            try:
                result, view = local.read_now(partial(_run, fn, local.node))
            except Excluded as found:
                if now() >= end:
                    raise
                self._end_exclusive(found.namespace_id)
                continue
            if not view.is_needed:
                return result
            if self._call(self._propose, view.proposal(is_elsewhere=True)):
                return result
            if now() >= end:
                raise Conflict("others committed first until the deadline: try again")

    def _end_exclusive(self, namespace_id: int) -> None:
        """Ends the exclusive delegation of a node: it gives it back, or has ceased to believe."""

        def ask(t: Transaction) -> bytes | None:
            which = exclusive.of_other(t, namespace_id)
            if which is not None:
                exclusive.ask_back(t, namespace_id, which)
            return which

        which = self.transact_now(ask)
        if which is not None:
            time.sleep(REVOKED_S)
            self.transact_now(lambda t: exclusive.end(t, namespace_id, which))

    def refresh_now(self) -> None:
        """Forgets what it read of the server, and has it read anew at the next use. Raises
        Unavailable."""
        self._call(self._begin_anew)

    async def sync(self, namespace_id: int | None = None) -> None:  # noqa: ARG002 -- all is one
        """Makes everything committed before the call kept, as `promise` says. Raises
        Unavailable."""
        await trio.to_thread.run_sync(self.promise)

    def promise(self) -> str:
        """Makes the server keep the commits; returns which of them survive its death from now on.
        Raises Unavailable."""
        promises: list[str] = [self._call(each.caller.keep) for each in self._all.values()]
        return promises[0]

    def discard_shards(self) -> None:
        """Discards metadata of which namespaces have shards of their own, and these shards; others
        stay. Killed: an unfinished copy is there, and it is done by the next call. Raises
        Unavailable."""
        self._call(self._discard)

    def place(self) -> tuple[str, int, str]:
        """Returns the server's identity, the database and the prefix: equal for two engines that
        are one, whatever their URLs. Raises Unavailable."""
        about = read_info(self._call(self._caller.call, b"INFO", b"server"))
        return about["run_id"], self._location.db, self._location.prefix

    def close(self) -> None:
        """Ends the thread, and the waits of others; idempotent."""
        if self._thread.is_alive():
            for caller in (self._caller, *(each.caller for each in self._all.values())):
                self._token.run_sync_soon(caller.stop)
            self._token.run_sync_soon(self._stop.set)
            self._thread.join()
        if self._local is not None:
            self._local.close()
        self._directory.cleanup()

    def _opened(self, shard: int, caller: RetryingClient) -> _Shard:
        """Returns a shard that is to be read."""
        assert self._local is not None, "it is open"
        parts = self._privates, self._locals
        mark = new_mark(self._cluster, _NOBODY)
        applier = Applier(
            *(self._local, mark, lambda _token: False, lambda _applied: None),
            *(*parts, self._shards, shard),
        )
        follower = Follower(applier, caller, caller)
        head = (_NOBODY, _NOBODY, secrets.token_hex(8).encode())
        proposer = Proposer(
            *(self._local, applier, follower, caller, *parts),
            lambda _t, _ino, _published_at: True,
            head,
            self._shards,
        )
        return _Shard(caller, follower, proposer)

    async def _catch_up(self) -> EmbeddedEngine:
        """Returns the replica, with everything that was committed before the call."""
        assert self._local is not None, "it is open"
        await _bring_up(self._all[TOP])
        if self._shards.is_used:
            self._local.read_now(_refuse_half_done)
        for space in self._shards.spaces:
            shard = keys.unpack_node(space)
            if shard not in self._all:
                caller = RetryingClient(self._location, self._caller.deadline_s, shard)
                self._all[shard] = self._opened(shard, caller)
                if await caller.call(b"HGET", caller.state, b"position") is None:
                    raise Unavailable(
                        f"the engine {self._location.shown} lost the metadata of namespace {shard},"
                        f" by {caller.at}: restore what that server had, or recreate all metadata"
                        " with kvfs rebuild --replace"
                    )
            await _bring_up(self._all[shard])
        return self._local

    async def _propose(self, proposal: Proposal) -> bool:
        if not self._shards.is_used:
            return await self._all[TOP].proposer.propose(proposal)
        parts = self._shards.divided(proposal, TOP)
        if len(parts) != 1:
            raise NotSupported(
                f"namespaces at {self._location.shown} have shards of their own (`kvfs engine"
                " spread`), which are not changed together: --replace, of all metadata, brings them"
                " together first"
            )
        ((shard, part),) = parts.items()
        return await self._all[shard].proposer.propose(part)

    async def _discard(self) -> None:
        assert self._local is not None, "it is open"
        top = self._all[TOP]
        await _bring_up(top)
        if not self._shards.is_used:
            return
        found = {*self._shards.spaces, *self._shards.shut}
        deadline_s = self._caller.deadline_s
        await discard_shards(self._location, deadline_s, self._caller, sorted(found))
        for shard in self._all.keys() - {TOP}:
            self._all.pop(shard).caller.stop()
        top.follower.begin_anew()
        await _bring_up(top)
        self._local.read_now(self._shards.load)

    async def _begin_anew(self) -> None:
        for each in self._all.values():
            if each.follower.whole.is_set():
                each.follower.begin_anew()

    def _call(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Does a step in the engine's loop, one after the other."""

        async def run() -> Any:
            async with self._turn:
                return await step(*arguments)

        try:
            return trio.from_thread.run(run, trio_token=self._token)
        except (trio.RunFinishedError, trio.Cancelled):
            raise Unavailable("the engine is closed") from None

    async def _serve(self, started: "Future[trio.lowlevel.TrioToken]") -> None:
        started.set_result(trio.lowlevel.current_trio_token())
        await self._stop.wait()


async def _bring_up(shard: _Shard) -> None:
    """Returns when the shard is whole, with all that was committed there before the call."""
    if shard.follower.whole.is_set():
        try:
            await shard.follower.catch_up_by(shard.caller)
        except Unavailable:
            if shard.follower.whole.is_set():
                raise
    await shard.follower.fill()


def _refuse_half_done(t: Transaction) -> None:
    """Raises Conflict while a change of a namespace is under way over two shards."""
    places = t.scan(keys.PLACE, keys.after(keys.PLACE))
    if t.get(keys.INTENTION) is not None or any(is_half_moved(value) for _, value in places):
        raise Conflict("a change of a namespace is half done: start a node, which ends it")


def _run(fn: Callable[[Transaction], T], node: bytes, t: Transaction) -> tuple[T, View]:
    view = View(t, node)
    result = fn(view)
    exclusive.check(view, [*view.writes, *view.merges])
    return result, view
