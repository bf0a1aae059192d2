"""The keeper of a node's lease: renews it, and keeps the picture of the other nodes fresh.

Nothing else waits in its loop: long waits elsewhere must not cost the node its lease.
"""

import contextlib
import logging
from typing import TYPE_CHECKING

import trio

from kvfs.base.errors import KvfsError, Unavailable
from kvfs.base.retry import Persistence
from kvfs.cluster.failure_detector import RENEWAL_S
from kvfs.cluster.node_records import packed_nodes, unpack_node
from kvfs.meta.engine import Engine
from kvfs.meta.node_leases import Fenced

if TYPE_CHECKING:  # it loads what speaks to a server, which a lone node does without
    from kvfs.cluster.membership import Membership

log = logging.getLogger(__name__)


class Renewal:
    """The renewal for one member, with the engine on which it runs."""

    def __init__(self, member: "Membership", engine: Engine) -> None:
        self._member = member
        self._engine = engine
        self._renewing = Persistence(log.error, "this node's lease was not renewed")
        self._turn = trio.Lock()
        self._begun = 0
        self._done = 0
        """The number of the last look that was done."""
        self._woken = trio.Event()
        self._records: list[bytes] = []
        """The records of nodes that the roster has."""

    async def run(self) -> None:
        """Renews until cancelled. Raises Fenced: this process must end."""
        while True:
            held = self._member.holds_lease
            try:
                await self.look()
            except Fenced:
                raise
            except (KvfsError, OSError) as error:
                self._renewing.complain(error)
            else:
                if not held:
                    log.info("this node holds its lease again")
            self._woken = trio.Event()
            with trio.move_on_after(RENEWAL_S):
                await self._woken.wait()

    async def look(self) -> None:
        """Returns when the roster shows everything known at a moment after the call: one round
        trip, which all waiting callers share. Raises what `Membership.renew` raises."""
        wanted = self._begun + 1
        async with self._turn:
            if self._done < wanted:
                self._begun += 1
                number = self._begun
                await self._member.renew()
                # Before the replica is whole for the first time it tells nothing of nodes.
                with contextlib.suppress(Unavailable):
                    self._read(await self._engine.read(packed_nodes))
                self._done = number

    def _read(self, records: list[bytes]) -> None:
        """Has the roster read the records, if they are others than it has."""
        if records != self._records:
            self._member.roster.read(map(unpack_node, records))
            self._records = records

    def wake(self) -> None:
        """Notes that a node's record was changed: it is read soon."""
        self._woken.set()
