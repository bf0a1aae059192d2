"""A node's part in keeping copies of files, put together: their makers, the times, and the waiting
closes."""

import logging
from collections.abc import Iterable
from typing import Any, Final

import trio

from kvfs.base.errors import NotFound
from kvfs.cluster import placement_view
from kvfs.cluster.membership import Membership
from kvfs.cluster.node_records import set_state
from kvfs.cluster.peer_client import PeerClient
from kvfs.cluster.placement_view import PlacementView
from kvfs.datastore.index import Index
from kvfs.meta import keys
from kvfs.meta.replica.replica_engine import ReplicaEngine
from kvfs.node.tasks.copier import ADOPT, TAKE, Brings, Copies
from kvfs.node.tasks.drainer import Evict, Offer
from kvfs.node.tasks.rebalancer import Evening
from kvfs.node.tasks.replica_keeper import Keeper
from kvfs.node.tasks.sync_acknowledger import Acknowledging
from kvfs.tree.copies.replica_counts import HeldFile

log = logging.getLogger(__name__)


class Replicas:
    """The replication of one node of a cluster. `bytes_per_s`: the rate of repair, draining and
    rebalancing."""

    def __init__(
        self,
        engine: ReplicaEngine,
        member: Membership,
        peers: PeerClient,
        brings: Brings,
        index: Index,
        evict: Evict,
        offer: Offer,
        bytes_per_s: int,
    ) -> None:
        self._engine = engine
        self._member = member
        self._peers = peers
        self._brings = brings
        self._copies = Copies(
            member.node,
            engine,
            PlacementView(member.roster).snapshot,
            brings,
            self._call,
            engine.catch_up,
        )
        self._keeper = Keeper(self._copies, bytes_per_s, evict, offer, self._drained)
        self._evening = Evening(self._copies, index, bytes_per_s)
        self._acknowledging = Acknowledging(self._copies)
        self.acknowledge = self._acknowledging.acknowledge
        self.demanded: Final = self._evening.demanded
        self.methods: Final = {TAKE: self._copies.take, ADOPT: self._copies.adopt}
        """The requests that peers may send it, by method."""

    def held(self, written: Iterable[tuple[bytes, bytes | None, bytes | None]]) -> list[int]:
        """Returns the files whose data another process of this host put here, by its commits (key,
        before, now)."""
        return [
            keys.unpack_u64(key, 1)
            for key, _, now in written
            if key[:1] == keys.PLACEMENT and key[9:] == self._member.number and now is not None
        ]

    def heard(self, written: Iterable[tuple[bytes, bytes | None, bytes | None]]) -> None:
        """Notes commits of other nodes (key, before, now)."""
        self._keeper.given_up(
            keys.unpack_u64(key, 1)
            for key, _, now in written
            if key[:1] == keys.PLACEMENT and now is None
        )

    def published(self, ino: int) -> None:
        """Notes that a file was closed here."""
        self._keeper.published(ino)

    async def run(self) -> None:
        """Keeps copies until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._copies.run)
            nursery.start_soon(self._keeper.run)
            nursery.start_soon(self._evening.run)

    async def have(self, ino: int) -> bool:
        """Returns whether another present node has the whole file."""
        file = await self._copies.look(ino)
        if file is None:
            return False
        there = self._copies.snapshot().alive(file.holders)
        return any(host.number != self._member.node for host in there)

    async def replace(self, ino: int) -> bool:
        """Gives up this node's damaged copy, and fetches it anew; False if it is the last one.
        Raises KvfsError, OSError."""
        if not await self._brings.let_go(ino):
            return False
        await self._brings.bring(ino)
        return True

    # ---- for `locate`: what people ask for by hand

    def name(self, node: int) -> str:
        """Returns the name of a node; its number if nobody knows its name."""
        found = self._member.roster.get(node)
        return found.name if found is not None else str(node)

    def lives(self, node: int) -> bool:
        """Returns whether it holds its lease."""
        return self._member.roster.lives(node)

    async def ask(self, node: int, method: str, params: Any, deadline_s: float) -> Any:
        """Returns the answer of a node's method. Raises KvfsError."""
        return await self._call(node, method, params, deadline_s)

    async def send(self, ino: int, node: int) -> None:
        """Makes a node take a file; it has it when this returns. Raises KvfsError."""
        await self._copies.ask(node, await self._look(ino))

    async def spread(self, ino: int, copies: int) -> list[int]:
        """Makes more nodes take a file, until so many living ones have it; returns those that do.
        Raises KvfsError."""
        file = await self._look(ino)
        have = [each.number for each in self._copies.snapshot().alive(file.holders)]
        if len(have) < copies:
            have += await self._copies.make(file, copies - len(have))
        return sorted(have)

    async def _look(self, ino: int) -> HeldFile:
        file = await self._copies.look(ino)
        if file is None:
            raise NotFound("the file was removed, or has no data yet")
        return file

    @property
    def lacking(self) -> int:
        """Files that lack copies which this node must have made."""
        return self._keeper.lacking

    @property
    def obstacle(self) -> str:
        """The reason why this node cannot be drained, for people; empty: there is none."""
        return self._keeper.obstacle

    def report(self) -> dict[str, Any]:
        """Returns the part of the node's status."""
        return self._keeper.report()

    @property
    def counters(self) -> dict[str, int]:
        """Counters since the start."""
        parts = (self._copies, self._keeper, self._evening, self._acknowledging)
        return {name: count for each in parts for name, count in each.counters.items()}

    async def _call(self, number: int, method: str, params: Any, deadline_s: float) -> Any:
        address = placement_view.address(self._member.roster, number)
        return await self._peers.call(address, method, params, deadline_s)

    async def _drained(self) -> None:
        node = self._member.node
        await self._engine.transact(
            lambda t: set_state(t, node, lambda old: old == "draining", "drained")
        )
        log.info("this node is drained: `kvfs node remove %d` on another one takes it out", node)
