"""Tells other nodes what this one holds, and passes on what they tell.

A change goes to the others once it is due (`Announcer.due_s`): at once after a rest, where files
keep the names under which they are closed; under load with those of the next 50 ms, or half a
second among a thousand nodes. Among many nodes it goes along
a tree (`kvfs.holdings.dissemination_tree`), with those of other origins that go the same way; where
there are homes, along theirs, to each node only what belongs to it and to those below it
(`kvfs.holdings.home_map`). Nothing is acknowledged: each row says which changes of its origin it
covers, so whoever finds a gap asks the origin for what it lacks, as does a node that started a
moment ago (`kvfs.node.homes`).
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import trio
import trio.lowlevel

from kvfs.base.background import Background
from kvfs.base.errors import Corrupt, Unavailable
from kvfs.cluster.handshake import Party
from kvfs.holdings import delta_batch, delta_codec
from kvfs.holdings.answers import answer
from kvfs.holdings.delta_batch import DeltaBatch
from kvfs.holdings.home_map import HomeMap, Share
from kvfs.holdings.messages import Deltas, HoldingsAsk
from kvfs.holdings.own_set import OwnSet
from kvfs.node.homes.known_holders import KnownHolders
from kvfs.node.names.name_members import NameMembers
from kvfs.node.names.name_protocol import parse_messages
from kvfs.node.names.peer_outbox import LATER_S, PeerOutbox

_HEARTBEAT_S: Final = 1.0
"""Time after which the others are told where this node's changes have come to, without any: so who
started, or was away, asks for what it lacks."""


class NameExchange:
    """The exchange of one node."""

    def __init__(
        self,
        own: Sequence[OwnSet],
        known: KnownHolders,
        members: NameMembers,
        outbox: PeerOutbox,
        flush: Callable[[], None],
        due_s: Callable[[], float],
    ) -> None:
        """`own`: the sets of this node, that of the names that it holds first. `known` takes what
        others tell. `flush` brings the own set up to date, with what is due; `due_s`: in how many
        seconds something is."""
        self._own = own[0]
        self._owns = {each.store: each for each in own}
        self._flush = flush
        self._due_s = due_s
        self._known = known
        self._members = members
        self._outbox = outbox
        self._told = {each.store: each.sequence for each in own}
        self._changed = trio.Event()
        self._tasks = Background()
        self._ways: dict[tuple[int, int], list[tuple[int, Share]]] = {}
        """By the number of a map and an origin, where that goes on to; since the last look."""
        self._away: dict[int, frozenset[int]] = {}
        """By the number of a map, the homes that are away; likewise."""
        self._counters = {"name_deltas_received": 0, "name_changes_told": 0}

    def changed(self) -> None:
        """Notes that this node's own set has changed."""
        self._changed.set()

    async def run(self) -> None:
        """Exchanges, until cancelled."""
        self._look()
        await self._tasks.run(self._keep_up, self._known.run, self._tell)

    def told(self, encoded: bytes) -> None:
        """Takes changes that another node tells or passes on. Raises Corrupt."""
        members = self._members
        batch = delta_batch.decode(encoded).told_of(
            lambda origin: members.node_of(origin) not in (None, members.me)
        )
        self._counters["name_deltas_received"] += len(batch)
        self._counters["name_changes_told"] += int(batch.changes.sum())
        self._pass_on(batch)
        self._known.take(batch)

    async def asked(self, _peer: Party, params: Any) -> list[bytes]:
        """Handles the request `ask-names`. Raises Invalid, Corrupt, Unavailable."""
        (raw,) = parse_messages(params, 1)
        ask = delta_codec.decode(raw)
        if not isinstance(ask, HoldingsAsk):
            raise Corrupt("a node tells where it should ask")
        own = self._owns.get(ask.store)
        if own is None:
            raise Unavailable("another node is meant")
        told: list[bytes] = []
        for message in answer(own, ask):
            told.append(delta_codec.encode(message))
            await trio.lowlevel.checkpoint()
        return told

    def report(self) -> dict[str, Any]:
        """Returns the part of the node's status."""
        return {"own": len(self._own), "members": len(self._members), **self._known.report()}

    @property
    def changes(self) -> int:
        """Changes that this node and others told, since the start."""
        own = sum(each.sequence for each in self._owns.values())
        return self._counters["name_changes_told"] + own

    @property
    def counters(self) -> dict[str, int]:
        """Counters since the start."""
        return {**self._counters, "name_repairs": self._known.repairs}

    # ---- inside

    async def _tell(self) -> None:
        while True:
            with trio.move_on_after(_HEARTBEAT_S):
                await self._changed.wait()
                if not self._has_untold():
                    await trio.sleep(self._due_s())
            self._changed = trio.Event()
            self._flush()
            for each in [each for own in self._owns.values() for each in self._news(own)]:
                self._tell_all(delta_batch.of_messages([each]))
            await trio.sleep(self._members.interval_s())

    def _has_untold(self) -> bool:
        """Returns whether a set has changes that others are to be told of."""
        return any(own.sequence != self._told[store] for store, own in self._owns.items())

    def _tell_all(self, news: DeltaBatch) -> None:
        """Tells other nodes what is new here: all of it, or what belongs to homes."""
        homes, me = self._known.map, self._members.me
        if homes is not None and me in homes.zones:
            for node, ranges in self._ways_of(homes, me):
                part = news.within([ranges], homes.number)
                self._outbox.tell(node, delta_batch.packed(part), _within_s(part))
            return
        packed, within_s = delta_batch.packed(news), _within_s(news)
        for node in self._members.children(me):
            self._outbox.tell(node, packed, within_s)

    def _pass_on(self, batch: DeltaBatch) -> None:
        """Passes rows on to those that hear of their origins by this node. What goes by a map that
        is not known here, perhaps not yet, goes no further: it has what belongs to nodes below this
        one by that map, and who is that is not known. They find the gap, and ask the origins."""
        if batch.map_number:
            homes = self._known.map_of(batch.map_number)
            if homes is not None:
                self._pass_to_homes(batch, homes)
            return
        for nodes, rows in batch.divided(self._members.children_of):
            if nodes:
                news, within_s = delta_batch.packed(rows), _within_s(rows)
                for node in nodes:
                    self._outbox.tell(node, news, within_s)

    def _pass_to_homes(self, batch: DeltaBatch, homes: HomeMap) -> None:
        ways: dict[int, tuple[list[int], list[Share]]] = {}
        for line, origin in enumerate(batch.stores.tolist()):
            node = self._members.node_of(origin)
            if node in homes.zones:
                for child, ranges in self._ways_of(homes, node):
                    lines, shares = ways.setdefault(child, ([], []))
                    lines.append(line)
                    shares.append(ranges)
        for child, (lines, shares) in ways.items():
            part = batch.at(lines).within(shares, homes.number)
            self._outbox.tell(child, delta_batch.packed(part), _within_s(part))

    def _ways_of(self, homes: HomeMap, node: int) -> list[tuple[int, Share]]:
        found = self._ways.get((homes.number, node))
        if found is None:
            found = homes.children(node, self._members.me, self._away_of(homes))
            self._ways[homes.number, node] = found
        return found

    def _away_of(self, homes: HomeMap) -> frozenset[int]:
        """Returns the homes that are members no more, or do not live."""
        found = self._away.get(homes.number)
        if found is None:
            members = self._members
            away = (each for each in homes.zones if each != members.me and not members.lives(each))
            found = self._away[homes.number] = frozenset(away)
        return found

    def _news(self, own: OwnSet) -> list[Deltas]:
        """Returns what others are to be told now of a set: at least where it has come to."""
        found: list[Deltas] = []
        while True:
            deltas = own.deltas_since(self._told[own.store])
            if deltas is None:  # too many at once: the others ask
                self._told[own.store] = own.sequence
                continue
            found.append(deltas)
            self._told[own.store] = deltas.last
            if deltas.last >= own.sequence:
                return found

    async def _keep_up(self) -> None:
        while True:
            self._look()
            await trio.sleep(_HEARTBEAT_S)

    def _look(self) -> None:
        gone = self._members.look()
        self._ways.clear()
        self._away.clear()
        for each in gone:
            self._known.forget(each)
            self._outbox.forget(each)


def _within_s(batch: DeltaBatch) -> float:
    """Returns the time within which rows are to be told: those without changes, which say where
    origins have come to, are no hurry."""
    return 0.0 if batch.changes.any() else LATER_S
