"""The shards of namespaces that a node follows, and reads of all.

| state of a shard | mark in the file | here | read |
|---|---|---|---|
| not followed | none | its head, some seconds old | at the server |
| being read | `filled` | some of it | at the server, ranges wait |
| followed | whole | all | here |
| being let go | `LEAVING` | some of it, its head last | at the server |

A kill leaves the state that the mark tells: what is being read is read again, what is being let go
goes on. Followed are shards that `must_follow` names (of what this node has data files), and those
that are used (`kvfs.meta.shards.demand`).
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Final, TypeVar

import msgspec
import trio

from kvfs.base import detach
from kvfs.base.errors import EngineAway, KvfsError, Unavailable, Unreached
from kvfs.base.retry import Persistence
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import namespace_of, unpack_namespace
from kvfs.meta.redis.scripts import TOP
from kvfs.meta.replica.replica_mark import (
    LEAVING,
    drop_mark,
    is_whole,
    new_mark,
    read_mark,
    write_mark,
)
from kvfs.meta.shards.demand import IDLE_S, Demand
from kvfs.meta.shards.partial_view import (
    MOST_KEYS,
    Fetched,
    Lacking,
    PartialView,
    asked_again,
    head_keys,
)
from kvfs.meta.shards.remote_reads import RemoteReads
from kvfs.meta.shards.shard_replica import ReplicaParts, ShardReplica

T = TypeVar("T")
HEAD_S: Final = 10.0
"""Time between two reads of what stands for a namespace that is not followed."""
_AT_ONCE: Final = 16
"""Servers that are asked for heads at once."""
_RETRY_S: Final = 1.0
_PAGE_KEYS: Final = 2_000
"""Keys dropped in one commit: some milliseconds."""
_NOTHING: Final[Mapping[int, Fetched]] = MappingProxyType({})
_NONE: Final[Fetched] = MappingProxyType({})
_log = logging.getLogger(__name__)


class Following:
    """The shards of one replica but TOP."""

    def __init__(
        self, parts: ReplicaParts, made: Callable[[int], ShardReplica], top: ShardReplica
    ) -> None:
        """`made` makes the replica of a shard."""
        self._parts = parts
        self._top = top
        self._map = parts.shards
        self._made = made
        self._demand = Demand()
        self.remote = RemoteReads(parts.location, parts.deadline_s)
        self.others: dict[int, ShardReplica] = {}
        """The shards that are followed, by number."""
        self.empty: set[bytes] = set()
        """Namespaces that were removed, and left nothing in their shards."""
        self._unfollowed: set[int] = set()
        """The shards that are not followed."""
        self._opened: set[bytes] = set()
        """The namespaces that had shards of their own at the last change of a place."""
        self._stale = Persistence(
            _log.warning, "namespaces that are not followed are not known as they are"
        )
        self._cluster = ""
        self._nursery: trio.Nursery | None = None

    # ---- reads

    def read_now(
        self, fn: Callable[[Transaction], T], fetched: Mapping[int, Fetched] = _NOTHING
    ) -> T:
        """Runs `fn` on the replica and what was `fetched`, by shard. Raises Lacking if it turns to
        anything else of a shard that is not whole."""
        if not self._map.spaces or (
            not self._unfollowed and all(each.is_whole for each in self.others.values())
        ):
            return self._parts.local.read_now(fn)
        shard_of = self._map.shard_of
        return self._parts.local.read_now(
            lambda t: fn(PartialView(t, shard_of, partial(self._has, t), fetched))
        )

    async def read(self, fn: Callable[[Transaction], T], lacking: Lacking) -> T:
        """Runs `fn`, to which the replica was `lacking` something, on what the shards' servers
        have, or when the shards are here. All that is read of a shard that is not is as of one
        moment after the call. Raises Unavailable; Unreached, of a cache, where its server is
        silent."""
        await detach.aside()
        fetched: dict[int, Fetched] = {}
        while True:
            try:
                await self._fetch(lacking, fetched)
                await self._leave_whole(fetched)
            except Unavailable as error:
                if self._may_lag(lacking.shard):
                    raise Unreached(str(error)) from error
                if isinstance(error, EngineAway):  # of a change
                    raise Unavailable(str(error)) from error
                raise
            try:
                return self.read_now(fn, fetched)
            except Lacking as found:
                lacking = found

    async def fetch(self, names: Sequence[bytes]) -> dict[bytes, bytes | None]:
        """Returns the values of keys of a namespace that is not whole here, as one look-up, for a
        process beside the node. Raises Unavailable."""
        shards = {self._map.shard_of(key) for key in names}
        if shards == {TOP}:  # it was gathered meanwhile
            await self._top.follower.catch_up()
            found = self._parts.local.read_now(lambda t: t.get_many(names))
            return dict(zip(names, found, strict=True))
        if len(shards) != 1 or TOP in shards or len(names) > MOST_KEYS:
            raise Unavailable("these are not keys of one namespace: try again")
        (shard,) = shards
        return await self._look(shard, names)

    async def _fetch(self, lacking: Lacking, fetched: dict[int, Fetched]) -> None:
        """Fetches what is lacking, and all anew that was fetched of its shard; nothing if the shard
        is here now."""
        shard, is_first = lacking.shard, not fetched.get(lacking.shard)
        if self.has(shard):
            fetched[shard] = _NONE
        elif names := asked_again(lacking, fetched):
            fetched[shard] = await self._look(shard, names, is_first=is_first)
        else:
            await self.ready(shard)
            fetched[shard] = _NONE

    async def _leave_whole(self, fetched: dict[int, Fetched]) -> None:
        """Leaves out what was fetched of shards that are whole by now: they are brought up to date,
        since what made them whole was perhaps asked for before the call."""
        while whole := [shard for shard in fetched if self.has(shard)]:
            for shard in whole:
                del fetched[shard]
                if keys.pack_u16(shard) not in self.empty:
                    await self.others.get(shard, self._top).follower.catch_up()

    async def _look(
        self, shard: int, names: Sequence[bytes], *, is_first: bool = True
    ) -> dict[bytes, bytes | None]:
        if is_first and self._demand.look(shard):
            self.open(shard)
        return await self.remote.fetch(shard, names)

    def has(self, shard: int) -> bool:
        """Returns whether all of a shard is here, as of some moment."""
        found = self.others.get(shard)
        if found is not None and found.is_whole:
            return True
        return self._parts.local.read_now(lambda t: self._has(t, shard))

    def _has(self, t: Transaction, shard: int) -> bool:
        """Returns whether all of a shard is here, as of some moment."""
        found = self.others.get(shard)
        if found is not None and found.is_whole:
            return True
        space = keys.pack_u16(shard)
        return space in self.empty or space not in self._map.spaces or is_whole(t, shard)

    def _may_lag(self, namespace_id: int) -> bool:
        record = self._parts.local.read_now(lambda t: t.get(keys.namespace(namespace_id)))
        return record is not None and unpack_namespace(record).may_lag

    # ---- which are followed

    def is_own(self, namespace_id: int) -> bool:
        """Returns whether a namespace's keys are in a shard of its own that has any."""
        space = keys.pack_u16(namespace_id)
        return space in self._map.spaces and space not in self.empty

    def used(self, namespace_id: int) -> None:
        """Takes notice that what is here of a namespace is used."""
        if namespace_id in self.others:
            self._demand.use(namespace_id)

    async def ready(self, shard: int) -> ShardReplica:
        """Returns a shard, followed and whole: it is waited for while it is being read. Raises
        Unavailable."""
        found = self.open(shard)
        if not found.is_whole:
            await detach.aside()
            await self.whole(found)
        return found

    async def whole(self, found: ShardReplica) -> ShardReplica:
        """Returns it when it is whole: it is waited for as long as more of it comes. Raises
        Unavailable."""
        filled = -1
        while not found.is_whole and found.follower.failure is None:
            if filled == found.applier.filled:
                break
            filled = found.applier.filled
            with trio.move_on_after(self._parts.deadline_s):
                await found.until_whole()
        found.follower.check()
        return found

    def open(self, shard: int) -> ShardReplica:
        """Returns a shard that is followed from now on, also if it is not whole yet."""
        self._demand.use(shard)
        if shard not in self.others:
            found = self.others[shard] = self._made(shard)
            self._unfollowed.discard(shard)
            if self._nursery is not None:
                self._nursery.start_soon(found.run, self._cluster)
        return self.others[shard]

    def open_known(self) -> None:
        """Follows those that were followed when this node ended, or that have to be, as all that
        are on their way back to TOP; no more those that have no shard of their own any more."""
        self._close(self._opened - self._map.spaces)
        self._note_unfollowed()
        new = self._map.spaces - self._opened - self.empty
        self._opened = set(self._map.spaces)
        for space in new:
            shard = keys.unpack_node(space)
            if space in self._map.kept or self._parts.must_follow(shard):
                self.open(shard)
        for space in self._map.returning - self.empty:
            self.open(keys.unpack_node(space))

    async def open_all(self) -> None:
        """Follows every namespace; returns when all are whole. Raises Unavailable."""
        for number in map(keys.unpack_node, self._map.spaces - self.empty):
            if self.is_own(number):  # it may be gathered meanwhile
                await self.ready(number)

    def unfollowed(self) -> list[int]:
        """Returns the shards that are not followed."""
        return list(self._unfollowed)

    def _note_unfollowed(self) -> None:
        """Takes notice that others may be followed, or have shards of their own."""
        shards = set(map(keys.unpack_node, self._map.spaces - self.empty))
        self._unfollowed = shards - self.others.keys()

    def follow_in(self, cluster: str, nursery: trio.Nursery) -> None:
        """Has what is followed from now on run in this nursery; called before more places are
        known than the file has."""
        self._cluster, self._nursery = cluster, nursery
        self._note_unfollowed()

    async def start(self, nursery: trio.Nursery) -> None:
        """Follows those that it is to; returns when each was heard once, and the others' heads are
        here, however long their servers take to be there. TOP is up to date. Raises Lost where a
        server has lost what the replica has."""
        self.let_go_empty()
        self.open_known()
        for each in list(self.others.values()):
            await each.until_heard()
        while not await self._refresh():
            await trio.sleep(_RETRY_S)
        nursery.start_soon(self._refresh_at_times)
        nursery.start_soon(self._let_go_at_times)

    def close(self) -> None:
        """Idempotent."""
        self.remote.close()

    # ---- heads

    async def _refresh_at_times(self) -> None:
        while True:
            await trio.sleep(HEAD_S)
            self.let_go_empty()
            for shard in self.remote.asked:
                if self.has(shard):
                    self.remote.end(shard)
            await self._refresh()

    async def _refresh(self) -> bool:
        """Reads the heads of shards that are not followed; returns whether all came."""
        limiter, failed = trio.CapacityLimiter(_AT_ONCE), dict[int, KvfsError]()

        async def one(shard: int) -> None:
            async with limiter:
                try:
                    self._put_head(shard, await self.remote.fetch(shard, head_keys(shard)))
                except KvfsError as error:
                    failed[shard] = error

        async with trio.open_nursery() as nursery:
            for shard in self.unfollowed():
                nursery.start_soon(one, shard)
        if failed:
            first = min(failed)
            self._stale.complain(Unavailable(f"namespace {first}: {failed[first]}"))
        return not failed

    def _put_head(self, shard: int, head: Mapping[bytes, bytes | None]) -> None:
        def fn(t: Transaction) -> None:
            for key, value in head.items():
                if value is None:
                    t.delete(key)
                else:
                    t.put(key, value)

        def is_new(t: Transaction) -> bool:
            return any(value != t.get(key) for key, value in head.items())

        if shard not in self.others and self._parts.local.read_now(is_new):
            self._parts.local.transact_now(fn)

    # ---- letting go

    async def _let_go_at_times(self) -> None:
        """Lets those go that are not used, until cancelled."""
        letting_go = Persistence(_log.warning, "namespaces that are not used stay for now")
        await letting_go.until_done(self._go_on_dropping)
        await letting_go.repeat(self.let_go_unused, IDLE_S, first_s=IDLE_S)

    def let_go_empty(self) -> None:
        """Follows the shards of namespaces no more that were removed, and of which nothing is
        left."""
        self.empty |= self._parts.local.read_now(self._map.empty)
        self._close(self.empty)

    async def let_go_unused(self) -> None:
        """Lets those go that were not used since the last call, and goes on with others. Raises
        NoSpace, Unavailable, Corrupt of the local file: the next call goes on."""
        await self._go_on_dropping()
        for shard in self._demand.unused(list(self.others)):
            found = self.others.get(shard)
            if found is not None and self._may_go(found):
                self._parts.local.transact_now(partial(self._leave, shard))
                self._close([keys.pack_u16(shard)])
                _log.info("namespace %d is not used here: it is followed no more", shard)
                await self._drop(shard)

    def _may_go(self, found: ShardReplica) -> bool:
        """Returns whether nothing keeps this node in a namespace. A delegation is given back, for
        the next round."""
        shard, parts = found.shard, self._parts
        if not found.is_whole or parts.must_follow(shard):
            return False
        if keys.pack_u16(shard) in self._map.returning:
            return False
        if any(namespace_of(ino) == shard for ino in parts.privates.groups):
            return False
        space, node = keys.pack_u16(shard), keys.pack_node(parts.node)
        lock = keys.LOCKS + space
        is_locked, is_delegated = parts.local.read_now(
            lambda t: (
                next(t.scan_keys(lock, keys.after(lock)), None) is not None,
                t.get(keys.delegation(shard, node)) is not None,
            )
        )
        if is_delegated:
            parts.give_back(shard)
        return not (is_locked or is_delegated)

    async def _go_on_dropping(self) -> None:
        for shard in self.unfollowed():
            if self._parts.local.read_now(lambda t: read_mark(t, shard)) is not None:  # noqa: B023
                await self._drop(shard)

    async def _drop(self, shard: int) -> None:
        """Drops what is here of a shard that is followed no more, but for its head; ends if it is
        followed again."""
        while shard not in self.others:
            if self._parts.local.transact_now(partial(self._drop_some, shard)):
                return
            await trio.lowlevel.checkpoint()

    def _drop_some(self, shard: int, t: Transaction) -> bool:
        head = set(head_keys(shard))
        found = (key for key in self._map.names(t, shard, b"") if key not in head)
        some = list(islice(found, _PAGE_KEYS))
        for key in some:
            t.delete(key)
        if len(some) < _PAGE_KEYS:
            drop_mark(t, shard)
            return True
        return False

    def _leave(self, shard: int, t: Transaction) -> None:
        mark = read_mark(t, shard) or new_mark(self._cluster, self._parts.node)
        write_mark(t, msgspec.structs.replace(mark, filled=LEAVING), shard)

    def _close(self, spaces: Iterable[bytes]) -> None:
        for space in spaces:
            if (found := self.others.pop(keys.unpack_node(space), None)) is not None:
                found.end()
                self._top.behind.add(found.behind.waiting)
        self._note_unfollowed()
