"""One node's part for names in a simulated cluster, by the code of nodes, and what it uses."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import trio
import trio.abc
import trio.lowlevel

from kvfs.cluster import peer_protocol
from kvfs.cluster.peer_protocol import PeerAddress
from kvfs.holdings.delta_batch import DeltaBatch
from kvfs.holdings.fingerprints import U64
from kvfs.holdings.holder_table import HolderTable
from kvfs.holdings.own_set import OwnSet
from kvfs.holdings.row_address import Lines
from kvfs.http.http_client import render_request
from kvfs.meta import keys
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.node.homes.known_holders import KnownHolders
from kvfs.node.names.directory_paths import DirectoryPaths
from kvfs.node.names.name_exchange import NameExchange
from kvfs.node.names.name_members import NameMembers
from kvfs.node.names.name_protocol import TELL, Call, News
from kvfs.node.names.peer_outbox import PeerOutbox
from kvfs.node.names.removal_exchange import RemovalExchange
from kvfs.node.names.removals import Removals
from kvfs.node.names.tombstones import Tombstones

_RING: Final = 1 << 13
_DELAY_S: Final = 0.05
"""Time for which a node keeps names to itself where files have temporary ones first that live for
some milliseconds (`kvfs.policy.name_delay`)."""
_HEAD: Final = render_request(
    "POST",
    peer_protocol.method_target(TELL),
    [(peer_protocol.AT, peer_protocol.render_at(PeerAddress(1000, "10.0.3.232", 7000)))],
    bytes(9999),
)
HEAD_BYTES: Final = len(_HEAD) - 9999
"""Those of a request."""


class Observed(HolderTable):
    """A table that notes how old a name is when it comes."""

    def __init__(self, note: Callable[[U64], None], *, is_turned: bool) -> None:
        super().__init__(is_turned=is_turned)
        self._note = note
        self.applied = 0
        """Changes that were applied."""

    def apply_many(
        self,
        nodes: Sequence[int],
        added: U64,
        added_counts: Sequence[int] | Lines,
        removed: U64,
        removed_counts: Sequence[int] | Lines,
    ) -> None:
        super().apply_many(nodes, added, added_counts, removed, removed_counts)
        self.applied += len(added) + len(removed)
        self._note(added)


class Passing(KnownHolders):
    """Keeps nothing of what a node is told: that passes it on, and asks nobody."""

    def take(self, batch: DeltaBatch) -> None:
        """Nothing is lacking."""

    async def run(self) -> None:
        """Until cancelled."""
        await trio.sleep_forever()


class Meter(trio.abc.Instrument):
    """Reckons processor time to the nodes whose tasks use it."""

    def __init__(self) -> None:
        self._owners: dict[trio.lowlevel.Task, Node] = {}
        self._owner: Node | None = None
        self._began = 0.0

    def begin(self, owner: "Node") -> None:
        """From now on this task, and those that it begins, are the node's."""
        self._owners[trio.lowlevel.current_task()] = owner
        self.switch(owner)

    def switch(self, owner: "Node | None") -> "Node | None":
        """What this thread does from now on is the node's, until the task's step ends; returns
        whose it was."""
        former = self._owner
        if owner is not None or former is not None:
            now = time.thread_time()
            if former is not None:
                former.cpu_s += now - self._began
            self._owner, self._began = owner, now
        return former

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        nursery = task.parent_nursery
        owner = None if nursery is None else self._owners.get(nursery.parent_task)
        if owner is not None:
            self._owners[task] = owner

    def task_exited(self, task: trio.lowlevel.Task) -> None:
        self._owners.pop(task, None)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.switch(self._owners.get(task))

    def after_task_step(self, _task: trio.lowlevel.Task) -> None:
        self.switch(None)


class NoRemovals:
    """What all nodes know of removals, of which there are none: they tell each other so."""

    def __init__(self, directory: Path) -> None:
        local = EmbeddedEngine(directory)
        local.node = keys.pack_node(1)
        self.close: Final = local.close
        self.stones: Final = Tombstones(local)
        self.removals: Final = Removals(
            *(local, 1, DirectoryPaths(local), self.stones, lambda *_: False, lambda _: None),
            _forget_nothing,
        )


async def _forget_nothing(_changes: object) -> None:
    pass


class Spent(NamedTuple):
    """What a node used and was sent so far."""

    cpu_s: float
    """Processor time of its part for names, without the requests' own."""
    received: int
    """Requests that it answered."""
    sent: int
    """Those that it made."""
    bytes: int
    """Bytes of requests to it, with their heads, and of answers that brought something."""
    applied: int
    """Changes that its table took."""


class Node:
    """One node."""

    def __init__(
        self,
        directory: Path,
        number: int,
        members: Callable[[], Iterable[tuple[int, bool]]],
        call: Call,
        none: NoRemovals,
        observing: tuple[Callable[[U64], None], Meter] | None,
    ) -> None:
        """`observing`: told of names that came, and what reckons the processor time; None: it
        passes on what it is told, and keeps nothing of it."""
        self.number = number
        self._note: Callable[[U64], None] | None = None
        self._meter: Meter | None = None
        if observing is not None:
            self._note, self._meter = observing
        self.own = OwnSet.open(directory / str(number), number, 1, _RING)
        self.own.mark_filled()
        self.cpu_s = 0.0
        self.received = self.sent = self.bytes = 0
        self._waiting: deque[tuple[float, list[int]]] = deque()
        roster = NameMembers(number, members)
        self.outbox = PeerOutbox(call, roster.interval_s, self._hear)
        kind = Passing if observing is None else KnownHolders
        self.known = kind(self._new_table, [self.own], roster, call)
        self.exchange = NameExchange(
            *([self.own], self.known, roster, self.outbox, self._flush, self._due_s)
        )
        self._stones = none.stones
        self._removals = RemovalExchange(roster, none.stones, call, self.outbox, none.removals)

    def spent(self) -> Spent:
        """Until now; of one that is observed."""
        return Spent(self.cpu_s, self.received, self.sent, self.bytes, self.table.applied)

    def hold(self, fingerprints: Iterable[int]) -> None:
        """Names that come now."""
        self._waiting.append((trio.current_time() + _DELAY_S, list(fingerprints)))
        self.exchange.changed()

    async def told(self, teller: int, news: News) -> News | None:
        """Takes the news of another node; returns what that is to be told."""
        former = None if self._meter is None else self._meter.switch(self)
        self.received += 1
        self.bytes += HEAD_BYTES
        await self._hear(news)  # never waits
        answer = self.outbox.answer(teller)
        if self._meter is not None:
            self._meter.switch(former)
        return answer

    async def run(self) -> None:
        """Takes part, until cancelled."""
        if self._meter is not None:
            self._meter.begin(self)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.outbox.run)
            nursery.start_soon(self.exchange.run)
            nursery.start_soon(self._removals.run)

    # ---- inside

    def _new_table(self, is_turned: bool) -> HolderTable:
        if self._note is None:
            return HolderTable(limit_bytes=0)
        self.table = Observed(self._note, is_turned=is_turned)
        """The last that it has made: the one that follows."""
        return self.table

    def _due_s(self) -> float:
        """As `Announcer.due_s` tells."""
        if not self._waiting:
            return math.inf
        return max(0.0, self._waiting[0][0] - trio.current_time())

    def _flush(self) -> None:
        """As `Announcer.flush_due` does."""
        due: list[int] = []
        while self._waiting and self._waiting[0][0] <= trio.current_time():
            due += self._waiting.popleft()[1]
        if due:
            self.own.add(np.array(due, np.uint64))
        if self._waiting:
            self.exchange.changed()

    async def _hear(self, news: News) -> None:
        """Does what `NameSets` does with news."""
        self.bytes += len(news.deltas) + len(news.sums)
        self._stones.heard()
        if news.deltas:
            self.exchange.told(news.deltas)
        self._removals.told(news.sums, news.stones)
