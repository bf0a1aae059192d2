"""A node goes by the record of the homes, and decides about it where it can."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from kvfs.base.errors import NoSpace
from kvfs.base.version import KNOWS_HOMES
from kvfs.holdings.home_map import HomeMap
from kvfs.meta.engine import Transaction
from kvfs.node.homes import home_record
from kvfs.node.homes.home_keeper import HomeKeeper
from tests.contract.memory_engine import MemoryEngine
from tests.jumping import run_jumping

NODES = (1, 2, 3)


class Jobs:
    """One claim for all nodes."""

    def __init__(self) -> None:
        self.taken_by: int | None = None

    def of(self, node: int) -> Any:
        async def take(_name: str) -> bool:
            self.taken_by = self.taken_by or node
            return self.taken_by == node

        async def drop(_name: str) -> None:
            self.taken_by = None

        return SimpleNamespace(take=take, drop=drop, check=lambda _t, _name: None)


class Known:
    """What a node knows of homes, and of how many names there are."""

    def __init__(self) -> None:
        self.map: HomeMap | None = None
        self.names: int | None = 100
        self.has_memory = True

    def adopt(self, homes: HomeMap | None) -> None:
        if not self.has_memory:
            raise NoSpace("there is no memory for a table")
        self.map = homes


class Cluster:
    """Keepers over one engine."""

    def __init__(self) -> None:
        self.engine = MemoryEngine()
        self.jobs = Jobs()
        self.protocols = dict.fromkeys(NODES, KNOWS_HOMES)
        self.known = {number: Known() for number in NODES}
        self.keepers = {number: self._keeper(number) for number in NODES}

    def _keeper(self, number: int) -> HomeKeeper:
        member: Any = SimpleNamespace(node=number, roster=SimpleNamespace(all=self._members))
        known: Any = self.known[number]
        exchange: Any = SimpleNamespace(changes=0)
        engine: Any = self.engine
        return HomeKeeper(engine, member, self.jobs.of(number), known, exchange, 50)

    def _members(self) -> list[Any]:
        return [
            SimpleNamespace(number=number, zone="", alive=True, protocol=protocol)
            for number, protocol in self.protocols.items()
        ]

    async def zones(self) -> dict[int, str]:
        return (await self.engine.read(home_record.read)).zones


def run(scene: Callable[[Cluster], Any]) -> None:
    async def main() -> None:
        await scene(Cluster())

    run_jumping(main)


def test_a_record_is_gone_by_once_there_is_memory_for_it() -> None:
    async def scene(cluster: Cluster) -> None:
        await cluster.keepers[1].decide()
        known = cluster.known[2]
        known.has_memory = False
        for _ in range(2):
            with pytest.raises(NoSpace):
                await cluster.keepers[2].look()
        known.has_memory = True
        await cluster.keepers[2].look()
        assert known.map is not None
        assert set(known.map.zones) == set(NODES)

    run(scene)


def test_the_node_that_decided_leaves_that_to_others_when_it_is_a_home_of_no_range() -> None:
    async def scene(cluster: Cluster) -> None:
        await cluster.keepers[1].decide()
        assert set(await cluster.zones()) == set(NODES)

        def without_it(t: Transaction) -> None:
            home_record.replace(t, {2: "", 3: ""})

        await cluster.engine.transact(without_it)
        for number in NODES:
            await cluster.keepers[number].look()
            cluster.known[number].names = 10
        cluster.known[1].names = None
        for number in NODES:
            await cluster.keepers[number].decide()
        assert await cluster.zones() == {}

    run(scene)


def test_there_are_no_homes_where_a_node_does_not_know_them() -> None:
    async def scene(cluster: Cluster) -> None:
        cluster.protocols[3] = KNOWS_HOMES - 1
        await cluster.keepers[1].decide()
        assert await cluster.zones() == {}
        cluster.protocols[3] = KNOWS_HOMES
        await cluster.keepers[1].decide()
        assert set(await cluster.zones()) == set(NODES)

    run(scene)


def test_a_record_that_another_node_changed_is_gone_by_at_once() -> None:
    async def scene(cluster: Cluster) -> None:
        keeper, known = cluster.keepers[2], cluster.known[2]
        cluster.known[2].names = None  # it cannot decide
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keeper.run)
            await trio.sleep(0.1)
            assert known.map is None
            await cluster.keepers[1].decide()
            began = trio.current_time()
            keeper.changed()
            await trio.testing.wait_all_tasks_blocked()
            assert known.map is not None
            assert trio.current_time() == began
            nursery.cancel_scope.cancel()

    run(scene)


def test_a_record_is_found_though_nobody_tells_of_it() -> None:
    """A replica that is read anew tells of no single change."""

    async def scene(cluster: Cluster) -> None:
        keeper, known = cluster.keepers[2], cluster.known[2]
        known.names = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keeper.run)
            await trio.sleep(0.1)
            await cluster.keepers[1].decide()
            await trio.sleep(10)
            assert known.map is not None
            nursery.cancel_scope.cancel()

    run(scene)
