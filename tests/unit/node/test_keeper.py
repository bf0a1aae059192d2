"""What the keepers of a cluster's nodes do together, on a clock that jumps from event to event."""

import random
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from kvfs.base.errors import Busy, Unavailable
from kvfs.node.tasks.copier import Copies
from kvfs.node.tasks.replica_keeper import _ROUTINE_S
from kvfs.policy import hot_files
from tests.conftest import LONG
from tests.unit.node.keeping_cluster import GIB, KeptCluster, until


def run(main: Callable[[], Awaitable[None]]) -> None:
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_closed_file_gets_its_replicas_in_other_zones_and_others_get_none() -> None:
    async def main() -> None:
        cluster = KeptCluster(5)
        kept = cluster.namespace("kept", replicas=1)
        plain = cluster.namespace("plain")
        async with cluster.running():
            inos = [cluster.write(kept, f"{number}", node=1) for number in range(30)]
            alone = cluster.write(plain, "alone")
            await until(lambda: all(len(cluster.holders(ino)) == 2 for ino in inos), 60)
            await trio.sleep(30)
        assert all(len(cluster.holders(ino)) == 2 for ino in inos)
        assert cluster.holders(alone) == {1}
        others = {number for ino in inos for number in cluster.holders(ino)} - {1}
        assert others == {2, 4}, "1 is in the other zone"
        assert cluster[1].keeper.report()["under_replicated"] == 0

    run(main)


def test_a_node_that_refuses_is_not_asked_again_and_another_takes_the_file() -> None:
    async def main() -> None:
        cluster = KeptCluster(4)
        kept = cluster.namespace("kept", replicas=1)
        cluster.full(2)
        cluster.full(4)
        async with cluster.running():
            ino = cluster.write(kept, "a")
            await until(lambda: len(cluster.holders(ino)) == 2, 60)
        assert cluster.holders(ino) == {1, 3}

    run(main)


def test_copies_of_a_lost_node_are_made_again_once_each() -> None:
    async def main() -> None:
        cluster = KeptCluster(5)
        kept = cluster.namespace("kept", replicas=1)
        async with cluster.running():
            inos = [cluster.write(kept, f"{number}", node=1 + number % 5) for number in range(60)]
            await until(lambda: all(len(cluster.holders(ino)) == 2 for ino in inos), 60)
            before = sum(len(node.brought) for node in cluster.nodes.values())
            lost = [ino for ino in inos if 3 in cluster.holders(ino)]
            cluster.lose(3)
            await until(lambda: all(len(cluster.living(ino)) == 2 for ino in inos), 120)
            await trio.sleep(_ROUTINE_S)
        made = sum(len(node.brought) for node in cluster.nodes.values()) - before
        assert made == len(lost)
        actors = {
            number for number, node in cluster.nodes.items() if node.copies.counters["copies_made"]
        }
        assert len(actors) > 2, "the work is shared"

    run(main)


def test_what_could_not_be_copied_is_said_and_copied_when_it_can_be() -> None:
    async def main() -> None:
        cluster = KeptCluster(2)
        kept = cluster.namespace("kept", replicas=1)
        cluster.full(2)
        async with cluster.running():
            ino = cluster.write(kept, "a")
            await until(lambda: cluster[1].keeper.report()["under_replicated"] == 1, 60)
            cluster[2].refuses = None
            await until(lambda: cluster.holders(ino) == {1, 2}, 3 * _ROUTINE_S)
            await until(lambda: cluster[1].keeper.report()["under_replicated"] == 0, _ROUTINE_S)

    run(main)


def test_more_replicas_than_before_are_made_of_what_is_there() -> None:
    async def main() -> None:
        from kvfs.tree import namespaces

        cluster = KeptCluster(4)
        kept = cluster.namespace("kept", replicas=1)
        async with cluster.running():
            ino = cluster.write(kept, "a")
            await until(lambda: len(cluster.holders(ino)) == 2, 60)
            cluster[1].seat.transact_now(
                lambda t: namespaces.set_policy(t, kept, now=0, replicas=2)
            )
            await until(lambda: len(cluster.holders(ino)) == 3, 3 * _ROUTINE_S)

    run(main)


def test_a_drained_node_gives_all_away_and_says_so() -> None:
    async def main() -> None:
        cluster = KeptCluster(4)
        kept, fast = cluster.namespace("kept", replicas=1), cluster.namespace("fast", kind="cache")
        async with cluster.running():
            inos = [cluster.write(kept, f"{number}", node=1) for number in range(20)]
            once = [cluster.write(fast, f"{number}", node=1) for number in range(20)]
            await until(lambda: all(len(cluster.holders(ino)) == 2 for ino in inos), 60)
            cluster[1].host = cluster[1].host._replace(state="draining")
            await until(lambda: cluster[1].host.state == "drained", 600)
        assert not any(1 in cluster.holders(ino) for ino in inos + once)
        assert all(len(cluster.holders(ino)) == 2 for ino in inos)
        assert all(len(cluster.holders(ino)) == 1 for ino in once)

    run(main)


def test_nothing_goes_from_a_node_after_its_drain_was_stopped() -> None:
    async def main() -> None:
        cluster = KeptCluster(2)
        kept = cluster.namespace("kept")
        async with cluster.running():
            inos = [cluster.write(kept, f"{number}") for number in range(40)]
            cluster.drain(1)
            await until(lambda: not all(1 in cluster.holders(ino) for ino in inos), 60)
            cluster[1].host = cluster[1].host._replace(state="active")
            here = [ino for ino in inos if 1 in cluster.holders(ino)]
            await trio.sleep(300)
            assert [ino for ino in inos if 1 in cluster.holders(ino)] == here
            assert cluster[1].host.state == "active"

    run(main)


def test_what_nodes_share_is_handed_over_as_it_lies() -> None:
    flash = frozenset({"ssd", "shared:flash"})

    async def main() -> None:
        cluster = KeptCluster(3)
        shared = cluster.namespace("shared", media=["shared:flash"])
        async with cluster.running():
            inos = [cluster.write(shared, f"{number}") for number in range(5)]
            cluster.drain(1)
            await until(lambda: bool(cluster[1].keeper.obstacle), 60)
            assert cluster[1].keeper.obstacle == "5 files in a shared store that no other node has"
            cluster[3].host = cluster[3].host._replace(media=flash)
            await until(lambda: cluster[1].host.state == "drained", 60)
        assert [cluster.holders(ino) for ino in inos] == [{3}] * 5
        assert sorted(cluster[1].disowned) == inos
        assert not cluster[3].brought

    run(main)


def test_a_node_that_cannot_give_all_away_keeps_the_rest() -> None:
    async def main() -> None:
        cluster = KeptCluster(2)
        kept = cluster.namespace("kept")
        cluster.full(2)
        async with cluster.running():
            ino = cluster.write(kept, "a")
            cluster[1].host = cluster[1].host._replace(state="draining")
            await trio.sleep(300)
            assert cluster.holders(ino) == {1}
            assert cluster[1].keeper.report()["draining"]["files_left"] == 1
            cluster[2].refuses = None
            await until(lambda: cluster[1].host.state == "drained", 300)
        assert cluster.holders(ino) == {2}

    run(main)


def test_what_nobody_has_room_for_is_evicted_of_a_cache_and_said_of_others() -> None:
    async def main() -> None:
        cluster = KeptCluster(3)
        kept, fast = cluster.namespace("kept"), cluster.namespace("fast", kind="cache")
        cluster[2].has_room(0)
        cluster[3].has_room(2 * GIB)
        async with cluster.running():
            durable = cluster.write(kept, "durable", size=8 * GIB)
            small = [cluster.write(fast, f"{number}", size=GIB) for number in range(3)]
            cluster.drain(1)
            await until(lambda: len(cluster[1].evicted) == 1, 600)
            await trio.sleep(300)
            assert cluster.holders(durable) == {1}
            assert cluster[1].keeper.obstacle == (
                "1 file, 8.0 GiB, for which no other node has room"
                " (node 2 lacks 8.0 GiB, node 3 lacks 8.0 GiB)"
            )
            assert cluster[1].keeper.report()["draining"]["files_left"] == 1
            cluster[2].has_room(8 * GIB)
            await until(lambda: cluster[1].host.state == "drained", 300)
            await until(lambda: not cluster[1].keeper.obstacle, 60)
        assert [cluster.holders(ino) for ino in small] == [{3}, {3}, set()], "what fitted was moved"
        assert cluster.holders(durable) == {2}

    run(main)


def test_nothing_is_evicted_of_a_node_that_is_drained_while_no_other_is_there() -> None:
    async def main() -> None:
        cluster = KeptCluster(2)
        fast = cluster.namespace("fast", kind="cache")
        cluster.lose(2)
        async with cluster.running():
            ino = cluster.write(fast, "a")
            cluster.drain(1)
            await trio.sleep(300)
            assert "no node is there" in cluster[1].keeper.obstacle
            assert cluster.holders(ino) == {1}
            cluster[2].host = cluster[2].host._replace(alive=True)
            await until(lambda: cluster[1].host.state == "drained", 300)
        assert cluster.holders(ino) == {2}
        assert cluster[1].evicted == []

    run(main)


def test_a_cache_that_others_refuse_or_that_is_in_use_goes_in_the_end() -> None:
    async def main() -> None:
        cluster = KeptCluster(2)
        fast = cluster.namespace("fast", kind="cache")
        cluster.full(2)
        async with cluster.running():
            ino = cluster.write(fast, "a")
            cluster[1].in_use.add(ino)
            cluster.drain(1)
            await trio.sleep(10)
            assert "nobody took (node 2: the disk is full)" in cluster[1].keeper.obstacle
            await trio.sleep(300)
            assert cluster[1].keeper.obstacle == "1 file in use"
            assert cluster[1].host.state == "draining"
            cluster[1].in_use.clear()
            await until(lambda: cluster[1].host.state == "drained", 60)
        assert cluster[1].evicted == [ino]

    run(main)


def test_what_lies_in_a_shared_store_stays_and_is_said() -> None:
    async def main() -> None:
        cluster = KeptCluster(2)
        shared = cluster.namespace("shared", kind="cache", media=["shared:lustre"])
        async with cluster.running():
            ino = cluster.write(shared, "a")
            cluster.drain(1)
            await trio.sleep(300)
            assert cluster[1].keeper.obstacle == "1 file in a shared store that no other node has"
        assert cluster.holders(ino) == {1}
        assert cluster[2].copies.counters["copies_taken"] == 0

    run(main)


def test_a_drain_that_is_stopped_and_begun_again_tries_anew() -> None:
    async def main() -> None:
        cluster = KeptCluster(2)
        fast = cluster.namespace("fast", kind="cache")
        cluster[2].has_room(0)
        async with cluster.running():
            ino = cluster.write(fast, "a")
            for _ in range(5):
                cluster.drain(1)
                await trio.sleep(20)
                assert cluster[1].keeper.obstacle
                cluster[1].host = cluster[1].host._replace(state="active")
                await trio.sleep(20)
                assert not cluster[1].keeper.obstacle
        assert cluster.holders(ino) == {1}

    run(main)


def test_full_nodes_give_to_an_empty_one_no_more_than_its_share() -> None:
    async def main() -> None:
        cluster = KeptCluster(4)
        space = cluster.namespace("space")
        cluster.lose(4)
        async with cluster.running():
            inos = [
                cluster.write(space, f"{number}", node=1 + number % 3, size=10 * GIB)
                for number in range(180)
            ]
            cluster[4].host = cluster[4].host._replace(alive=True)
            await until(lambda: len(cluster[4].brought) > 35, 1200)
            await trio.sleep(1200)
        assert len(cluster[4].brought) <= 1.1 * 45
        assert all(len(cluster.holders(ino)) == 1 for ino in inos)

    run(main)


def test_a_hot_file_has_more_copies_until_it_is_cold() -> None:
    async def main() -> None:
        cluster = KeptCluster(5)
        fast = cluster.namespace("fast", kind="cache")
        async with cluster.running():
            ino = cluster.write(fast, "a")
            for _ in range(int(hot_files.HOT) * 3):
                cluster[1].evening.demanded(ino)
            await until(lambda: len(cluster.holders(ino)) >= 3, 60)
            for node in cluster.nodes.values():  # they were not used since
                entry = node.index.get(ino)
                if entry is not None:
                    node.index._touched[ino] = 1
                    node.index.flush()
            await until(lambda: len(cluster.holders(ino)) == 1, 600)

    run(main)


def test_who_takes_long_says_so_and_is_asked_again() -> None:
    async def main() -> None:
        cluster = KeptCluster(2)
        kept = cluster.namespace("kept", replicas=1)
        cluster[2].fetch_s = 30.0
        async with cluster.running():
            ino = cluster.write(kept, "a")
            await until(lambda: len(cluster.holders(ino)) == 2, 60)
        assert cluster[2].brought == [ino]

    run(main)


def test_a_node_takes_a_bounded_number_of_files_at_a_time() -> None:
    async def main() -> None:
        cluster = KeptCluster(2)
        space = cluster.namespace("space")
        cluster[2].fetch_s = 1000.0
        inos = [cluster.write(space, f"{number}") for number in range(65)]

        async def take(ino: int) -> None:
            assert await cluster[2].copies.take(None, [ino, 0, False]) is False

        async with cluster.running(), trio.open_nursery() as nursery:
            for ino in inos[:64]:
                nursery.start_soon(take, ino)
            await trio.sleep(1)
            with pytest.raises(Busy):
                await cluster[2].copies.take(None, [inos[64], 0, False])

    run(main)


def test_who_never_takes_the_file_is_not_waited_for_without_end() -> None:
    async def main() -> None:
        cluster = KeptCluster(2)
        space = cluster.namespace("space")
        cluster[2].fetch_s = 1e9
        ino = cluster.write(space, "a", size=1000)
        async with cluster.running():
            file = await cluster[1].copies.look(ino)
            assert file is not None
            with trio.fail_after(120):
                with pytest.raises(Unavailable):
                    await _asked(cluster[1].copies, file)

    run(main)


async def _asked(made: Copies, file: object) -> None:
    await made.ask(2, file)  # type: ignore[arg-type]


def test_a_close_that_is_acknowledged_with_its_copies_waits_for_them() -> None:
    async def main() -> None:
        cluster = KeptCluster(4)
        sync = cluster.namespace("sync", replicas=2, acknowledge="sync")
        later = cluster.namespace("async", replicas=2)
        acknowledging = cluster[1].acknowledging
        async with cluster.running():
            ino = cluster.write(sync, "a")
            await acknowledging.acknowledge([ino])
            assert len(cluster.holders(ino)) == 3
            other = cluster.write(later, "a")
            await acknowledging.acknowledge([other])
            assert cluster.holders(other) == {1}

    run(main)


def test_a_close_waits_for_a_node_that_is_about_to_be_there() -> None:
    async def main() -> None:
        cluster = KeptCluster(3)
        sync = cluster.namespace("sync", replicas=2, acknowledge="sync")
        cluster.lose(3)
        async with cluster.running(), trio.open_nursery() as nursery:
            ino = cluster.write(sync, "a")
            nursery.start_soon(cluster[1].acknowledging.acknowledge, [ino])
            await until(lambda: len(cluster.holders(ino)) == 2, 5)
            cluster.regain(3)
        assert cluster.holders(ino) == {1, 2, 3}

    run(main)


def test_a_close_beside_two_stopped_nodes_finds_the_third_and_later_ones_ask_it_first() -> None:
    async def main() -> None:
        cluster = KeptCluster(4)
        sync = cluster.namespace("sync", replicas=1, acknowledge="sync")
        for number in (2, 4):
            cluster[number].is_stopped = True
        async with cluster.running():
            began = trio.current_time()
            for count in range(1, 9):
                ino = cluster.write(sync, f"f{count}", size=1)
                await cluster[1].acknowledging.acknowledge([ino])
                assert cluster.holders(ino) == {1, 3}
            assert trio.current_time() - began < 8, "each of them is waited for once"
            for number in (2, 4):
                cluster[number].is_stopped = False
            await trio.sleep(11)
            files = [cluster.write(sync, f"later{count}", size=1) for count in range(8)]
            await cluster[1].acknowledging.acknowledge(files)
            assert set.union(*map(cluster.holders, files)) == {1, 2, 4}, "in the other zone"

    run(main)


@pytest.mark.parametrize("is_removed", [False, True], ids=["replaced", "removed"])
def test_a_close_does_not_wait_for_copies_of_what_another_node_replaced(is_removed: bool) -> None:
    async def main() -> None:
        cluster = KeptCluster(2)
        sync = cluster.namespace("sync", replicas=1, acknowledge="sync")
        async with cluster.running(), trio.open_nursery() as nursery:
            ino = cluster.write(sync, "a")
            nursery.start_soon(cluster[1].acknowledging.acknowledge, [ino])
            await trio.sleep(cluster[2].fetch_s / 2)
            if is_removed:
                cluster.remove_name(sync, "a", node=2)
            else:
                cluster.rewrite(ino, version=2, node=2)
            began = trio.current_time()
            await cluster[2].acknowledging.acknowledge([ino])
            nursery.start_soon(cluster[2].acknowledging.acknowledge, [ino])
        assert trio.current_time() - began < 2, "by the clock of this world"
        assert is_removed or cluster.holders(ino, version=2) == {1, 2}

    run(main)


def test_a_close_on_a_node_without_a_lease_promises_nothing() -> None:
    async def main() -> None:
        cluster = KeptCluster(3)
        sync = cluster.namespace("sync", replicas=2, acknowledge="sync")
        async with cluster.running():
            ino = cluster.write(sync, "a")
            cluster.lose(1)
            with trio.fail_after(60), pytest.raises(Unavailable, match="3 nodes are"):
                await cluster[1].acknowledging.acknowledge([ino])

    run(main)


def test_a_close_that_cannot_have_its_copies_is_an_error() -> None:
    async def main() -> None:
        cluster = KeptCluster(3)
        sync = cluster.namespace("sync", replicas=2, acknowledge="sync")
        cluster.full(3)
        async with cluster.running():
            ino = cluster.write(sync, "a")
            with trio.fail_after(60), pytest.raises(Unavailable, match="3 nodes are"):
                await cluster[1].acknowledging.acknowledge([ino])

    run(main)


class History:
    """What befalls a cluster, drawn from a seed, and what is to be true when it has settled."""

    SETTLED_S = 100.0

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.cluster = KeptCluster(5)
        self.wanted: dict[int, int] = {}
        self.spaces = {
            copies: self.cluster.namespace(f"kept{copies}", replicas=copies - 1)
            for copies in (2, 3)
        }
        self.log: list[str] = []

    async def step(self) -> None:
        kind = self.draw.choice(["write", "lose", "regain", "drain", "undrain", "fill", "free"])
        number, cluster = self.draw.randint(1, 5), self.cluster
        node = cluster[number]
        state, alive = node.host.state, node.host.alive
        others = [n for n, each in cluster.nodes.items() if each.host.is_open and n != number]
        if kind == "write" and alive and state == "active":
            copies = self.draw.choice([2, 3])
            name = f"{len(self.wanted)}"
            self.wanted[cluster.write(self.spaces[copies], name, node=number)] = copies
        elif kind == "lose" and alive and len(others) > 1:
            cluster.lose(number)
        elif kind == "lose" and not alive and state != "removed" and others:
            kind = "remove"
            await cluster.remove(number, by=self.draw.choice(others))
        elif kind == "regain" and not alive and state != "removed":
            cluster.regain(number)
        elif kind == "drain" and state == "active" and len(others) > 1:
            cluster.drain(number)
        elif kind == "undrain" and state in ("draining", "drained"):
            node.host = node.host._replace(state="active")
        elif kind == "fill":
            cluster.full(number)
        elif kind == "free":
            node.refuses = None
        else:
            return
        self.log.append(f"{kind} {number}")

    def check(self) -> None:
        """Each file has its copies, or nobody can take one and that is said; no other is."""
        cluster = self.cluster
        hosts = {each.number: each for each in cluster.snapshot()}
        lacking = drained = 0
        for ino, wanted in self.wanted.items():
            there = cluster.living(ino)
            staying = {number for number in there if hosts[number].is_open}
            if not staying:  # nobody can act, or all who could are drained: that is said by them
                drained += bool(there)
                continue
            could = {
                number
                for number, host in hosts.items()
                if host.is_open and cluster[number].refuses is None and number not in there
            }
            if len(staying) < wanted:
                assert not could, f"{ino:x} is on {there}, could be on {could}: {self.log}"
                lacking += 1
        said = sum(
            node.keeper.report()["under_replicated"]
            for node in cluster.nodes.values()
            if node.host.alive
        )
        assert said >= lacking, f"{lacking} lack copies, {said} are said to: {self.log}"
        assert lacking or drained or not said, f"{said} are said to lack copies: {self.log}"


@pytest.mark.parametrize("number", range(20 if LONG else 2))
def test_whatever_becomes_of_nodes_copies_are_made_or_said_to_lack(number: int, seed: int) -> None:
    async def main() -> None:
        history = History(seed + number)
        async with history.cluster.running():
            for _ in range(12):
                for _ in range(history.draw.randint(1, 5)):
                    await history.step()
                    await trio.sleep(history.draw.choice([0, 0.3, 5]))
                history.log.append("settle")
                await trio.sleep(History.SETTLED_S)
                history.check()

    run(main)
