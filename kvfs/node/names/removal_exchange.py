"""Tells other nodes which names were removed here, and learns what they removed.

A tombstone goes along the tree of `name_exchange`, at once. Each node tells once a second how many
it has made, and a sum of them, and once in ten seconds the same of every node that does not live;
whoever knows others asks for them, in the order of their times. So one that a node missed comes
within seconds of its return, also where the node that removed the name has died meanwhile. A node
that lost some of its own (a power cut) is told by those whom it told of them: whoever asked it, and
heard nothing new, tells it the sum that it knows itself.
"""

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
import trio

from kvfs.base.background import Background
from kvfs.base.errors import UNDECODABLE, Corrupt, KvfsError
from kvfs.base.retry import Persistence
from kvfs.cluster.handshake import Party
from kvfs.node.names import removal_sums
from kvfs.node.names.name_members import NameMembers
from kvfs.node.names.name_protocol import (
    ASK_REMOVED,
    Call,
    check_question,
    parse_messages,
)
from kvfs.node.names.peer_outbox import PeerOutbox
from kvfs.node.names.removal_sums import RemovalSum
from kvfs.node.names.removals import Removals
from kvfs.node.names.tombstones import HOUR_NS, MOST, Tombstone, Tombstones

log = logging.getLogger(__name__)
_PERIOD_S: Final = 1.0
_EXPIRES_EVERY: Final = 60
"""Periods after which those are dropped whose day has passed."""
_ASK_S: Final = 10.0
_ASK_AGAIN_S: Final = 5.0
_LONGEST_PAUSE_S: Final = 320.0
"""The longest pause before a node is asked that had nothing new."""
_ABSENT_EVERY: Final = 10
"""Periods after which the removals of nodes that do not live are told."""
_ASKED: Final = 4096
"""Pauses that are remembered."""
_PAGE: Final = 10_000
"""Tombstones in one answer: a megabyte or so."""
_WAITING: Final = 100_000
"""Tombstones that came and are not done yet; more are asked for later."""


class _Since(msgspec.Struct, array_like=True):
    """The question for the tombstones of a node that are later."""

    origin: int
    removed_ns: int


_encode: Final = msgspec.msgpack.Encoder().encode
_since: Final = msgspec.msgpack.Decoder(_Since)
_stone: Final = msgspec.msgpack.Decoder(Tombstone)


class _Pause(NamedTuple):
    """The time before which a node is not asked again."""

    until: float = 0.0
    seconds: float = 0.0


class RemovalExchange:
    """The exchange of one node."""

    def __init__(
        self,
        members: NameMembers,
        stones: Tombstones,
        call: Call,
        outbox: PeerOutbox,
        removals: Removals,
    ) -> None:
        """`removals`: those that this node does."""
        self._members = members
        self._stones = stones
        self._call = call
        self._removals = removals
        self._outbox = outbox
        self._waiting: deque[Tombstone] = deque()
        self._came = trio.Event()
        self._pauses: dict[tuple[int, int], _Pause] = {}
        """Pauses of the nodes that were asked, each for the tombstones of a node."""
        self._asking: set[int] = set()
        """The nodes whose tombstones are being asked for, of one other at a time."""
        self._tasks = Background()
        self.counters = {"removals_told": 0, "removals_heard": 0, "removals_asked_for": 0}

    async def run(self) -> None:
        """Exchanges, until cancelled."""
        await self._tasks.run(self._do, self._tell_sums)

    def tell(self, stones: Sequence[Tombstone]) -> None:
        """Tells what was removed here; never waits."""
        self.counters["removals_told"] += len(stones)
        for each in stones:
            self._pass_on(each)

    def told(self, sums: bytes, stones: Sequence[bytes]) -> None:
        """Takes what another node tells or passes on. Raises Invalid, Corrupt."""
        for each in removal_sums.decode(sums) if sums else ():
            if each.teller != self._members.me and each.teller in self._members:
                self._compare(each)
                self._pass_on_sum(each)
        for raw in stones:
            if len(self._waiting) < _WAITING:
                self._wait_for(_decoded(_stone, raw))

    async def asked(self, _peer: Party, params: Any) -> list[bytes]:
        """Handles the request `ask-removed`: tombstones of a node, the earliest first. Raises
        Invalid, Corrupt."""
        asked: _Since = _decoded(_since, parse_messages(params, 1)[0])
        found = [e for e in self._stones.of(asked.origin) if e.removed_ns > asked.removed_ns]
        found.sort(key=lambda each: each.removed_ns)
        return [_encode(each) for each in found[:_PAGE]]

    # ---- inside

    async def _tell_sums(self) -> None:
        saving = Persistence(log.warning, "removals of names are not kept on the disk yet")
        periods = 0
        while True:
            await trio.sleep(_PERIOD_S)
            periods += 1
            me = self._members.me
            told = [me]
            if periods % _ABSENT_EVERY == 0:
                told += [
                    e for e in self._stones.origins() if e != me and not self._members.lives(e)
                ]
            hour = self._stones.compared_since() // HOUR_NS
            for origin in told:
                numbers = self._stones.sum_of(origin, hour * HOUR_NS)
                self._pass_on_sum(RemovalSum(me, origin, hour, *numbers))
            if periods % _EXPIRES_EVERY == 0:
                self._stones.expire()
            try:
                self._stones.save()
            except KvfsError as error:
                saving.complain(error)

    def _wait_for(self, stone: Tombstone) -> None:
        """Has it done soon. Raises Invalid."""
        check_question(*stone.name)
        self._waiting.append(stone)
        self._came.set()

    def _pass_on(self, stone: Tombstone) -> None:
        raw = _encode(stone)
        for node in self._members.children(stone.origin):
            self._outbox.tell_stone(node, raw)

    def _pass_on_sum(self, told: RemovalSum) -> None:
        row = removal_sums.pack(told)
        for node in self._members.children(told.teller):
            self._outbox.tell_sum(node, row)

    async def _do(self) -> None:
        doing = Persistence(log.warning, "what other nodes removed stays here for now")
        while True:
            await self._came.wait()
            self._came = trio.Event()
            while self._waiting:
                await doing.attempt(self._do_some)

    async def _do_some(self) -> None:
        some = [self._waiting.popleft() for _ in range(min(len(self._waiting), _PAGE))]
        for each in await self._removals.take(some):
            self.counters["removals_heard"] += 1
            if each.origin != self._members.me:  # else others know it, and this node had lost it
                self._pass_on(each)

    def _compare(self, told: RemovalSum) -> None:
        key = told.teller, told.origin
        if self._stones.sum_of(told.origin, told.since_ns) == (told.removals, told.sum):
            self._pauses.pop(key, None)
            return
        pause = self._pauses.get(key, _Pause())
        if not self._tasks.runs or self._waiting or trio.current_time() < pause.until:
            return
        if told.origin in self._asking or not self._members.lives(told.teller):
            return
        if len(self._pauses) >= _ASKED:
            self._pauses.clear()
        self._pauses[key] = _Pause(trio.current_time() + _ASK_S, pause.seconds)
        self._asking.add(told.origin)
        self._tasks.begin(self._ask, told)

    async def _ask(self, told: RemovalSum) -> None:
        seconds = self._pauses.get((told.teller, told.origin), _Pause()).seconds
        has_news = False
        try:
            since = told.since_ns - 1
            for _ in range(MOST // _PAGE + 1):  # more than it can have
                self.counters["removals_asked_for"] += 1
                asked = [_encode(_Since(told.origin, since))]
                found = await self._call(told.teller, ASK_REMOVED, asked, _ASK_S)
                stones = [_decoded(_stone, each) for each in parse_messages(found)]
                for each in filter(self._stones.is_news, stones):
                    self._wait_for(each)
                    has_news = True
                if len(stones) < _PAGE or len(self._waiting) >= _WAITING:
                    break
                since = max(stones[-1].removed_ns - 1, since + 1)
            if not has_news:
                self._tell_back(told)
        except KvfsError as error:
            log.debug("node %d does not tell what was removed: %s", told.teller, error)
        finally:
            self._asking.discard(told.origin)
            longer = min(max(2 * seconds, _ASK_AGAIN_S), _LONGEST_PAUSE_S)
            pause_s = _ASK_AGAIN_S if has_news else longer
            self._pauses[told.teller, told.origin] = _Pause(trio.current_time() + pause_s, pause_s)

    def _tell_back(self, told: RemovalSum) -> None:
        """Tells a node that knows fewer tombstones than this one, so that it asks for them."""
        numbers = self._stones.sum_of(told.origin, told.since_ns)
        if numbers[0] and numbers != (told.removals, told.sum):
            row = removal_sums.pack(RemovalSum(self._members.me, told.origin, told.hour, *numbers))
            self._outbox.tell_sum(told.teller, row)


def _decoded(decoder: "msgspec.msgpack.Decoder[Any]", raw: bytes) -> Any:
    try:
        return decoder.decode(raw)
    except UNDECODABLE as error:
        raise Corrupt(f"this is not what nodes tell each other of removals: {error}") from None
