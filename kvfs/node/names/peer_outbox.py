"""News of names for other nodes, until it is sent.

The first after a rest goes at once; that of the time until the next request goes together, since a
request costs both nodes more than hundreds of changes in it. The answer to a request brings what
the other node has to tell in return, so of two that tell each other all the time one asks. What is
no hurry (where a node has come to, which it tells once a second) waits for such a request for half
a second: so two nodes at rest have one a second.

Invariants
- What waits for a node is bounded. One that does not take what it is sent is sent nothing for a
  while, and keeps nobody waiting: what waits is dropped, and the node asks for what it lacks.
"""

import math
from collections.abc import Awaitable, Callable
from itertools import takewhile
from typing import Any, Final

import trio

from kvfs.base.background import Background
from kvfs.base.errors import KvfsError
from kvfs.holdings import delta_batch
from kvfs.holdings.delta_batch import PackedBatch
from kvfs.node.names import removal_sums
from kvfs.node.names.name_protocol import TELL, Call, News

_MOST_BYTES: Final = 512 << 10
"""Bytes that wait for one node, where that is not a single batch."""
LATER_S: Final = 0.5
"""Time within which something is told that is no hurry."""
_SEND_S: Final = 2.0
_REST_S: Final = 1.0
_ANSWERS: Final = 1.5
"""Intervals after which a node asks again that was just asked: the other one comes first."""


class _Link:
    """The news that wait for one node."""

    __slots__ = (
        *("batches", "due_at", "hurry", "is_sending", "rests_until"),
        *("send_by", "size", "stones", "sums"),
    )

    def __init__(self) -> None:
        self.is_sending = False
        self.hurry = trio.Event()
        """Set when something is to be sent earlier than what waited so far."""
        self.due_at = self.rests_until = -math.inf
        self.clear()

    def clear(self) -> None:
        self.batches: list[PackedBatch] = []
        self.sums: list[bytes] = []
        self.stones: list[bytes] = []
        self.size = 0
        self.send_by = math.inf
        """When what waits is to be sent, if the other node does not ask before."""

    @property
    def messages(self) -> int:
        """The number of rows and tombstones that wait."""
        return sum(map(len, self.batches)) + len(self.sums) + len(self.stones)

    def take(self) -> News:
        """Returns all that waits, which waits no more; of changes those that go by one map of
        homes: the others wait for the next request."""
        number = self.batches[0].map_number if self.batches else 0
        batches = list(takewhile(lambda each: each.map_number == number, self.batches))
        later = self.batches[len(batches) :]
        news = News(
            delta_batch.encode(batches) if batches else b"",
            removal_sums.encode(self.sums) if self.sums else b"",
            self.stones,
        )
        self.clear()
        if later:
            self.batches, self.size = later, sum(each.size for each in later)
            self.send_by = -math.inf
        return news


class PeerOutbox:
    """The news that wait for all nodes."""

    def __init__(
        self,
        call: Call,
        interval_s: Callable[[], float],
        hear: Callable[[Any], Awaitable[None]],
    ) -> None:
        """`interval_s`: the time between two requests to a node. `hear` takes what it answers."""
        self._call = call
        self._interval_s = interval_s
        self._hear = hear
        self._links: dict[int, _Link] = {}
        self._tasks = Background()
        self.counters = {"name_news_sent": 0, "name_news_dropped": 0, "name_news_requests": 0}

    async def run(self) -> None:
        """Sends, until cancelled; what is to be sent before or after is dropped."""
        await self._tasks.run()

    def tell(self, node: int, batch: PackedBatch, within_s: float = 0.0) -> None:
        """Sends changes soon: within so many seconds, if the other node does not ask before."""
        link = self._link(node, batch.size, len(batch))
        if link is not None:
            link.batches.append(batch)
            self._added(node, link, batch.size, within_s)

    def tell_sum(self, node: int, row: bytes) -> None:
        """Sends a packed `RemovalSum` within `LATER_S`."""
        link = self._link(node, len(row))
        if link is not None:
            link.sums.append(row)
            self._added(node, link, len(row), LATER_S)

    def tell_stone(self, node: int, stone: bytes) -> None:
        """Sends an encoded tombstone soon."""
        link = self._link(node, len(stone))
        if link is not None:
            link.stones.append(stone)
            self._added(node, link, len(stone))

    def answer(self, node: int) -> News | None:
        """Returns what waits for a node that has just told its news; None: nothing."""
        link = self._links.get(node)
        if link is None:
            return None
        link.due_at = trio.current_time() + _ANSWERS * self._interval_s()
        if not link.size:
            return None
        messages, news = link.messages, link.take()
        self.counters["name_news_sent"] += messages - link.messages
        return news

    def forget(self, node: int) -> None:
        """Drops what waits for a node that left."""
        self._links.pop(node, None)

    def _link(self, node: int, size: int, messages: int = 1) -> _Link | None:
        """Returns the link to a node; None: it takes no more of that size now."""
        link = self._links.get(node)
        if link is None:
            link = self._links[node] = _Link()
        rests = not self._tasks.runs or trio.current_time() < link.rests_until
        if rests or (link.size and link.size + size > _MOST_BYTES):
            self.counters["name_news_dropped"] += messages
            return None
        return link

    def _added(self, node: int, link: _Link, size: int, within_s: float = 0.0) -> None:
        link.size += size
        send_by = trio.current_time() + within_s
        if send_by < link.send_by:
            link.send_by = send_by
            link.hurry.set()
        if not link.is_sending and self._tasks.runs:
            link.is_sending = True
            self._tasks.begin(self._drain, node, link)

    async def _drain(self, node: int, link: _Link) -> None:
        try:
            while link.size:
                if (due_at := max(link.due_at, link.send_by)) > trio.current_time():
                    link.hurry = trio.Event()
                    with trio.move_on_at(due_at):
                        await link.hurry.wait()
                    continue
                messages, news = link.messages, link.take()
                messages -= link.messages
                link.due_at = trio.current_time() + self._interval_s()
                try:
                    answer = await self._call(node, TELL, news, _SEND_S)
                    if answer is not None:
                        await self._hear(answer)
                except (KvfsError, OSError):  # the disk's, of what it answers
                    self.counters["name_news_dropped"] += messages + link.messages
                    link.clear()
                    link.rests_until = trio.current_time() + _REST_S
                    return
                self.counters["name_news_sent"] += messages
                self.counters["name_news_requests"] += 1
        finally:
            link.is_sending = False
