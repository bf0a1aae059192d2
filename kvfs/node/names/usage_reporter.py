"""Tells the cluster what this node has of namespaces that are kept by their nodes, so that each
node knows the sum, and takes parts of their capacities ahead (`kvfs.policy.capacity_grants`).

It costs the engine ten requests a second of all nodes together at most: of 100 nodes each tells
every ten seconds, of more the more seldom; but whether it has any file at once. While the engine is
away the sum is that of before.

A look reads what this node has. Which nodes there are, and what all others told, is read where
there is something to tell, and of a capacity's grants when one of them has changed.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import trio

from kvfs.base.retry import Persistence
from kvfs.cluster.node_records import members
from kvfs.meta import keys
from kvfs.meta.records import NodeUsage, unpack_node_usage
from kvfs.meta.replica.replica_engine import ReplicaEngine
from kvfs.policy.capacity_grants import CapacityShare
from kvfs.tree.copies import held_names, node_usage

_LOOK_S: Final = 0.25
_SHORTEST_S: Final = 10.0
"""Time between two reports that differ in figures alone."""
_REPORTS_PER_S: Final = 10
"""Such reports of all nodes together."""
log = logging.getLogger(__name__)


class _Others(NamedTuple):
    """The facts from which a node's own part of a capacity follows, beside its own use."""

    shares: Sequence[CapacityShare]
    members: int
    read_s: float
    """When they were read."""


class UsageReporter:
    """The reports of one node."""

    def __init__(
        self, engine: ReplicaEngine, clock: Callable[[], float] = trio.current_time
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._due_s = 0.0
        """When figures may be told again."""
        self._others: dict[int, _Others] = {}
        """By namespace, while no other node is heard to have taken or given back anything."""

    async def run(self) -> None:
        """Tells until cancelled."""
        telling = Persistence(log.warning, "other nodes do not hear what is used here")
        await telling.repeat(self.look, _LOOK_S)

    def heard(self, written: Iterable[tuple[bytes, bytes | None, bytes | None]]) -> None:
        """Takes commits of other nodes (key, before, now): their grants and records; what they use
        changes nothing here."""
        for key, before, now in written:
            if key[:1] == keys.NODES:
                self._others.clear()
            elif key[:1] == keys.NODE_USAGE and _grant_in(before) != _grant_in(now):
                self._others.pop(keys.unpack_node(key[1:3]), None)

    async def look(self) -> None:
        """Tells what has to be told by now. Raises KvfsError."""
        news: dict[int, NodeUsage] = {}
        gone: set[int] = set()
        for namespace_id in await self._engine.read(held_names.namespaces_of_nodes):
            before, now = await self._engine.read(
                lambda t: (node_usage.own(t, namespace_id), node_usage.present(t, namespace_id))  # noqa: B023
            )
            capacity = self._capacity(namespace_id)
            if capacity:
                shares, count, _ = self._others_of(namespace_id)
                now = node_usage.with_grant(now, before, shares, capacity, count)
            if before == now or (before is None and now == NodeUsage()):
                continue
            if capacity and (before is None or _grant(before) != _grant(now)):
                nodes = self._nodes()
                await self._engine.transact(
                    lambda t: node_usage.take_grant(t, namespace_id, nodes)  # noqa: B023
                )
                continue
            if before is None or before.has_files != now.has_files or self._clock() >= self._due_s:
                news[namespace_id] = now
                told = await self._engine.read(lambda t: node_usage.told(t, namespace_id))  # noqa: B023
                gone |= told.keys() - self._nodes() - {self._engine.node}
        if news:
            await self._engine.transact(lambda t: node_usage.tell(t, news, gone))
            self._due_s = self._clock() + max(_SHORTEST_S, len(self._nodes()) / _REPORTS_PER_S)

    def _others_of(self, namespace_id: int) -> _Others:
        """Returns what the others have of a capacity; read anew at times, since nobody tells of
        what another process of this host changed."""
        found, now_s = self._others.get(namespace_id), self._clock()
        if found is None or now_s >= found.read_s + _SHORTEST_S:
            nodes, told = (
                self._nodes(),
                self._engine.read_now(lambda t: node_usage.told(t, namespace_id)),
            )
            shares = node_usage.shares(told, self._engine.node, nodes)
            found = self._others[namespace_id] = _Others(shares, len(nodes), now_s)
        return found

    def _nodes(self) -> set[int]:
        return set(self._engine.read_now(members))

    def _capacity(self, namespace_id: int) -> int:
        record = self._engine.namespace(namespace_id)
        return record.capacity if record is not None else 0


def _grant(usage: NodeUsage) -> tuple[int, int, bool]:
    return usage.granted, usage.keeps, usage.lacks


def _grant_in(packed: bytes | None) -> tuple[int, int, bool] | None:
    return None if packed is None else _grant(unpack_node_usage(packed))
