"""A node's part in changes over two shards (`kvfs.meta.shards.intention`): makes its own, and ends
those that others began and left.

While one stands, TOP takes what has nothing to do with it. The rest waits, up to its deadline.
"""

import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from kvfs.base.errors import KvfsError, Unavailable
from kvfs.meta import keys
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.records import unpack_namespace
from kvfs.meta.redis.log import Proposal
from kvfs.meta.redis.scripts import TOP
from kvfs.meta.shards.intention import Intention, Steps, conclude, forbid, read_intention
from kvfs.meta.shards.shard_map import is_own
from kvfs.meta.shards.shard_replica import ShardReplica

PATIENCE_S: Final = 1.0
"""Time that whoever began a change over two shards has before another one ends it."""
_RETRY_S: Final = 0.25
_NOTHING: Final = Proposal({}, (), {}, ())
_log = logging.getLogger(__name__)


class TwoShardChanges:
    """These changes, of one replica."""

    def __init__(
        self,
        local: EmbeddedEngine,
        top: ShardReplica,
        open_: Callable[[int], ShardReplica],
        whole: Callable[[ShardReplica], Awaitable[ShardReplica]],
    ) -> None:
        """`open_` gives a namespace's shard, `whole` waits until it can be read; this one raises
        Unavailable."""
        self._local = local
        self._top = top
        self._open = open_
        self._whole = whole
        self._intended = trio.Event()
        """Set when there is an intention to look after."""
        self._ended = trio.Event()
        """Set when it is gone; then it is another one."""

    async def make(self, parts: dict[int, Proposal], end: float) -> bool:
        """Commits in TOP and another shard, all or nothing; returns whether it was done: else it is
        to be run again. Raises NotSupported (more shards); Unavailable: it is done or undone by
        whoever finds it, or another one stands there until `end`."""
        number = next((shard for shard in parts if shard != TOP), TOP)
        key = keys.place(number)
        is_new = key in parts.get(TOP, _NOTHING).writes
        if not is_new and not is_own(self._local.read_now(lambda t: t.get(key))):
            return False  # it was gathered meanwhile
        other = await self._begun(number, is_new=is_new)
        before, place = self._local.read_now(lambda t: (t.get(keys.reached(number)), t.get(key)))
        if not is_new and not is_own(place):
            return False
        steps = Steps(parts, secrets.token_bytes(8), before)
        try:
            if not await self._top.proposer.propose(steps.intend(place), is_step=True):
                await self.until_ended(end)
                return False
            is_reached = await other.proposer.propose(steps.reach(), is_step=True)
            return await self._conclude(steps.intention, is_reached=is_reached)
        finally:
            self.look()

    async def run(self) -> None:
        """Ends what others began and left, until cancelled."""
        self.look()
        while True:
            await self._intended.wait()
            self._intended = trio.Event()
            intention = self._pending()
            if intention is None:
                continue
            with trio.move_on_after(PATIENCE_S):
                await self._ended.wait()
            try:
                found = self._pending()
                if found is not None and found.id == intention.id:
                    await self._end(intention)
                    _log.warning("%s that was left half done is ended", self._shown(intention))
            except KvfsError as error:
                _log.warning("%s is half done: %s", self._shown(intention), error)
                await trio.sleep(_RETRY_S)
            self.look()

    async def until_ended(self, end: float) -> None:
        """Returns when no such change stands. Raises Unavailable at `end`."""
        with trio.move_on_at(end):
            while self._pending() is not None:
                await self._ended.wait()
        intention = self._pending()
        if intention is not None:
            raise Unavailable(
                f"{self._shown(intention)} is half done until its server,"
                f" {self._open(intention.namespace_id).server}, answers: start that one, and try"
                " again"
            )

    def look(self) -> None:
        """Takes notice of whether one stands."""
        if self._pending() is None:
            self._ended.set()
            self._ended = trio.Event()
        else:
            self._intended.set()

    async def _begun(self, number: int, *, is_new: bool) -> ShardReplica:
        """Returns the shard, which the change may make. Raises Unavailable."""
        found = self._open(number)
        found.is_new = found.is_new or is_new
        return await self._whole(found)

    async def _end(self, intention: Intention) -> None:
        """Does or forbids what another one began. Raises Unavailable, Conflict."""
        number = intention.namespace_id
        other = await self._begun(number, is_new=keys.place(number) in intention.writes)
        key = keys.reached(number)
        while True:
            await other.follower.catch_up()
            found = self._local.read_now(lambda t: t.get(key))
            if found != intention.before:  # reached, forbidden, or too late: it stays as it is
                await self._conclude(intention, is_reached=found == intention.id)
                return
            await other.proposer.propose(forbid(intention), is_step=True)

    async def _conclude(self, intention: Intention, *, is_reached: bool) -> bool:
        while (found := self._pending()) is not None and found.id == intention.id:
            await self._top.proposer.propose(
                conclude(intention, is_reached=is_reached), is_step=True
            )
        return is_reached

    def _pending(self) -> Intention | None:
        packed = self._local.read_now(lambda t: t.get(keys.INTENTION))
        return None if packed is None else read_intention(packed)

    def _shown(self, intention: Intention) -> str:
        key = keys.namespace(intention.namespace_id)
        record = self._local.read_now(lambda t: t.get(key)) or intention.writes.get(key)
        name = unpack_namespace(record).name.decode(errors="backslashreplace") if record else ""
        return f"a change of the namespace '{name}' ({intention.namespace_id})"
