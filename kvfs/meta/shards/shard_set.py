"""The shards of a node's replica: finds the one in which a transaction is committed, and opens
those that come.

A cluster that is not spread has TOP alone, and nothing here asks anything.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import trio

from kvfs.base.errors import Conflict, KvfsError, Unavailable
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.exclusive import Excluded
from kvfs.meta.records import namespace_of
from kvfs.meta.redis.log import FENCE, Proposal
from kvfs.meta.redis.scripts import TOP
from kvfs.meta.replica.applier import Applied
from kvfs.meta.replica.committer import Elsewhere, Function, Groups, Intended, Moving
from kvfs.meta.shards.first_shard import first_shard
from kvfs.meta.shards.following import Following
from kvfs.meta.shards.moves import Moves
from kvfs.meta.shards.shard_replica import ReplicaParts, ShardReplica
from kvfs.meta.shards.two_shard_changes import TwoShardChanges

T = TypeVar("T")


class ShardSet:
    """The shards of one replica. `parts.shards` is their map."""

    def __init__(self, parts: ReplicaParts) -> None:
        self._parts = parts
        self._map = parts.shards
        self._map.on_change = self._changed
        self.top = ShardReplica(parts, self._make_known, bring_back=self._bring_back)
        self.following = Following(parts, self._made, self.top)
        self.others = self.following.others
        """The shards of namespaces that are followed."""
        self._map.followed = self.others
        self._cluster = ""
        self._moves = Moves(parts, self.top, self.commit)
        self._changes = TwoShardChanges(
            parts.local, self.top, self.following.open, self.following.whole
        )

    @property
    def all(self) -> Iterator[ShardReplica]:
        """TOP, and the others."""
        yield self.top
        yield from list(self.others.values())

    def of(self, namespace_id: int) -> ShardReplica:
        """Returns the shard of a namespace's names and files; TOP if it is not followed."""
        return self.others.get(namespace_id, self.top)

    def is_whole(self, namespace_id: int) -> bool:
        """Returns whether all of a namespace is here, as of some moment."""
        return not self.following.is_own(namespace_id) or self.following.has(namespace_id)

    async def ready(self, namespace_id: int) -> ShardReplica:
        """Returns the shard of a namespace's names and files, which is followed from now on: if it
        is just being read, when it is whole. Raises Unavailable."""
        if not self.following.is_own(namespace_id):
            return self.top
        return await self.following.ready(namespace_id)

    async def catch_up(self, namespace_id: int) -> None:
        """Does what `Follower.catch_up` does, with the shard of a namespace's names and files, also
        if it moves meanwhile. Raises Unavailable."""
        found = None
        while found is None or found is not self.of(namespace_id):
            found = await self.ready(namespace_id)
            try:
                await found.follower.catch_up()
            except Unavailable:
                if found is self.top:
                    raise
                await self.top.follower.catch_up()  # it may have been gathered, and dropped
                if found is self.of(namespace_id):
                    raise

    def read_now(self, fn: Callable[[Transaction], T]) -> T:
        """Runs `fn` on the replica. Raises Unavailable if it reads of a shard that is not whole."""
        if not self.top.is_whole:
            self.top.follower.check()
        return self.following.read_now(fn)

    async def commit(self, fn: Function, groups: Groups = lambda _t: ()) -> Any:
        """Does what `Proposer.commit` does, in whichever shards it takes."""
        return await self._commit(self.guess(fn), fn, groups)

    async def _commit(self, shard: int, fn: Function, groups: Groups) -> Any:
        """Does so, beginning with this shard."""
        end = self.top.proposing.end()
        while True:
            try:
                return await (await self.ready(shard)).proposer.commit(fn, groups)
            except Elsewhere as found:
                _check_time(end)
                if found.carried:
                    await self.make_known(found.carried)
                elif len(found.parts) == 1:
                    (shard,) = found.parts
                elif await self._changes.make(found.parts, end):
                    return found.result
            except Intended:
                await self._changes.until_ended(end)
            except Moving:
                _check_time(end)
                await self._moves.wait()
            except Excluded as found:
                _check_time(end)
                await self._parts.exclusives.until_free(found.namespace_id)

    async def propose(self, proposal: Proposal) -> bool:
        """Does what `Proposer.propose` does, in whichever shards it takes."""
        if not self._map.is_used:
            return await self.top.proposer.propose(proposal)
        end = self.top.proposing.end()
        parts = self._map.divided(proposal, TOP)
        if len(parts) != 1:
            return await self._changes.make(parts, end)
        ((shard, part),) = parts.items()
        if self._map.is_shut(part.writes):
            await self._moves.wait()
            return False
        try:
            return await (await self.ready(shard)).proposer.propose(part)
        except Intended:
            await self._changes.until_ended(end)
            return False

    async def make_known(self, inos: Iterable[int]) -> None:
        """Commits the private writes of these inodes: of each shard all or none. Raises what
        `Proposer.commit` raises."""
        by_shard: dict[int, list[int]] = {}
        for ino in inos:
            by_shard.setdefault(self._map.of_inode(ino), []).append(ino)
        for shard, part in by_shard.items():
            await self._commit(shard, _nothing, partial(self._still_private, part))

    def _still_private(self, inos: Sequence[int], _t: Transaction) -> list[int]:
        return [ino for ino in inos if ino in self._parts.privates.groups]

    async def run(
        self, cluster: str, task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Follows all shards until cancelled; started when TOP is whole. Raises Lost before."""
        self._cluster = cluster
        async with trio.open_nursery() as nursery:
            self._parts.local.read_now(self._map.load)
            self.following.follow_in(cluster, nursery)
            await nursery.start(self.top.follower.run)
            await self.following.start(nursery)
            nursery.start_soon(self.top.behind.run)
            nursery.start_soon(self._changes.run)
            nursery.start_soon(self._moves.run)
            task_status.started()
            await trio.sleep_forever()

    def close(self) -> None:
        self.following.close()
        for each in self.all:
            each.close()

    def applied(self, changed: Iterable[Applied]) -> None:
        """Takes notice of changes that others made."""
        if self._map.is_used and any(each.key == keys.INTENTION for each in changed):
            self._changes.look()

    def tell_behind(self, inos: Iterable[int]) -> None:
        """Has others told soon of what was published here."""
        for ino in inos:
            self.of(namespace_of(ino)).behind.add([ino])

    async def _make_known(self, inos: list[int]) -> None:
        await self.make_known(ino for ino in inos if ino in self._parts.privates.groups)

    # ---- shards

    def _changed(self) -> None:
        """Takes notice that the place of a namespace is another one."""
        self._moves.note()
        self.following.open_known()

    async def _bring_back(self, shards: Collection[int]) -> bool:
        """Has all of these namespaces here, with all that their own shards ever took; returns
        whether it is. They are closed."""
        with trio.move_on_after(self._parts.deadline_s):
            try:
                for shard in filter(self._is_apart, shards):
                    found = await self.following.ready(shard)
                    await found.follower.catch_up()
            except KvfsError:
                return False
            return True
        return False

    def _is_apart(self, shard: int) -> bool:
        return keys.pack_u16(shard) in self._map.spaces

    def _made(self, shard: int) -> ShardReplica:
        return ShardReplica(self._parts, self._make_known, shard, self._is_current)

    async def _is_current(self) -> bool:
        """Returns whether no later run of this node is known, nor its removal."""
        field = b"n:%d" % self._parts.node
        known = await self.top.call(b"HGET", self.top.proposing.state, field)
        return known is None or int(known) == self._parts.incarnation

    async def fence(self, nodes: Collection[int]) -> None:
        """Keeps nodes that TOP knows to be removed from committing in any shard. Raises Unavailable
        when it was done in all that could be reached: to be done again."""
        fields = [b"n:%d" % node for node in nodes]
        known = await self.top.call(b"HMGET", self.top.proposing.state, *fields)
        fences = [part for pair in zip(nodes, known, strict=True) if pair[1] for part in pair]
        failure: KvfsError | None = None
        for each in list(self.others.values()):
            try:
                await each.script(FENCE, *fences)
            except KvfsError as error:
                failure = error
        for shard in self.following.unfollowed():
            try:
                await self.following.remote.script(shard, FENCE, *fences)
            except KvfsError as error:
                failure = error
        if failure is not None:
            raise failure

    async def spread(self) -> list[int]:
        """Does what `Moves.spread` does."""
        return await self._moves.spread(self._cluster)

    async def gather(self, namespace_id: int | None) -> list[int]:
        """Does what `Moves.gather` does."""
        return await self._moves.gather(namespace_id)

    def guess(self, fn: Function) -> int:
        """Returns the shard of the first key of one that `fn` turns to; TOP if there is none."""
        if not self._map.spaces:
            return TOP
        return self._parts.local.read_now(lambda t: first_shard(t, fn, self._map.shard_of))


def _nothing(t: Transaction) -> None:
    """Changes nothing."""


def _check_time(end: float) -> None:
    if trio.current_time() >= end:
        raise Conflict("others committed first until the deadline: try again")
