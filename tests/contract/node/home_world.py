"""Several nodes that know who holds which name by homes, in one process and in simulated time: all
of it is real but the network, the leases and the record of the homes."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import trio

from kvfs.base.errors import NoSpace, Unavailable
from kvfs.cluster.handshake import Party
from kvfs.holdings.fingerprints import U64, gathered
from kvfs.holdings.holder_table import HolderTable
from kvfs.holdings.home_map import HomeMap
from kvfs.holdings.own_set import OwnSet
from kvfs.node.homes.home_questions import HomeQuestions
from kvfs.node.homes.known_holders import KnownHolders
from kvfs.node.names.name_exchange import NameExchange
from kvfs.node.names.name_members import NameMembers
from kvfs.node.names.name_protocol import ASK, TELL, News
from kvfs.node.names.peer_outbox import PeerOutbox

LATENCY_S = 0.001


class HomeNode:
    """One node's part."""

    def __init__(self, world: "HomeWorld", number: int) -> None:
        self.world, self.number = world, number
        self.held: set[int] = set()
        self.own = OwnSet.open(world.directory / str(number), number, 1, 1 << 13)
        self.own.mark_filled()
        self.members = NameMembers(number, world.members)
        call = partial(world.call, number)
        self.known = KnownHolders(world.make_table, [self.own], self.members, call)
        self.outbox = PeerOutbox(call, self.members.interval_s, self.hear)
        self.questions = HomeQuestions(self.known, self.members, call)
        self.exchange = NameExchange(
            *([self.own], self.known, self.members, self.outbox),
            *(lambda: None, lambda: 0.0),
        )
        self.told_bytes = 0
        self.scope = trio.CancelScope()

    async def run(self) -> None:
        with self.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.outbox.run)
                nursery.start_soon(self.exchange.run)

    def hold(self, fingerprints: Iterable[int]) -> None:
        new = set(fingerprints) - self.held
        self.held |= new
        self.own.add(gathered(sorted(new)))
        self.exchange.changed()

    def drop(self, fingerprints: Iterable[int]) -> None:
        gone = set(fingerprints) & self.held
        self.held -= gone
        self.own.remove(gathered(sorted(gone)))
        self.exchange.changed()

    async def hear(self, news: News) -> None:
        self.told_bytes += len(news.deltas)
        if news.deltas:
            self.exchange.told(news.deltas)

    async def find(self, fingerprints: Iterable[int]) -> dict[int, set[int]]:
        """Who is said to hold each, as a look-up learns it."""
        wanted = list(fingerprints)
        await self.questions.learn(wanted)
        return {each: set(self.questions.holders_of(each) or ()) for each in wanted}


class HomeWorld:
    """All nodes, and what lies between them."""

    def __init__(self, directory: Path, nursery: trio.Nursery) -> None:
        self.directory = directory
        self.nursery = nursery
        self.nodes: dict[int, HomeNode] = {}
        self.dead: set[int] = set()
        """Those whose lease has ended."""
        self.silent: set[int] = set()
        """Those that do not answer."""
        self.mute: set[int] = set()
        """Those that do not tell what they hold."""
        self.calls: list[tuple[int, int, str]] = []
        self.has_memory = True
        """Whether nodes can have further tables."""
        self._number = 0

    def make_table(self, is_turned: bool) -> HolderTable:
        if not self.has_memory:
            raise NoSpace("there is no memory for a table")
        return HolderTable(0, is_turned=is_turned)

    def members(self) -> list[tuple[int, bool]]:
        return [(number, number not in self.dead) for number in self.nodes]

    def start(self, number: int) -> HomeNode:
        node = self.nodes[number] = HomeNode(self, number)
        self.nursery.start_soon(node.run)
        return node

    def kill(self, number: int) -> None:
        """At once, with its lease's end."""
        self.silent.add(number)
        self.dead.add(number)
        self.nodes[number].scope.cancel()
        self.nodes[number].own.close()

    def restart(self, number: int) -> HomeNode:
        """It comes back with what it held."""
        held = self.nodes[number].held
        node = self.start(number)
        node.held = held
        self.silent.discard(number)
        self.dead.discard(number)
        return node

    def make_homes(self, numbers: Iterable[int], adopting: Iterable[int] | None = None) -> None:
        """As the record says from now on; without any, each node knows all. `adopting`: the nodes
        that have seen it."""
        self._number += 1
        zones = dict.fromkeys(numbers, "")
        self.homes = HomeMap(self._number, zones) if zones else None
        for number in self.nodes if adopting is None else adopting:
            self.adopt(number)

    def adopt(self, number: int) -> None:
        if number not in self.dead:
            self.nodes[number].known.adopt(self.homes)

    async def call(self, me: int, node: int, method: str, params: Any, deadline_s: float) -> Any:
        self.calls.append((me, node, method))
        target = self.nodes[node]
        await trio.sleep(LATENCY_S)
        is_mute = method == ASK and node in self.mute
        if is_mute or node in self.silent or me in self.silent:
            await trio.sleep(deadline_s)
            raise Unavailable("it does not answer")
        if method == TELL:
            await target.hear(params)
            return target.outbox.answer(me)
        nobody: Any = Party("c", me, 1, "n")
        asked = target.exchange.asked if method == ASK else target.questions.asked
        return await asked(nobody, params)

    def truth(self, me: int) -> dict[int, set[int]]:
        """Who holds what, but for one node."""
        found: dict[int, set[int]] = {}
        for number, node in self.nodes.items():
            for each in node.held if number != me and number not in self.dead else ():
                found.setdefault(each, set()).add(number)
        return found

    async def assert_found(self, absent: U64) -> None:
        """Each living node finds of each name its living holders, and of others none."""
        for number in set(self.nodes) - self.dead:
            truth = self.truth(number)
            found = await self.nodes[number].find([*truth, *absent.tolist()])
            for each, holders in found.items():
                living = holders - self.dead
                assert living == truth.get(each, set()), f"node {number}, name {each:#x}"
