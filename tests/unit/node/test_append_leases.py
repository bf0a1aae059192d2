"""Who may append to a file of several nodes: one at a time, as long as it lives."""

from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from kvfs.base.errors import Busy
from kvfs.meta import keys
from kvfs.node.append_leases import PATIENCE_S, AppendLeases
from tests.contract.memory_engine import MemoryEngine

INO = 1 << 48 | 7
Work = Callable[["Site"], Awaitable[None]]


class Site:
    """Two nodes on one engine; of `dead` ones what they took counts no more."""

    def __init__(self) -> None:
        self.dead = set[tuple[int, int]]()
        engine = MemoryEngine()

        def lives(node: int, incarnation: int) -> bool:
            return (node, incarnation) not in self.dead

        self.one, self.other = (
            AppendLeases(engine, node, 1, lives, lambda _ino: True) for node in (1, 2)
        )


def run(work: Work) -> None:
    async def main() -> None:
        site = Site()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(site.one.run)
            nursery.start_soon(site.other.run)
            await work(site)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_another_node_waits_and_is_refused_in_the_end() -> None:
    async def work(site: Site) -> None:
        await site.one.take(INO)
        before = trio.current_time()
        with pytest.raises(Busy):
            await site.other.take(INO)
        assert trio.current_time() - before == pytest.approx(PATIENCE_S)

    run(work)


def test_it_goes_on_when_the_last_of_the_other_node_has_closed() -> None:
    async def work(site: Site) -> None:
        taken = trio.Event()

        async def wait() -> None:
            await site.other.take(INO)
            taken.set()

        await site.one.take(INO)
        await site.one.take(INO)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            site.one.give_back(INO)
            await trio.sleep(2)
            assert not taken.is_set()
            site.one.give_back(INO)
            await trio.sleep(0.1)
            site.other.applied([keys.append_lease(INO)])
            await trio.sleep(0.1)
            assert taken.is_set()

    run(work)


def test_what_a_dead_node_had_is_taken() -> None:
    async def work(site: Site) -> None:
        await site.one.take(INO)
        site.dead.add((1, 1))
        await site.other.take(INO)
        site.one.give_back(INO)  # it does not take it from the other
        await trio.sleep(1)
        site.dead.clear()
        with pytest.raises(Busy):
            await site.one.take(INO)

    run(work)


def test_a_lease_that_is_given_back_can_be_taken_again_at_once() -> None:
    async def work(site: Site) -> None:
        for _ in range(3):
            await site.one.take(INO)
            site.one.give_back(INO)
        await trio.sleep(0.1)
        await site.other.take(INO)

    run(work)
