"""Namespaces whose names were each node's own and become everybody's again: what one node has of
the engine's records of them beside its own (`kvfs.meta.engine_layer`)."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import trio

from kvfs.base import detach
from kvfs.base.errors import Paused
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.engine_layer import Layered
from kvfs.meta.replica.applier import Applied
from kvfs.meta.replica.local_namespaces import LocalNamespaces
from kvfs.meta.shards.shard_set import ShardSet

T = TypeVar("T")


class EndingNamespaces:
    """The namespaces of this kind of one replica."""

    def __init__(
        self,
        locals_: LocalNamespaces,
        shards: ShardSet,
        applied: Callable[[Sequence[Applied]], None],
        check_open: Callable[[], None],
        deadline_s: float,
    ) -> None:
        """`applied` is told what the engine's records change here."""
        self._locals = locals_
        self._layer = locals_.layer
        self._shards = shards
        self._applied = applied
        self._check_open = check_open
        self._deadline_s = deadline_s

    def is_closed(self, namespace_id: int) -> bool:
        """Returns whether nothing may be written to this node's own keys of a namespace now."""
        return self._layer.is_closed(keys.pack_u16(namespace_id))

    def ended(self) -> list[int]:
        """Returns the namespaces that have ended for all nodes, and of which this one has still its
        own keys."""
        spaces = sorted(self._layer.stages)
        return [keys.unpack_node(each) for each in spaces if self._layer.has_ended(each)]

    @property
    def heard(self) -> int:
        """Keys that the engine was told of namespaces that are closed, since the start."""
        return self._layer.heard

    def has_ended(self, namespace_id: int) -> bool:
        """Returns whether a namespace has ended for all nodes, and this one has still its own keys
        of it."""
        return self._layer.has_ended(keys.pack_u16(namespace_id))

    def is_taking(self, namespace_id: int) -> bool:
        """Returns whether a part of the keys of such a namespace is the engine's already."""
        return self._layer.is_taking(keys.pack_u16(namespace_id))

    async def tell(self, fn: Callable[[Transaction], T]) -> T:
        """Runs `fn` on what the engine has of such namespaces, and commits it there. Cancelled,
        raises: as `ReplicaEngine.transact`."""
        self._check_open()
        result: T = await self._shards.top.proposer.tell(fn)
        return result

    def read(self, fn: Callable[[Layered, Transaction], T]) -> T:
        """Runs `fn` on what the engine has of such namespaces, and on this node's own records.
        Raises Unavailable."""
        above = self._layer.above()
        return self._shards.read_now(lambda t: fn(Layered(t, above), t))

    def add(self, namespace_id: int, after: bytes, limit: int, *, switches: bool) -> bytes:
        """Does what `EngineLayer.add` does, for a namespace that has ended; returns the last key.
        Raises NoSpace, ReadOnly, Unavailable."""
        changed, last = self._locals.add_engines(namespace_id, after, limit, switches=switches)
        if changed:
            self._applied([Applied(*each) for each in changed])
        return last

    def take(self, namespace_id: int, limit: int) -> bool:
        """Makes up to `limit` of this node's keys of a namespace that has ended what the engine has
        of them; returns whether that was all: then they are everybody's. Raises NoSpace, ReadOnly,
        Unavailable."""
        changed, is_all = self._locals.take(namespace_id, limit)
        if changed:
            self._applied([Applied(*each) for each in changed])
        return is_all

    def drop(self, namespace_id: int, limit: int) -> bool:
        """Drops up to `limit` keys of what the engine had of a namespace that was asked back;
        returns whether that was all. Raises NoSpace, ReadOnly, Unavailable."""
        return self._locals.drop_layer(namespace_id, limit)

    async def until_open(self) -> None:
        """Returns when a namespace that was closed may be written to again. Raises Paused."""
        opened = self._locals.opened
        await detach.aside()
        with trio.move_on_after(self._deadline_s):
            await opened.wait()
            return
        raise Paused(
            "the namespace ends being peer: nothing is changed in it until all nodes have told what"
            " they hold; try again soon"
        )
