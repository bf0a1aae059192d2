"""Keeps a node to the homes that the cluster has, and has one node at a time decide which those are
(`kvfs.policy.home_nodes`)."""

import logging
from collections.abc import Iterable
from typing import Final

import trio

from kvfs.base.errors import Conflict
from kvfs.base.retry import Persistence
from kvfs.base.version import KNOWS_HOMES
from kvfs.cluster.job_lease import Claims
from kvfs.cluster.membership import Membership
from kvfs.holdings.home_map import MOST_NUMBER, HomeMap
from kvfs.meta.engine import Transaction
from kvfs.meta.replica.replica_engine import ReplicaEngine
from kvfs.node.homes import home_record
from kvfs.node.homes.home_record import HomeRecord
from kvfs.node.homes.known_holders import KnownHolders
from kvfs.node.names.name_exchange import NameExchange
from kvfs.policy import home_nodes
from kvfs.policy.home_nodes import ChangeRate, Presence

log = logging.getLogger(__name__)
_JOB: Final = "homes of names"
_DECIDE_S: Final = 5.0
"""Time between two decisions, which each move ranges: nodes that come together come by one."""


class HomeKeeper:
    """The part of one node."""

    def __init__(
        self,
        engine: ReplicaEngine,
        member: Membership,
        jobs: Claims,
        known: KnownHolders,
        exchange: NameExchange,
        most_names: int,
    ) -> None:
        """`most_names`: those of other nodes that each node may know of."""
        self._engine = engine
        self._member = member
        self._jobs = jobs
        self._known = known
        self._exchange = exchange
        self._most_names = most_names
        self._presence: Presence | None = None
        self._rate = ChangeRate()
        self._record = HomeRecord()
        self._decides = False
        """Whether this node has taken the job."""
        self._has_changed = trio.Event()

    def changed(self) -> None:
        """Has the record looked at: it may have changed."""
        self._has_changed.set()

    async def run(self) -> None:
        """Looks and decides, until cancelled."""
        looking = Persistence(log.warning, "the homes of names are those of before")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_looking, looking)
            nursery.start_soon(looking.repeat, self.decide, _DECIDE_S)

    async def look(self) -> None:
        """Goes by the record that the engine has; by that of before where it raises. Raises
        KvfsError."""
        found = await self._engine.read(home_record.read)
        if found == self._record:
            return
        number = found.number % MOST_NUMBER + 1
        self._known.adopt(HomeMap(number, found.zones) if found.zones else None)
        self._record = found
        if found.zones:
            log.info("who holds which name is known by homes, %d nodes", len(found.zones))
        else:
            log.info("who holds which name is known by each node")

    async def decide(self) -> None:
        """Records other homes where there should be others, unless another node does that. A home
        of no range cannot tell how many names there are: it leaves that to one that can. Raises
        KvfsError."""
        now = trio.current_time()
        rate = self._rate.look(self._exchange.changes, now)
        members = self._member.roster.all()
        before = await self._engine.read(home_record.read)
        if self._presence is None:  # one that decides anew does not know since when others are away
            self._presence = Presence()
            self._presence.look(before.zones.items(), now)
        there = self._presence.look(((e.number, e.zone) for e in members if e.alive), now)
        if any(each.protocol < KNOWS_HOMES for each in members):
            there = {}
        if self._is_blind(there):
            await self._leave_it()
            return
        zones = home_nodes.wanted(before.zones, there, self._known.names, rate, self._most_names)
        if zones == before.zones or not await self._jobs.take(_JOB):
            return
        self._decides = True

        def replace(t: Transaction) -> None:
            self._jobs.check(t, _JOB)
            if home_record.read(t) != before:
                raise Conflict("the homes of names have changed meanwhile")
            home_record.replace(t, zones)

        await self._engine.transact(replace)
        self.changed()

    # ---- inside

    async def _keep_looking(self, looking: Persistence) -> None:
        """Looks when the record has changed, and at times: a replica that is read anew tells of no
        single change."""
        while True:
            self._has_changed = trio.Event()
            if await looking.attempt(self.look):
                with trio.move_on_after(_DECIDE_S):
                    await self._has_changed.wait()

    def _is_blind(self, there: Iterable[int]) -> bool:
        """Returns whether this node is a home of no range, while another of these nodes is one of
        some."""
        homes, me = self._known.map, self._member.node
        if homes is None or homes.share_of(me).any():
            return False
        return any(homes.share_of(each).any() for each in there if each != me)

    async def _leave_it(self) -> None:
        if self._decides:
            await self._jobs.drop(_JOB)
            self._decides = False
