"""A node's part in moves of namespaces between shards (`kvfs.meta.shards.mover`): begins them,
waits for them, and withdraws those that others shut and left."""

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import trio

from kvfs.base.errors import Conflict, KvfsError, NoSpace, NotSupported
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Namespace, unpack_namespace
from kvfs.meta.redis.calling import RetryingClient
from kvfs.meta.redis.identity import SHARDS
from kvfs.meta.redis.location import Kind
from kvfs.meta.redis.scripts import SPREAD
from kvfs.meta.shards.gatherer import NamespaceGatherer, drop, reopen
from kvfs.meta.shards.mover import CHANGE_PLACE, NamespaceMover, new_token
from kvfs.meta.shards.shard_map import GATHERED, OWN, SHUT, is_half_moved, is_own
from kvfs.meta.shards.shard_replica import ReplicaParts, ShardReplica

PATIENCE_S: Final = 5.0
"""Time for which the commits of a namespace wait while it is moved, before it stays."""
_WAIT_S: Final = 1.0
_RETRY_S: Final = 0.25
_TRIES: Final = 8
LEFT_S: Final = 2.0
"""Time for which what a shard had stays there for nodes that hear late that it was gathered."""
_log = logging.getLogger(__name__)


class Moves:
    """The moves, of one replica."""

    def __init__(
        self,
        parts: ReplicaParts,
        top: ShardReplica,
        commit: Callable[[Callable[[Transaction], object]], Awaitable[object]],
    ) -> None:
        """`commit` is that of the replica."""
        self._parts = parts
        self._top = top
        self._commit = commit
        self._moved = trio.Event()
        """Set when a place changes; then it is another one."""

    def note(self) -> None:
        """Takes notice that a place has changed."""
        self._moved.set()
        self._moved = trio.Event()

    async def wait(self) -> None:
        """Returns when a place has changed, or after a moment."""
        with trio.move_on_after(_WAIT_S):
            await self._moved.wait()

    async def run(self) -> None:
        """Has the shard that had it before take the commits of a namespace again that somebody
        shut, and left; until cancelled."""
        while True:
            shut = self._shut()
            moved = self._moved
            if not shut:
                await moved.wait()
                continue
            with trio.move_on_after(PATIENCE_S):
                await moved.wait()
            left = [each for each in self._shut().items() if each in shut.items()]
            for place, value in left:
                try:
                    if await self._withdraw(place, value):
                        _log.warning("the move of a namespace was left half done: it stays")
                except KvfsError as error:
                    _log.warning("the move of a namespace is half done: %s", error)
                    await trio.sleep(_RETRY_S)

    async def spread(self, cluster: str) -> list[int]:
        """Gives namespaces shards of their own, those there are and those that come; returns those
        that it moved. Raises NotSupported, Conflict, Corrupt, Unavailable, NoSpace: to be begun
        again."""
        location = self._parts.location
        if location.kind is not Kind.CLUSTER:
            raise NotSupported(
                f"{location.shown} is one server: the namespaces of a Redis cluster"
                " (redis+cluster://) can be spread over its servers"
            )
        if not await self._top.script(SPREAD, SHARDS.encode()):
            raise NotSupported(
                "nodes of the version before may be in the cluster: run `kvfs node finish-upgrade`"
                " first"
            )
        await self._commit(lambda t: t.put(keys.place(0), OWN))
        await self._top.follower.catch_up()
        found = self._parts.local.read_now(_together)
        mover = NamespaceMover(location, self._parts.deadline_s, cluster, found)
        try:
            if found:
                await mover.move()
                await self._top.follower.catch_up()
            known = self._parts.shards
            await mover.clean(known.spaces - known.returning)
        finally:
            mover.close()
        return found

    async def _withdraw(self, place: bytes, value: bytes) -> bool:
        """Returns whether this node did."""
        if value[:1] == SHUT:
            return bool(await self._top.script(CHANGE_PLACE, place, new_token(), value, b"none"))
        shard = self._caller(keys.unpack_node(place[1:]))
        try:
            return await reopen(self._top, shard, place[1:], value)
        finally:
            shard.stop()

    async def gather(self, namespace_id: int | None) -> list[int]:
        """Brings a namespace back into TOP, or all, and those that come: returns those that it
        moved. Raises Conflict, Corrupt, Unavailable, NoSpace: to be begun again."""
        if namespace_id is None:
            await self._commit(_make_no_more)
        await self._top.follower.catch_up()
        wanted = None if namespace_id is None else keys.place(namespace_id)
        found = [
            keys.unpack_node(place[1:])
            for place, value in self._places()
            if is_own(value) and wanted in (None, place) and place != keys.place(0)
        ]
        for number in found:
            await self._gather(number)
        await self._top.follower.catch_up()
        await self._top.keep()
        await self._top.follower.catch_up()  # fails if the server lost the end before it kept that
        if found:
            await trio.sleep(LEFT_S)
        await self._drop(found)
        await self._commit(_end)
        return found

    async def _gather(self, number: int) -> None:
        moving = NamespaceGatherer(self._parts.location, self._parts.deadline_s, number)
        try:
            await moving.begin()
            await moving.copy()
            await moving.check()
            await moving.follow()
            await _soon(moving.close, "a namespace was changed all the time: begin anew")
            await moving.follow()
            await _soon(moving.open, "gathering took too long, and was withdrawn: begin anew")
        except NoSpace:
            with contextlib.suppress(KvfsError):
                await moving.clear()  # else nobody could write in TOP any more
            raise
        finally:
            moving.stop()

    async def _drop(self, gathered: Iterable[int]) -> None:
        """Drops what the shards of namespaces have that were gathered, by calls that were cut
        short too."""
        places = {place[1:] for place, _ in self._places()}
        records = self._parts.local.read_now(
            lambda t: list(t.scan_keys(keys.NAMESPACE, keys.after(keys.NAMESPACE)))
        )
        spaces = {key[1:] for key in records} | set(map(keys.pack_u16, gathered))
        for space in sorted(spaces - places):
            shard = self._caller(keys.unpack_node(space))
            try:
                await drop(self._top, shard, space)
            finally:
                shard.stop()

    def _caller(self, number: int) -> RetryingClient:
        return RetryingClient(self._parts.location, self._parts.deadline_s, number)

    def _shut(self) -> dict[bytes, bytes]:
        return {key: value for key, value in self._places() if is_half_moved(value)}

    def _places(self) -> list[tuple[bytes, bytes]]:
        return self._parts.local.read_now(
            lambda t: list(t.scan(keys.PLACE, keys.after(keys.PLACE)))
        )


async def _soon(step: Callable[[], Awaitable[bool]], otherwise: str) -> None:
    """Does a step, which a change of the namespace's record may hold up. Raises Conflict."""
    for _ in range(_TRIES):
        if await step():
            return
        await trio.sleep(_RETRY_S)
    raise Conflict(otherwise)


def _make_no_more(t: Transaction) -> None:
    if t.get(keys.place(0)) is not None:
        t.put(keys.place(0), GATHERED)


def _end(t: Transaction) -> None:
    """Forgets that there were shards of namespaces, once there are none."""
    places = list(t.scan(keys.PLACE, keys.after(keys.PLACE)))
    if places == [(keys.place(0), GATHERED)]:
        t.delete(keys.place(0))


def _together(t: Transaction) -> list[int]:
    """Returns the namespaces that have no shard of their own, but those whose names are each node's
    own: of these the server has next to nothing."""
    records = t.scan(keys.NAMESPACE, keys.after(keys.NAMESPACE))
    return [
        keys.unpack_node(key[1:])
        for key, value in records
        if t.get(keys.PLACE + key[1:]) is None and _is_shared(unpack_namespace(value))
    ]


def _is_shared(record: Namespace) -> bool:
    return not record.is_peer and not record.switches_to
