"""Moves copies between nodes: from full ones to emptier ones, and to more nodes while they are hot.

| keeper | when | work |
|---|---|---|
| rebalancer | each minute, while a node is far from the others | its coldest files go elsewhere |
| hot files | each two seconds | files in great demand get more copies |
| cooling | each half minute | of these, unused copies go |

Invariants
- A copy goes here only after the other node has recorded its own, and if enough are left.
- Moving keeps to a rate; a round moves no more than a minute of it, then everything is examined
  anew.
"""

import logging
import time
from collections.abc import Iterator
from functools import partial
from typing import Final

import trio

from kvfs.base.retry import Persistence
from kvfs.datastore.index import Index
from kvfs.meta.engine import Transaction
from kvfs.node.tasks.copier import Copies
from kvfs.policy import hot_files, rebalance_plan, replica_repair
from kvfs.policy.eviction import coldest
from kvfs.policy.hot_files import Heat
from kvfs.policy.pace import Pace
from kvfs.policy.rebalance_plan import Copy, Move
from kvfs.tree import namespaces
from kvfs.tree.copies import replica_counts
from kvfs.tree.copies.replica_counts import HeldFile

log = logging.getLogger(__name__)
_ROUND_S: Final = 60.0
_HOT_S: Final = 2.0
_COOL_S: Final = 30.0
_UNUSED_NS: Final = 60_000_000_000
"""A hot copy that was used here within this time stays."""
_CANDIDATES: Final = 4096


class Evening:
    """The rebalancing of one node."""

    def __init__(self, made: Copies, index: Index, bytes_per_s: int) -> None:
        self._copies = made
        self._me = made.me
        self._index = index
        self._rate = bytes_per_s
        self._pace = Pace(bytes_per_s, 0.0)
        self._heat = Heat()
        self.counters = {"moved_files": 0, "moved_bytes": 0, "hot_copies": 0, "cooled_copies": 0}

    def demanded(self, ino: int) -> None:
        """Notes that another node asked this one for the file."""
        self._heat.demanded(ino, trio.current_time())

    async def run(self) -> None:
        """Moves copies until cancelled."""
        self._pace = Pace(self._rate, trio.current_time())
        moving = Persistence(log.warning, "nodes are evened out later")
        heating = Persistence(log.warning, "hot files get more copies later")
        cooling = Persistence(log.warning, "copies of what was hot go later")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(moving.repeat, self.even_out, _ROUND_S, first_s=_ROUND_S))
            nursery.start_soon(partial(heating.repeat, self.spread, _HOT_S, first_s=_HOT_S))
            nursery.start_soon(partial(cooling.repeat, self.cool, _COOL_S, first_s=_COOL_S))

    # ---- from full to empty

    async def even_out(self) -> None:
        """Does one round. Raises KvfsError."""
        budget = self._rate * _ROUND_S if self._rate else float("inf")
        files = await self._candidates()
        for move in self._moves(files):
            await trio.sleep(self._pace.spend(move.size, trio.current_time()))
            if await self._move(files[move.ino], move):
                self.counters["moved_files"] += 1
                self.counters["moved_bytes"] += move.size
            budget -= move.size
            if budget <= 0:
                return

    def _moves(self, files: dict[int, HeldFile]) -> Iterator[Move]:
        own = (Copy(ino, each.inode.size, tuple(each.holders)) for ino, each in files.items())
        return rebalance_plan.shed(self._copies.snapshot(), self._me, own)

    async def _candidates(self) -> dict[int, HeldFile]:
        """Returns the files here, those used longest ago first."""

        def fn(t: Transaction) -> dict[int, HeldFile]:
            orders = [self._index.coldest(each.id, _CANDIDATES) for each in namespaces.list_all(t)]
            found = replica_counts.look(t, coldest(orders, _CANDIDATES))
            return {each.ino: each for each in found if self._me in each.holders}

        return await self._copies.engine.read(fn)

    async def _move(self, file: HeldFile, move: Move) -> bool:
        await self._copies.ask(move.target, file)
        there = self._copies.snapshot().alive([*file.holders, move.target])
        others = [host for host in there if host.is_open and host.number != self._me]
        if len(others) < file.wanted:
            return False
        return await self._copies.brings.let_go(file.ino)

    # ---- hot

    async def spread(self) -> None:
        """Makes more copies of files in great demand. Raises KvfsError."""
        for ino, extra in self._heat.hot(trio.current_time()):
            file = await self._copies.look(ino)
            if file is None:
                continue
            there = self._copies.snapshot().alive(file.holders)
            missing = file.wanted + extra - len(there)
            if missing > 0:
                made = await self._copies.make(file, missing, hot=True)
                self.counters["hot_copies"] += len(made)

    async def cool(self) -> None:
        """Drops copies that were made of hot files and that nobody uses. Raises KvfsError."""
        now = trio.current_time()
        for ino in list(self._copies.hot):
            if not hot_files.is_cold(self._heat.of(ino, now)) or self._was_used(ino):
                continue
            del self._copies.hot[ino]
            file = await self._copies.look(ino)
            if file is None or self._me not in file.holders:
                continue
            snapshot = self._copies.snapshot()
            if replica_repair.may_go(snapshot, ino, file.holders, file.wanted, self._me):
                self.counters["cooled_copies"] += await self._copies.brings.let_go(ino)

    def _was_used(self, ino: int) -> bool:
        entry = self._index.get(ino)
        return entry is not None and time.time_ns() - entry.clock < _UNUSED_NS
