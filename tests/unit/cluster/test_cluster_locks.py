"""Locks of several nodes on one engine."""

import os
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from gateway.holder.mount_journal import MountJournal
from kvfs.base.errors import Conflict, NoLocks, Unavailable
from kvfs.cluster.cluster_locks import Locks, LockTarget
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Namespace, namespace_root, pack, unpack_namespace
from kvfs.policy.byte_range_locks import LAST, ByteRangeLock
from kvfs.policy.lock_journal import JournaledLock
from kvfs.tree import namespaces
from tests.contract.memory_engine import MemoryEngine

DEADLINE_S = 30


class _Engine(MemoryEngine):
    def namespace(self, number: int) -> Namespace | None:
        value = self.read_now(lambda t: t.get(keys.namespace(number)))
        return None if value is None else unpack_namespace(value)


class Cluster:
    """Nodes that hear at once of what others did; some may be dead."""

    def __init__(self, reach: str) -> None:
        self.engine = _Engine()
        self.alive = {1: 1, 2: 1}
        self.unreachable = False

        def begin(t: Transaction) -> int:
            namespaces.format(t, 1, 0, 0)
            number = namespaces.create(t, b"x", uid=0, gid=0, now=1)
            record = namespaces.get(t, number)
            record.locks = reach
            t.put(keys.namespace(number), pack(record))
            return number

        number = self.engine.transact_now(begin)
        self.ino = namespace_root(number) + 5
        self.one, self.two = self.node(1), self.node(2)

    def node(self, number: int) -> Locks:
        return Locks(self.engine, number, self.alive[number], self.is_alive, self.catch_up)

    def is_alive(self, node: int, incarnation: int) -> bool:
        return self.alive.get(node) == incarnation

    async def catch_up(self, _namespace_id: int) -> None:
        if self.unreachable:
            raise Unavailable("no engine")

    def ranges(self) -> LockTarget:
        return LockTarget(self.ino, False)

    def whole(self) -> LockTarget:
        return LockTarget(self.ino, True)

    def heard(self, locks: Locks) -> None:
        locks.applied([keys.locks(self.ino, False), keys.locks(self.ino, True)])


@pytest.fixture(params=["host", "cluster"])
def reach(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def wish(
    locks: Locks, number: int, *, exclusive: bool = True, start: int = 0, end: int = LAST
) -> ByteRangeLock:
    return ByteRangeLock(locks.owner(number), exclusive, start, end, pid=number)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        with trio.fail_after(DEADLINE_S):
            await test()

    trio.run(within)


@pytest.mark.parametrize("hears", [True, False])
def test_who_lost_a_lock_while_its_node_counted_as_dead_is_told_once(hears: bool) -> None:
    cluster = Cluster("cluster")
    one, two, place = cluster.one, cluster.two, cluster.ranges()

    async def test() -> None:
        for number in (1, 2):
            await one.acquire(place, wish(one, number, start=number, end=number), wait=False)
        del cluster.alive[1]
        await two.acquire(place, wish(two, 1), wait=False)
        await two.release(place, two.owner(1))
        cluster.alive[1] = 1
        if hears:
            cluster.heard(one)
            cluster.heard(one)
            assert one.counters["locks_lost"] == 2
        with pytest.raises(NoLocks, match="went to another"):
            await one.acquire(place, wish(one, 1, start=1, end=1), wait=False)
        await one.acquire(place, wish(one, 1, start=1, end=1), wait=False)
        await one.closed(place, one.owner(2))
        await one.acquire(place, wish(one, 2, start=2, end=2), wait=False)
        await one.release(place, one.owner(1))
        assert one.counters["locks_lost"] == (2 if hears else 1), "who closed is not asked about"

    run(test)


def test_a_lock_that_nobody_asked_for_is_not_lost_with_the_lease() -> None:
    cluster = Cluster("cluster")
    one, place = cluster.one, cluster.whole()

    async def test() -> None:
        await one.acquire(place, wish(one, 1), wait=False)
        del cluster.alive[1]
        cluster.alive[1] = 1
        cluster.heard(one)
        await one.release(place, one.owner(1))
        assert one.counters["locks_lost"] == 0

    run(test)


def test_of_two_processes_of_one_host_one_has_it(reach: str) -> None:
    cluster = Cluster(reach)

    async def test() -> None:
        one = cluster.one
        await one.acquire(cluster.ranges(), wish(one, 1, end=9), wait=False)
        with pytest.raises(Conflict):
            await one.acquire(cluster.ranges(), wish(one, 2, start=9), wait=False)
        await one.acquire(cluster.ranges(), wish(one, 2, start=10), wait=False)
        found = await one.obstacle(cluster.ranges(), wish(one, 2))
        assert found is not None
        assert (found.start, found.end, found.pid) == (0, 9, 1)
        await one.closed(cluster.ranges(), one.owner(1))
        await one.acquire(cluster.ranges(), wish(one, 2), wait=False)

    run(test)


def test_flock_and_ranges_do_not_see_each_other(reach: str) -> None:
    cluster = Cluster(reach)

    async def test() -> None:
        one = cluster.one
        await one.acquire(cluster.ranges(), wish(one, 1), wait=False)
        await one.acquire(cluster.whole(), wish(one, 2), wait=False)

    run(test)


def test_the_clusters_locks_are_seen_on_every_node() -> None:
    cluster = Cluster("cluster")

    async def test() -> None:
        one, two = cluster.one, cluster.two
        await one.acquire(cluster.whole(), wish(one, 1), wait=False)
        # The same number as another node's kernel gives: another owner.
        with pytest.raises(Conflict):
            await two.acquire(cluster.whole(), wish(two, 1), wait=False)
        found = await two.obstacle(cluster.whole(), wish(two, 1))
        assert found is not None
        assert found.owner == one.owner(1)
        await one.release(cluster.whole(), one.owner(1))
        await two.acquire(cluster.whole(), wish(two, 1), wait=False)

    run(test)


def test_who_waits_has_it_when_the_other_host_gives_it_back() -> None:
    cluster = Cluster("cluster")

    async def test() -> None:
        one, two = cluster.one, cluster.two
        await one.acquire(cluster.ranges(), wish(one, 1), wait=False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: two.acquire(cluster.ranges(), wish(two, 1), wait=True))
            await trio.testing.wait_all_tasks_blocked()
            await one.release(cluster.ranges(), one.owner(1))
            cluster.heard(two)

    run(test)


def test_a_dead_nodes_locks_are_void_also_when_it_is_started_again() -> None:
    cluster = Cluster("cluster")

    async def test() -> None:
        one, two = cluster.one, cluster.two
        await one.acquire(cluster.whole(), wish(one, 1), wait=False)
        cluster.alive[1] = 2
        await two.acquire(cluster.whole(), wish(two, 1), wait=False)
        with pytest.raises(Conflict):
            await cluster.node(1).acquire(cluster.whole(), wish(cluster.node(1), 1), wait=False)

    run(test)


def test_without_its_engine_there_are_no_locks() -> None:
    cluster = Cluster("cluster")

    async def test() -> None:
        one, two = cluster.one, cluster.two
        await one.acquire(cluster.whole(), wish(one, 1), wait=False)
        cluster.unreachable = True
        with pytest.raises(NoLocks):
            await two.acquire(cluster.whole(), wish(two, 1), wait=False)

    run(test)


def test_what_nobody_locked_costs_no_question() -> None:
    cluster = Cluster("cluster")

    async def test() -> None:
        cluster.unreachable = True
        await cluster.one.closed(cluster.whole(), cluster.one.owner(7))

    run(test)


def test_a_given_back_lock_leaves_nothing_in_the_engine() -> None:
    cluster = Cluster("cluster")

    async def test() -> None:
        one = cluster.one
        await one.acquire(cluster.ranges(), wish(one, 1, start=4, end=9), wait=False)
        await one.closed(cluster.ranges(), one.owner(1))

    run(test)

    assert cluster.engine.read_now(lambda t: list(t.scan(b"K", b"L"))) == []


def _next_daemon(cluster: Cluster, journal: MountJournal) -> tuple[Locks, MountJournal]:
    """Returns what goes on with node 1 after a kill, before `go_on`."""
    found = MountJournal(os.dup(journal.fd))
    found.take_over()
    locks = cluster.node(1)
    locks.keep_journal(found.locks)
    return locks, found


def test_the_next_daemon_goes_on_as_the_owner_of_what_programs_have_locked(reach: str) -> None:
    cluster, journal = Cluster(reach), MountJournal.made()
    ranges, whole = cluster.ranges(), cluster.whole()

    async def test() -> None:
        one = cluster.one
        one.keep_journal(journal.locks)
        await one.acquire(ranges, wish(one, 1, start=0, end=99), wait=False)
        await one.release(ranges, one.owner(1), 40, 49)
        await one.acquire(ranges, wish(one, 2, exclusive=False, start=200), wait=False)
        await one.acquire(ranges, wish(one, 3, start=150, end=160), wait=False)
        await one.closed(ranges, one.owner(3))
        await one.acquire(whole, wish(one, 1), wait=False)
        await one.release(whole, one.owner(1))
        await one.acquire(whole, wish(one, 5, exclusive=False), wait=False)
        kept = journal
        for _ in range(2):
            one, kept = _next_daemon(cluster, kept)
            await one.go_on()
            assert one.counters["locks_lost"] == 0
            for start, is_free in ((0, False), (40, True), (50, False), (150, True), (300, False)):
                asked = wish(one, 9, start=start, end=start)
                found = await one.obstacle(ranges, asked)
                assert (found is None) == is_free, start
            await one.acquire(whole, wish(one, 1, exclusive=False), wait=False)
            with pytest.raises(Conflict):
                await one.acquire(whole, wish(one, 5), wait=False)
            await one.closed(whole, one.owner(1))
        await one.acquire(ranges, wish(one, 1, start=10, end=20), wait=False)
        for number in (1, 2):
            await one.closed(ranges, one.owner(number))
        await one.closed(whole, one.owner(5))
        assert await one.obstacle(ranges, wish(one, 9)) is None
        assert await one.obstacle(whole, wish(one, 9)) is None
        assert kept.locks.all() == []

    run(test)


def test_what_others_locked_while_there_was_no_daemon_is_said_once() -> None:
    cluster, journal = Cluster("cluster"), MountJournal.made()
    place = cluster.ranges()

    async def test() -> None:
        one, two = cluster.one, cluster.two
        one.keep_journal(journal.locks)
        await one.acquire(place, wish(one, 1), wait=False)
        del cluster.alive[1]
        await two.acquire(place, wish(two, 1), wait=False)
        cluster.alive[1] = 1
        one, kept = _next_daemon(cluster, journal)
        await one.go_on()
        assert one.counters["locks_lost"] == 1
        # Through another death, too.
        one, kept = _next_daemon(cluster, kept)
        await one.go_on()
        with pytest.raises(NoLocks, match="went to another"):
            await one.acquire(place, wish(one, 1), wait=False)
        with pytest.raises(Conflict):
            await one.acquire(place, wish(one, 1), wait=False)
        await two.closed(place, two.owner(1))
        await one.acquire(place, wish(one, 1), wait=False)

    run(test)


def test_a_close_that_the_engine_was_not_told_of_is_told_by_the_next_daemon() -> None:
    cluster, journal = Cluster("cluster"), MountJournal.made()
    place = cluster.ranges()

    async def test() -> None:
        one, two = cluster.one, cluster.two
        one.keep_journal(journal.locks)
        await one.acquire(place, wish(one, 1), wait=False)
        journal.locks.remove(JournaledLock(*place, 1, is_there=True))  # as `closed` does first
        one, _ = _next_daemon(cluster, journal)
        await one.go_on()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.run)
            with pytest.raises(Conflict):
                await two.acquire(place, wish(two, 1), wait=False)
            await one.acquire(place, wish(one, 1), wait=False)  # of another program
            nursery.cancel_scope.cancel()
        await one.closed(place, one.owner(1))
        await two.acquire(place, wish(two, 1), wait=False)

    run(test)
