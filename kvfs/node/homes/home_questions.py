"""Asks homes who holds names of which this node does not know it: all names of a look-up together,
each home by one request.

| the home asked first | then |
|---|---|
| tells all | that is believed: for `_FRESH_S` by look-ups, for `_KEPT_S` that nobody had a name |
| tells a part, or is none | the other home is asked; both parts count if that knows no more |
| does not answer within `_DEADLINE_S` | the other home is asked; this one rests for a moment |
| rests, or is dead | it is not asked |

Invariants
- A look-up ends after two deadlines at most. Where no home knows all, the parts of all
  count, and of this node's own: without any it is a miss, which is counted.
- What is remembered is bounded, in names and in holders.
"""

import logging
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import trio

from kvfs.base.errors import KvfsError, Unavailable
from kvfs.cluster.handshake import Party
from kvfs.holdings.fingerprints import RANGES
from kvfs.holdings.home_map import HOMES
from kvfs.node.homes import home_protocol
from kvfs.node.homes.home_protocol import MOST_ASKED, ToldHolders
from kvfs.node.homes.known_holders import KnownHolders
from kvfs.node.names.name_members import NameMembers
from kvfs.node.names.name_protocol import ASK_HOMES, Call
from kvfs.policy import rendezvous

log = logging.getLogger(__name__)
_DEADLINE_S: Final = 0.5
_FRESH_S: Final = 0.5
"""Time for which look-ups believe an answer: about as long as news takes among nodes that know
all."""
_KEPT_S: Final = 30.0
"""Time for which it is believed that nobody had a name, where that a node has it since would only
cost a removal that is told to nobody: as long as a temporary name may have before its file gets
another."""
_MOST_KEPT: Final = 65_536
_MOST_HOLDERS: Final = 1 << 21
"""Holders of all names that are remembered: 4 MB."""
_REST_S: Final = 1.0
_REQUESTS: Final = 64
"""Requests at a time."""
_LAGGED_S: Final = 60.0


class _Answer(NamedTuple):
    """The answer to a question about a name."""

    at: float
    holders: "array[int]"
    is_known: bool
    """Whether a home knew all."""
    most: int
    """Holders that were asked for."""


class _LookUp:
    """The questions of one look-up."""

    __slots__ = ("left", "most", "parts", "tried")

    def __init__(self, most: int) -> None:
        self.most = most
        """Holders that are asked for."""
        self.tried: dict[int, int] = {}
        """The home that was asked first of each name."""
        self.left: list[int] = []
        """Names of which those that were asked now did not tell all."""
        self.parts: dict[int, list[int]] = {}
        """Their holders, as far as they told."""


class HomeQuestions:
    """The questions of one node, and its answers to those of others."""

    def __init__(
        self,
        known: KnownHolders,
        members: NameMembers,
        call: Call,
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        self._known = known
        self._members = members
        self._call = call
        self._clock = clock
        self._kept: OrderedDict[int, _Answer] = OrderedDict()
        self._kept_holders = 0
        """Holders in all of these."""
        self._rests: dict[int, float] = {}
        """Homes that did not answer, and until when they are not asked."""
        self._lagged: dict[int, float] = {}
        """Nodes of which a home lacked something, and when."""
        self._slots = trio.Semaphore(_REQUESTS)
        self.counters = {
            "home_requests": 0,
            "home_questions": 0,
            "home_questions_unanswered": 0,
            "home_names_told": 0,
        }

    # ---- asking

    async def learn(self, fingerprints: Iterable[int], most: int = 8) -> None:
        """Has it known, for a moment, who holds these names; whether or not homes answer."""
        asked = unknown = [
            each
            for each in dict.fromkeys(fingerprints)
            if self._fresh(each, most) is None and self._known.holders_of(each) is None
        ]
        look_up = _LookUp(most)
        for _ in range(HOMES):
            if unknown:
                unknown = await self._ask_all(unknown, look_up)
        now = self._clock()
        if look_up.tried:  # what the first home told stands while the last is asked
            for each in asked:
                if (kept := self._kept.get(each)) is not None:
                    self._keep(each, kept._replace(at=now))
        for each in unknown:
            parts = look_up.parts.get(each, []) + self._known.part_of(each, most)
            holders = array("H", dict.fromkeys(parts))[:most]
            self._keep(each, _Answer(now, holders, False, most))
            self.counters["home_questions_unanswered"] += not holders

    def holders_of(self, fingerprint: int, most: int = 8) -> list[int] | None:
        """Returns up to `most` of the other nodes that say they hold a name: those known here, or
        told by a home a moment ago; None: neither."""
        found = self._known.holders_of(fingerprint, most)
        if found is None:
            kept = self._fresh(fingerprint, most)
            return None if kept is None else kept.holders.tolist()
        return found

    def is_known(self, fingerprint: int) -> bool:
        """Returns whether what `holders_of` returns is of one that knew."""
        if self._known.holders_of(fingerprint) is not None:
            return True
        kept = self._kept.get(fingerprint)
        return kept is not None and kept.is_known

    def may_be_held(self, fingerprint: int) -> bool:
        """Returns whether other nodes may hold a name, as far as is known or was told of late."""
        found = self._known.holders_of(fingerprint)
        if found is None:
            kept = self._kept.get(fingerprint)
            is_told = kept is not None and kept.is_known and self._clock() < kept.at + _KEPT_S
            return not is_told or kept is None or bool(kept.holders)
        return bool(found)

    def has_lagged(self, node: int) -> bool:
        """Returns whether a home lacked something of a node of late."""
        at = self._lagged.get(node)
        return at is not None and self._clock() < at + _LAGGED_S

    # ---- being asked

    async def asked(self, _peer: Party, params: Any) -> ToldHolders:
        """Handles the request `ask-homes`. Raises Invalid."""
        fingerprints, most = home_protocol.parse_asked(params)
        self.counters["home_names_told"] += len(fingerprints)
        found = self._known.tell(fingerprints, most)
        return home_protocol.pack_told(found, self._known.lagging_nodes())

    # ---- inside

    def _fresh(self, fingerprint: int, most: int) -> _Answer | None:
        kept = self._kept.get(fingerprint)
        if kept is None or kept.most < most or self._clock() >= kept.at + _FRESH_S:
            return None
        return kept

    def _keep(self, fingerprint: int, told: _Answer) -> None:
        before = self._kept.pop(fingerprint, None)
        if before is not None:
            self._kept_holders -= len(before.holders)
        self._kept[fingerprint] = told
        self._kept_holders += len(told.holders)
        while len(self._kept) > _MOST_KEPT or self._kept_holders > _MOST_HOLDERS:
            _, oldest = self._kept.popitem(last=False)
            self._kept_holders -= len(oldest.holders)

    async def _ask_all(self, wanted: Sequence[int], look_up: _LookUp) -> list[int]:
        """Asks of each its first home, or the other one if that was tried; returns those of which
        it did not know all."""
        by_home: dict[int, list[int]] = {}
        left: list[int] = []
        tried = look_up.tried
        for each in wanted:
            homes = [home for home in self._homes_of(each % RANGES) if home != tried.get(each)]
            if homes:
                tried[each] = homes[0]
                by_home.setdefault(homes[0], []).append(each)
            else:
                left.append(each)
        look_up.left = left
        if len(by_home) == 1 and len(wanted) <= MOST_ASKED:
            ((home, those),) = by_home.items()
            await self._ask(home, those, look_up)
            return left
        async with trio.open_nursery() as nursery:
            for home, those in by_home.items():
                for start in range(0, len(those), MOST_ASKED):
                    part = those[start : start + MOST_ASKED]
                    nursery.start_soon(self._ask, home, part, look_up)
        return left

    def _homes_of(self, range_: int) -> list[int]:
        """Returns the other homes of a range that live and do not rest, in the order in which this
        node asks them: those of its zone first, and among equals each node its own."""
        homes, me = self._known.asked_map, self._members.me
        if homes is None:
            return []
        zone = homes.zones.get(me)
        awake = [
            each
            for each in homes.homes_of(range_)
            if self._members.lives(each) and not self._is_resting(each)
        ]
        return sorted(awake, key=lambda home: (homes.zones[home] != zone, rendezvous.mix(me, home)))

    def _is_resting(self, home: int) -> bool:
        return self._clock() < self._rests.get(home, 0.0)

    async def _ask(self, home: int, those: list[int], look_up: _LookUp) -> None:
        """Asks one home; notes what it tells."""
        params = home_protocol.pack_asked(those, look_up.most)
        try:
            answer = await self._request(home, params, len(those))
            found, lagging = home_protocol.parse_told(answer, len(those))
        except KvfsError as error:
            log.debug("home %d does not tell who holds names: %s", home, error)
            look_up.left.extend(those)
            return
        now, me = self._clock(), self._members.me
        for node in lagging:
            if node in self._members:
                self._lagged[node] = now
        for each, told in zip(those, found, strict=True):
            others = [node for node in told.holders if self._members.node_of(node) != me]
            if told.is_all:
                self._keep(each, _Answer(now, array("H", others), True, look_up.most))
            else:
                look_up.left.append(each)
                look_up.parts.setdefault(each, []).extend(others)

    async def _request(self, home: int, params: Any, count: int) -> Any:
        """Returns what a home answers within `_DEADLINE_S`, in which it waits for its turn too: one
        that did not answer others meanwhile is not asked. Raises KvfsError."""
        until = trio.current_time() + _DEADLINE_S
        with trio.move_on_at(until) as waiting:
            await self._slots.acquire()
        if waiting.cancelled_caught:
            raise Unavailable("too much is asked at a time")
        try:
            left_s = until - trio.current_time()
            if self._is_resting(home) or left_s <= 0:
                raise Unavailable("it did not answer a moment ago, or was not asked in time")
            self.counters["home_requests"] += 1
            self.counters["home_questions"] += count
            try:
                return await self._call(home, ASK_HOMES, params, left_s)
            except KvfsError:
                if left_s > _DEADLINE_S / 2:  # else it may have had too little time
                    self._rests[home] = self._clock() + _REST_S
                raise
        finally:
            self._slots.release()
