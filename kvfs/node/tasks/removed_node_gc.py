"""The keeper that cleans up after removed nodes, on one node at a time; where names are each node's
own, each node does so by itself.

A batch is one transaction that checks the claim: a node that hung, and finds that another went on,
stops there.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from kvfs.base.retry import Persistence
from kvfs.cluster import decommission
from kvfs.cluster.decommission import Gone, Left
from kvfs.cluster.node_records import NodeRecord, list_nodes
from kvfs.meta import keys
from kvfs.meta.engine import Engine, Transaction
from kvfs.tree import namespaces
from kvfs.tree.copies import placements
from kvfs.tree.lifecycle import Evicted

if TYPE_CHECKING:  # it loads what speaks to a server, which a lone node does without
    from kvfs.cluster.job_lease import Claims

PERIOD_S: Final = 10.0
_BATCH: Final = 64
log = logging.getLogger(__name__)

Forget = Callable[[Sequence[Evicted]], Awaitable[None]]
"""Makes the mounts of this node forget the names of evicted files."""


class Removal:
    """The removal, as done by one node."""

    def __init__(
        self,
        engine: Engine,
        claims: "Claims",
        forget: Forget,
        fence: Callable[[Sequence[NodeRecord]], Awaitable[None]],
    ) -> None:
        """`fence` keeps removed nodes from committing."""
        self._engine = engine
        self._fence = fence
        self._claims = claims
        self._forget = forget
        self._fenced: set[int] = set()
        self.lost_files = 0
        """Durable files whose only copy was on a removed node, since this one started."""

    async def run(self) -> None:
        """Removes until cancelled."""
        fencing = Persistence(log.warning, "removed nodes are not fenced everywhere yet")
        clearing = Persistence(log.warning, "what a removed node left is not cleared up yet")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fencing.repeat, self.fence, PERIOD_S)
            await clearing.repeat(self.clear, PERIOD_S)

    async def fence(self) -> None:
        """Fences removed nodes that whoever removed them may not have fenced everywhere. Raises
        Unavailable: to be done again."""
        removed = [each for each in await self._removed() if each.number not in self._fenced]
        if removed:
            await self._fence(removed)
            self._fenced.update(each.number for each in removed)

    async def clear(self) -> None:
        """Removes all traces of removed nodes, unless another node does it. Raises Conflict
        (another took it over), and what `Engine.transact` raises."""
        for record in await self._removed():
            await self.clear_own(record.number)
            if any(await self._left(record)):
                name = f"removal-{record.number}"
                if await self._claims.take(name):
                    await self._clear(record, name)
                    await self._claims.drop(name)

    async def clear_own(self, number: int) -> None:
        """Removes what this node alone has recorded of a removed node. Raises KvfsError."""
        node, now = keys.pack_node(number), time.time_ns()
        for listed in await self._engine.read(namespaces.list_all):
            if not self._engine.is_local(listed.id):
                continue
            while inos := await self._engine.read(partial(_held, node, listed.id)):
                left = Left([], [], [], inos, [])
                gone = await self._engine.transact(partial(_let_go, node, left, now))
                if gone.evicted:
                    await self._forget(gone.evicted)
                await trio.lowlevel.checkpoint()

    async def _removed(self) -> list[NodeRecord]:
        return [each for each in await self._engine.read(list_nodes) if each.state == "removed"]

    async def _left(self, record: NodeRecord) -> Left:
        node = keys.pack_node(record.number)
        return await self._engine.read(lambda t: decommission.list_left(t, node, _BATCH))

    async def _clear(self, record: NodeRecord, name: str) -> None:
        node = keys.pack_node(record.number)
        while any(left := await self._left(record)):
            now = time.time_ns()
            for part in left.apart(self._engine):

                def let_go(t: Transaction, part: Left = part, now: int = now) -> Gone:
                    self._claims.check(t, name)
                    return decommission.let_go(t, node, part, now)

                gone = await self._engine.transact(let_go)
                self.lost_files += gone.lost
                if gone.lost:
                    log.error("%d durable files were on node %d alone", gone.lost, record.number)
                if gone.evicted:
                    await self._forget(gone.evicted)
            await trio.lowlevel.checkpoint()
        log.info("node %d has gone: nothing is left of it", record.number)


def _held(node: bytes, namespace_id: int, t: Transaction) -> list[int]:
    """Returns some files of a namespace of which a node has a part."""
    return placements.held_within(t, node, namespace_id, 0, _BATCH)


def _let_go(node: bytes, left: Left, now: int, t: Transaction) -> Gone:
    return decommission.let_go(t, node, left, now)
