"""Requests to the server, whatever happens to it: sent again within a deadline; and what a server
must be like."""

import secrets
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import trio
from coredis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    MovedError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
    UnknownCommandError,
)
from coredis.exceptions import ConnectionError as LostError

from kvfs.base.errors import KvfsError, Unavailable
from kvfs.meta.redis import identity, scripts
from kvfs.meta.redis.about import Sync, check_server, read_info, sync_means
from kvfs.meta.redis.location import Address, Location
from kvfs.meta.redis.nodes import Node
from kvfs.meta.redis.refusals import (
    denied,
    is_of,
    is_passing,
    lacking,
    raised,
    unanswered,
    untrusted,
)
from kvfs.meta.redis.scripts import Item, Script, keys_of
from kvfs.meta.redis.sharding import TOP
from kvfs.meta.redis.slots import slot_of
from kvfs.meta.redis.topology import layout_of, topology

_PAUSE_S: Final = (0.005, 0.25)
"""Before a refused request is sent again: at first, and at most; doubled each time."""
_PASSING: Final = (
    LostError,
    AskError,
    BusyLoadingError,
    ReadOnlyError,
    ClusterDownError,
    TryAgainError,
    TimeoutError,
    OSError,
)
_ELSEWHERE: Final = (LostError, ReadOnlyError, ClusterDownError, TimeoutError, OSError)
"""After which the servers are asked anew who has what."""


class Server:
    """Where the engine is, and how to speak to it. `deadline_s` bounds each call with its
    retries."""

    def __init__(self, location: Location, nursery: trio.Nursery, deadline_s: float) -> None:
        self.location = location
        self.layout = layout_of(location)
        """That of the metadata there, once they were examined."""
        self._topology = topology(location, nursery)
        self._deadline_s = deadline_s
        self._nursery = nursery
        self._syncers: dict[Address, Node] = {}
        """With connections of their own: waiting for a disk holds up nothing else."""

    @property
    def round_trips(self) -> int:
        """Requests sent so far."""
        return sum(node.requests for node in self._topology.nodes())

    def end(self) -> float:
        """When what begins now is given up, by trio's clock."""
        return trio.current_time() + self._deadline_s

    async def script(
        self, script: Script, shard: int, arguments: Sequence[Item], end: float
    ) -> Any:
        """What a script returns for a shard. Raises Unavailable at `end`, Invalid."""
        keys = keys_of(self.location.prefix, shard)
        return await self._patiently(
            slot_of(self.location.prefix, shard),
            end,
            lambda node, asking: node.script(script, len(keys), *keys, *arguments, asking=asking),
        )

    async def call(self, shard: int, *command: Item) -> Any:
        """What the server that has a shard answers."""
        return await self._patiently(
            slot_of(self.location.prefix, shard),
            self.end(),
            lambda node, asking: node.call(*command, asking=asking),
        )

    async def examine(self, cluster: str | None) -> str:
        """Whether it will do; returns whose the metadata are, `cluster` or a new id where there are
        none yet. Raises Unavailable, NotSupported, Conflict, Invalid."""
        about = read_info(await self.call(TOP, b"INFO"))
        check_server(about, self.location)
        arguments = identity.arguments(self.layout, cluster)
        found = await self.script(scripts.IDENTIFY, TOP, arguments, self.end())
        whose, self.layout = identity.checked(found, cluster, self._named())
        return whose

    async def sync(self, shards: Sequence[int]) -> str:
        """Ask each server that has one of `shards` to keep what was committed; what it promises."""
        about = read_info(await self.call(TOP, b"INFO"))
        policy = await self._appendfsync()
        means = sync_means(about, policy, round(self._deadline_s * 1000 / 4))
        if means.command:
            asked = set[Address]()
            for shard in shards:
                await self._sync_shard(shard, means, asked)
        return means.promise

    async def _sync_shard(self, shard: int, means: Sync, asked: set[Address]) -> None:
        key = keys_of(self.location.prefix, shard)[2]

        async def ask(node: Node, asking: bool) -> Any:
            if node.address in asked:
                return None
            syncer = self._syncers.get(node.address)
            if syncer is None:
                syncer = Node(node.address, self.location, self._nursery)
                self._syncers[node.address] = syncer
            # What is waited for is what the same connection wrote, and all before it.
            await syncer.call(b"HSET", key, b"synced", secrets.token_bytes(4), asking=asking)
            answer = await syncer.call(*means.command)
            reached = answer[0] if isinstance(answer, list) else answer
            if reached < 1:
                raise TimeoutError(f"{node.address} did not keep it in time")
            asked.add(node.address)
            return None

        await self._patiently(slot_of(self.location.prefix, shard), self.end(), ask)

    async def _appendfsync(self) -> str:
        """The server's setting, or 'unknown' where it does not tell us."""
        try:
            found = await self.call(TOP, b"CONFIG", b"GET", b"appendfsync")
        except KvfsError:
            return "unknown"
        pairs = (
            found if isinstance(found, dict) else dict(zip(found[::2], found[1::2], strict=True))
        )
        return bytes(pairs.get(b"appendfsync", b"unknown")).decode()

    async def _patiently(
        self, slot: int, end: float, send: Callable[[Node, bool], Awaitable[Any]]
    ) -> Any:
        """Send until it is answered. Raises Unavailable at `end`, by trio's clock."""
        pause_s, most_s = _PAUSE_S
        redirect: Node | None = None
        reason: Exception = TimeoutError("no answer")
        while True:
            with trio.move_on_at(end):
                try:
                    node = redirect or await self._topology.node_for(slot)
                    return await send(node, redirect is not None)
                except (RedisError, TimeoutError, OSError) as error:
                    reason = error
            redirect = self._after(slot, reason)
            if trio.current_time() + (0 if redirect else pause_s) >= end:
                raise self._unanswered(reason)
            if redirect is None:
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, most_s)

    def _after(self, slot: int, reason: Exception) -> Node | None:
        """What a refusal means: whom to ask instead at once, None: again, later. Raises what
        cannot be mended."""
        if isinstance(reason, AskError):
            node = self._topology.redirected(slot, reason)
            return None if isinstance(reason, MovedError) else node
        if isinstance(reason, RedisError) and not _is_passing(reason):
            raise self._translated(reason) from reason
        if is_of(reason, ssl.SSLCertVerificationError):
            raise untrusted(_text(reason), self._named()) from reason
        if isinstance(reason, _ELSEWHERE):
            self._topology.again()
        return None

    def _unanswered(self, reason: Exception) -> Unavailable:
        error = unanswered(_text(reason), self._named(), self._deadline_s)
        error.__cause__ = reason
        return error

    def _named(self) -> str:
        return self.location.shown

    def _translated(self, error: RedisError) -> KvfsError:
        if isinstance(error, AuthenticationError | AuthorizationError):
            return denied(_text(error), self._named())
        if isinstance(error, UnknownCommandError):
            return lacking(_text(error), self._named())
        return raised(_text(error), self._named())


def _is_passing(error: RedisError) -> bool:
    if isinstance(error, _PASSING):
        return True
    return isinstance(error, ResponseError) and is_passing(str(error))


def _text(error: BaseException) -> str:
    """With what it came from: 'unable to connect' says little."""
    cause = error.__cause__
    text = str(error) or type(error).__name__
    return f"{text}: {cause}" if cause is not None and str(cause) else text
