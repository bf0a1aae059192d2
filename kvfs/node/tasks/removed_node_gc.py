"""The keeper that cleans up after removed nodes, on one node at a time.

A batch is one transaction that checks the claim: a node that hung, and finds that another went on,
stops there.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final

import trio

from kvfs.base.retry import Persistence
from kvfs.cluster import decommission
from kvfs.cluster.decommission import Gone, Left
from kvfs.cluster.node_records import NodeRecord, list_nodes
from kvfs.meta import keys
from kvfs.meta.engine import Engine, Transaction
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

    def __init__(self, engine: Engine, claims: "Claims", forget: Forget) -> None:
        self._engine = engine
        self._claims = claims
        self._forget = forget
        self.lost_files = 0
        """Durable files whose only copy was on a removed node, since this one started."""

    async def run(self) -> None:
        """Removes until cancelled."""
        clearing = Persistence(log.warning, "what a removed node left is not cleared up yet")
        while True:
            await clearing.attempt(self.clear)
            await trio.sleep(PERIOD_S)

    async def clear(self) -> None:
        """Removes all traces of removed nodes, unless another node does it. Raises Conflict
        (another took it over), and what `Engine.transact` raises."""
        for record in await self._engine.read(list_nodes):
            if record.state == "removed" and any(await self._left(record)):
                name = f"removal-{record.number}"
                if await self._claims.take(name):
                    await self._clear(record, name)
                    await self._claims.drop(name)

    async def _left(self, record: NodeRecord) -> Left:
        node = keys.pack_node(record.number)
        return await self._engine.read(lambda t: decommission.list_left(t, node, _BATCH))

    async def _clear(self, record: NodeRecord, name: str) -> None:
        node = keys.pack_node(record.number)
        while any(left := await self._left(record)):
            now = time.time_ns()

            def let_go(t: Transaction, left: Left = left, now: int = now) -> Gone:
                self._claims.check(t, name)
                return decommission.let_go(t, node, left, now)

            gone = await self._engine.transact(let_go)
            self.lost_files += gone.lost
            if gone.lost:
                log.error("%d durable files were on node %d alone", gone.lost, record.number)
            if gone.evicted:
                await self._forget(gone.evicted)
            await trio.lowlevel.checkpoint()
        log.info("node %d has gone: nothing is left of it", record.number)
