"""Names of a cache while the engine is not heard: whoever looks one up waits for an engine that
answers, and waits no second time for one that does not."""

import pytest
import trio
import trio.testing

from kvfs.base.clock import now
from kvfs.base.errors import Unreached
from kvfs.cluster.coherence import CACHE_S, Coherence
from kvfs.meta.records import Namespace, namespace_root
from tests.jumping import jumping_clock

CACHE = Namespace(name=b"cache", kind="cache")
DIRECTORY = namespace_root(1)
LONG_AGO_S = 10 * CACHE_S


class Silent:
    """A replica that did not hear the engine for long."""

    def __init__(self) -> None:
        self.at = now() - LONG_AGO_S
        self.waited = 0
        self.closed_at = 0.0
        self.is_away = False
        self._heard = trio.lowlevel.ParkingLot()

    def hear(self, at: float) -> None:
        """The engine has answered what it was asked at this time."""
        self.at = at
        self._heard.unpark_all()

    def heard_at(self, _namespace_id: int = 0) -> float:
        return self.at

    async def until_heard_again(self, _namespace_id: int) -> None:
        self.waited += 1
        if not self.is_away:
            await self._heard.park()

    def is_alone(self, _name: bytes, _ino: int) -> bool:
        return False

    def closed_alone_at(self, _ino: int) -> float:
        return self.closed_at

    async def catch_up(self, _namespace_id: int = 0) -> None:
        raise AssertionError("a cache asks nothing")

    async def fresh(self, _namespace_id: int) -> None:
        raise AssertionError("a cache asks nothing")

    def namespace(self, _number: int) -> Namespace:
        return CACHE

    def is_local(self, _number: int) -> bool:
        return False

    def is_whole(self, _namespace_id: int) -> bool:
        return True


def test_a_node_that_did_not_run_hears_the_engine_before_it_misses() -> None:
    replica = Silent()
    coherence = Coherence(replica)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(coherence.fresh, DIRECTORY)
            await trio.testing.wait_all_tasks_blocked()
            replica.hear(replica.at + 1)  # the answer that had come before it was stopped
            await trio.testing.wait_all_tasks_blocked()
            replica.hear(now())
        assert replica.waited == 2
        await coherence.fresh(DIRECTORY)
        assert replica.waited == 2

    trio.run(main, clock=trio.testing.MockClock())


def test_an_engine_that_is_silent_is_waited_for_once() -> None:
    replica = Silent()
    coherence = Coherence(replica)

    async def main() -> None:
        for _ in range(3):
            with pytest.raises(Unreached):
                await coherence.fresh(DIRECTORY)
        assert replica.waited == 1
        replica.hear(now() - LONG_AGO_S)
        with pytest.raises(Unreached):
            await coherence.fresh(DIRECTORY)
        assert replica.waited == 2

    with jumping_clock() as clock:
        trio.run(main, clock=clock)


def test_an_engine_that_is_away_is_not_waited_for() -> None:
    replica = Silent()
    replica.is_away = True

    async def main() -> None:
        with pytest.raises(Unreached):
            await Coherence(replica).fresh(DIRECTORY)

    trio.run(main, clock=trio.testing.MockClock())
    assert replica.waited == 1


def test_a_file_that_nobody_else_knows_of_is_read_for_as_long_as_a_cache_may_lag() -> None:
    replica = Silent()
    coherence = Coherence(replica)
    coherence.check_content(DIRECTORY + 1)  # others know of it: it was found while they were heard
    replica.closed_at = now()
    coherence.check_content(DIRECTORY + 1)
    replica.closed_at -= 2 * CACHE_S
    with pytest.raises(Unreached):
        coherence.check_content(DIRECTORY + 1)
    replica.at = now()
    coherence.check_content(DIRECTORY + 1)
