"""Gives the blocks of a node that is drained to others, in namespaces that are kept by their nodes:
each is offered to one that has it, as far as is known, else to one with room for it."""

from collections.abc import Awaitable, Callable, Sequence

import trio

from kvfs.meta.engine import Engine
from kvfs.node.siblings.copy_offers import CopyOffers
from kvfs.node.siblings.copy_protocol import CopyOutcome
from kvfs.node.siblings.living_nodes import LivingNodes
from kvfs.node.tasks.drainer import TakenBlocks
from kvfs.policy import placement
from kvfs.policy.cluster_snapshot import ClusterSnapshot
from kvfs.tree.copies import siblings
from kvfs.tree.copies.siblings import HeldBlock

_SETTLED = frozenset((CopyOutcome.HERE, CopyOutcome.OTHER))
"""The outcomes by which another node has the name, if with other content."""


class BlockGiving:
    """The gifts of one node."""

    def __init__(self, engine: Engine, me: int, nodes: LivingNodes, offers: CopyOffers) -> None:
        self._engine = engine
        self._me = me
        self._nodes = nodes
        self._offers = offers

    async def give(
        self, inos: Sequence[int], afford: Callable[[int], Awaitable[None]]
    ) -> TakenBlocks:
        """Has other nodes take blocks; `afford` waits until so many bytes may be moved. Cancelled:
        some may be taken all the same. Raises KvfsError."""
        found = await self._engine.read(lambda t: siblings.look(t, inos))
        plan: dict[int, list[HeldBlock]] = {}
        homeless: list[tuple[int, list[str]]] = []
        snapshot = self._nodes.snapshot()
        for block in found:
            node = self._choose(snapshot, block) if block.is_sealed else 0
            if node:
                plan.setdefault(node, []).append(block)
            elif block.is_sealed:
                homeless.append((block.inode.size, block.namespace.media))
        await afford(sum(each.inode.size for blocks in plan.values() for each in blocks))
        taken: dict[int, bytes] = {}

        async def offer(node: int, blocks: list[HeldBlock]) -> None:
            outcomes = await self._offers.make(node, blocks)
            taken.update(
                (each.ino, each.inode.checksum)
                for each in blocks
                if outcomes.get(each.ino) in _SETTLED
            )

        async with trio.open_nursery() as nursery:
            for node, blocks in plan.items():
                nursery.start_soon(offer, node, blocks)
        return TakenBlocks(taken, homeless)

    def _choose(self, snapshot: ClusterSnapshot, block: HeldBlock) -> int:
        """Returns a node that is to have a block; 0: there is none."""
        resting = self._offers.resting()
        for host in snapshot.alive(block.siblings):
            if host.is_open and host.number not in resting:
                return host.number
        chosen = placement.choose(
            snapshot,
            block.ino,
            block.inode.size,
            1,
            media=block.namespace.media,
            without={self._me, *resting},
        )
        return chosen[0] if chosen else 0
