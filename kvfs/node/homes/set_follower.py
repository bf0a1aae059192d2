"""Keeps one table of what other nodes hold up to date: applies what they tell, and asks them for
what it lacks.

Invariant
- What a member told is dropped when that leaves the cluster. While it is only away, its claims
  stay, and nobody is asked.
"""

import logging
from collections import deque
from typing import Final

import trio
import trio.lowlevel

from kvfs.base.background import Background
from kvfs.base.errors import KvfsError
from kvfs.base.retry import Persistence
from kvfs.holdings import delta_batch, delta_codec
from kvfs.holdings.delta_batch import DeltaBatch
from kvfs.holdings.holder_table import HolderTable
from kvfs.holdings.messages import Checksums, Deltas, HoldingsAsk, RangeContents
from kvfs.holdings.received_sets import ReceivedSets
from kvfs.node.names.name_members import NameMembers, cold_of
from kvfs.node.names.name_protocol import ASK, Call, parse_messages

log = logging.getLogger(__name__)
LOOK_S: Final = 1.0
_ASK_S: Final = 10.0
_ASKS: Final = 64
"""Questions that wait for one origin."""
_ASKED: Final = 8
"""Origins that are asked at a time: a node that starts lacks what all others hold, and answers that
all come together come after their deadline."""
_GATHERED: Final = 64
"""Requests whose changes are gathered at most."""


class SetFollower:
    """The table of one node."""

    def __init__(self, table: HolderTable, members: NameMembers, call: Call) -> None:
        self.table: Final = table
        self.received: Final = ReceivedSets(table)
        self._members = members
        self._call = call
        self._asks: dict[int, deque[HoldingsAsk]] = {}
        """Questions to each origin, the first under way; one that waits there is not put again."""
        self._asking = trio.Semaphore(_ASKED)
        self._came: list[DeltaBatch] = []
        """Changes that are not applied yet."""
        self._has_come = trio.Event()
        self._applying = Persistence(log.warning, "what other nodes hold is not known for now")
        self._scope = trio.CancelScope()
        self._tasks = Background()
        self.repairs = 0
        """Questions that were asked."""

    async def run(self) -> None:
        """Keeps up, until cancelled or ended."""
        with self._scope:
            await self._tasks.run(self._keep_up, self._gather)

    def end(self) -> None:
        """Has it take, and ask for, nothing any more: what it knows stays as it is."""
        self._scope.cancel()

    def take(self, batch: DeltaBatch, *, is_whole: bool = True) -> None:
        """Takes changes. `is_whole`: whether none was left out that belongs here."""
        if not is_whole:
            self.apply()
            asks = self.received.receive_batch(batch, trio.current_time(), is_whole=False)
            for ask in asks:
                self._repair(ask)
            return
        self._came.append(batch)
        self._has_come.set()
        if len(self._came) >= _GATHERED:
            self.apply()

    def apply(self) -> None:
        """Applies what came."""
        if self._came:
            batch, self._came = delta_batch.joined(self._came), []
            try:
                for ask in self.received.receive_batch(batch, trio.current_time()):
                    self._repair(ask)
            except KvfsError as error:  # what is lacking is asked for, as where a request was lost
                self._applying.complain(error)

    def forget(self, node: int) -> None:
        """Drops what a node told that is a member no more."""
        self.received.forget(node)
        self.received.forget(cold_of(node))

    def knows(self, node: int) -> bool:
        """Returns whether all is known here, of what the table is for, that a member says it holds:
        it was heard, nothing is lacking, and there is room for it."""
        return not self.table.is_full and self.received.is_whole(node)

    def knows_all(self) -> bool:
        """Returns the same of all members that live, and of what they sent to the cold tier."""
        return all(
            self.knows(node) and not self.received.lacks(cold_of(node))
            for node in self._members.living()
        )

    # ---- inside

    async def _gather(self) -> None:
        """Applies what comes after a rest at once, and then what comes within a moment together:
        each call of the table costs as much as hundreds of changes."""
        while True:
            await self._has_come.wait()
            self._has_come = trio.Event()
            self.apply()
            await trio.sleep(self._members.interval_s() / 4)

    async def _keep_up(self) -> None:
        while True:
            self.apply()
            for ask in self.received.due(trio.current_time()):
                self._repair(ask)
            while self.table.step():
                await trio.lowlevel.checkpoint()
            await trio.sleep(LOOK_S)

    def _take(self, message: Deltas | Checksums | RangeContents) -> None:
        for ask in self.received.receive(message, trio.current_time()):
            self._repair(ask)

    def _repair(self, ask: HoldingsAsk) -> None:
        if not self._tasks.runs or not self._lives(ask.store):
            return
        asks = self._asks.get(ask.store)
        if asks is None:
            asks = self._asks[ask.store] = deque([ask])
            self._tasks.begin(self._ask, ask.store, asks)
        elif ask not in asks and len(asks) < _ASKS:
            asks.append(ask)

    def _lives(self, origin: int) -> bool:
        node = self._members.node_of(origin)
        return node is not None and self._members.lives(node)

    async def _ask(self, store: int, asks: deque[HoldingsAsk]) -> None:
        try:
            while asks:
                async with self._asking:
                    if self._is_wanted(asks[0]):
                        await self._ask_once(asks[0])
                asks.popleft()
        except KvfsError as error:  # what is lacking is asked for again (`ReceivedSets.due`)
            log.debug("origin %d does not tell what it holds: %s", store, error)
        finally:
            del self._asks[store]

    def _is_wanted(self, ask: HoldingsAsk) -> bool:
        """Returns whether an answer would bring anything: an earlier one may have brought it."""
        if ask.since is None:
            return True
        return self.received.standing(ask.store) == (ask.epoch, ask.since)

    async def _ask_once(self, ask: HoldingsAsk) -> None:
        self.repairs += 1
        raw = delta_codec.encode(ask)
        node = self._members.node_of(ask.store)
        if node is None:
            return
        for each in parse_messages(await self._call(node, ASK, [raw], _ASK_S)):
            message = delta_codec.decode(each)
            if not isinstance(message, HoldingsAsk) and message.store == ask.store:
                self._take(message)
            await trio.lowlevel.checkpoint()
        self.received.answered(ask, trio.current_time())
