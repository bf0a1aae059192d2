"""Homes know who holds which name, whatever nodes come, die, return and are asked meanwhile."""

import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from kvfs.base.errors import NoSpace
from kvfs.holdings.fingerprints import BITS, gathered
from kvfs.node.names.name_protocol import ASK_HOMES
from tests.contract.node.home_world import HomeWorld
from tests.jumping import run_jumping

SETTLE_S = 3.0
LONG_S = 12.0
CHANCE = random.Random(11)
IN_FEW_ROWS = (1 << BITS) - 1 & ~(0xFFF << 14)
"""The bits of a fingerprint that differ. Those that are left out would have it in any row of a
table, each of which would take all of its memory from the kernel: that took most of the time."""


def some(count: int) -> list[int]:
    return [CHANCE.getrandbits(BITS) & IN_FEW_ROWS for _ in range(count)]


ABSENT = gathered(some(50))


def run(
    directory: Path,
    scene: Callable[[HomeWorld], Awaitable[None]],
    nodes: int = 5,
    names: int = 200,
) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            world = HomeWorld(directory, nursery)
            for number in range(1, nodes + 1):
                world.start(number).hold(some(names))
            await trio.sleep(SETTLE_S)
            await scene(world)
            nursery.cancel_scope.cancel()
        for node in world.nodes.values():
            node.own.close()

    run_jumping(main)


async def churn(world: HomeWorld, seconds: float) -> None:
    """Names come and go on all living nodes."""
    for _ in range(int(seconds * 4)):
        for number in set(world.nodes) - world.dead:
            node = world.nodes[number]
            node.hold(some(6))
            node.drop(sorted(node.held)[:2])
        await trio.sleep(0.25)


def test_each_node_finds_all_names_by_homes(tmp_path: Path) -> None:
    async def scene(world: HomeWorld) -> None:
        world.make_homes(world.nodes)
        await churn(world, 5)
        await trio.sleep(LONG_S)
        await world.assert_found(ABSENT)
        shares = [node.known.report() for node in world.nodes.values()]
        held = sum(len(node.held) for node in world.nodes.values())
        for each in shares:
            assert each["homes"]["ready"] == each["homes"]["ranges"]
            assert each["others"] < held * 0.6

    run(tmp_path, scene)


def test_many_names_cost_one_question_to_each_home(tmp_path: Path) -> None:
    async def scene(world: HomeWorld) -> None:
        world.make_homes(world.nodes)
        await trio.sleep(LONG_S)
        world.calls.clear()
        await world.nodes[1].find(world.truth(1))
        asked = [node for me, node, method in world.calls if (me, method) == (1, ASK_HOMES)]
        assert len(asked) == len(set(asked)) <= 4

    run(tmp_path, scene)


def test_nothing_is_missed_while_nodes_change_to_homes_and_back(tmp_path: Path) -> None:
    """Of what was held before."""

    async def scene(world: HomeWorld) -> None:
        before = world.truth(1)
        for homes in (world.nodes, (), world.nodes):
            for number in list(world.nodes):  # each sees the record at another time
                if number == 1:
                    world.make_homes(homes, [number])
                else:
                    world.adopt(number)
                for _ in range(5):
                    found = await world.nodes[1].find(before)
                    assert all(found.values())
                    await trio.sleep(0.3)
            await trio.sleep(40)
            found = await world.nodes[1].find(before)
            assert all(found.values())
        await world.assert_found(ABSENT)

    run(tmp_path, scene)


def test_a_list_leaves_out_no_holder_of_a_directory_while_nodes_change_to_homes_and_back(
    tmp_path: Path,
) -> None:
    """It asks those that are said to hold a directory, if they are known to be all."""
    directories = some(30)

    async def list_all(world: HomeWorld) -> bool:
        is_known = True
        for number, node in world.nodes.items():
            found = await node.find(directories)
            for each, holders in found.items():
                assert holders, f"node {number} finds no holder of {each:#x}"
                if node.questions.is_known(each):
                    assert holders == set(world.nodes) - {number}, f"node {number}, {each:#x}"
                else:
                    is_known = False
        return is_known

    async def scene(world: HomeWorld) -> None:
        for node in world.nodes.values():
            node.hold(directories)
        await trio.sleep(SETTLE_S)
        for homes, is_waited_for in (
            (world.nodes, False),
            ((), True),
            (world.nodes, True),
            ((), True),
        ):
            world.make_homes(homes, [])
            world.mute.add(3)
            for number in world.nodes:
                world.adopt(number)
                await list_all(world)
                await trio.sleep(0.51)
            if is_waited_for:
                world.mute.clear()
                await trio.sleep(2 * LONG_S)
                assert await list_all(world)

    run(tmp_path, scene)


def test_all_is_right_after_changes_to_homes_and_back_under_load(tmp_path: Path) -> None:
    async def scene(world: HomeWorld) -> None:
        for homes in (world.nodes, (), world.nodes, ()):
            world.make_homes(homes, [1, 2])
            await churn(world, 1)
            for number in (3, 4):
                world.adopt(number)
                await churn(world, 0.5)
            await churn(world, 2)
            await trio.sleep(LONG_S)
            await world.assert_found(ABSENT)
        assert all(node.known.report()["homes"] is None for node in world.nodes.values())

    run(tmp_path, scene, 4)


def test_a_node_that_joins_becomes_a_home(tmp_path: Path) -> None:
    async def scene(world: HomeWorld) -> None:
        world.make_homes(world.nodes)
        await trio.sleep(LONG_S)
        before = world.truth(2)
        world.start(6).hold(some(200))
        world.make_homes(world.nodes, [1, 6])
        for number in (2, 3, 4, 5):
            world.adopt(number)
            assert all((await world.nodes[2].find(before)).values())
            await trio.sleep(0.5)
        await churn(world, 3)
        await trio.sleep(LONG_S)
        await world.assert_found(ABSENT)
        assert world.nodes[6].known.report()["homes"]["ready"] > 0

    run(tmp_path, scene)


def test_a_home_that_dies_costs_no_miss_where_the_other_one_lives(tmp_path: Path) -> None:
    async def scene(world: HomeWorld) -> None:
        world.make_homes(world.nodes)
        await trio.sleep(LONG_S)
        world.silent.add(3)  # its lease has not ended yet
        before = {each: nodes - {3} for each, nodes in world.truth(1).items() if nodes - {3}}
        began = trio.current_time()
        found = await world.nodes[1].find(before)
        assert trio.current_time() - began < 1.1
        assert all(found[each] >= nodes for each, nodes in before.items())
        world.kill(3)
        await churn(world, 3)
        world.make_homes(set(world.nodes) - {3})
        await churn(world, 3)
        await trio.sleep(LONG_S)
        await world.assert_found(ABSENT)
        world.restart(3)
        await churn(world, 2)
        world.make_homes(world.nodes)
        await churn(world, 2)
        await trio.sleep(LONG_S)
        await world.assert_found(ABSENT)

    run(tmp_path, scene)


def test_a_look_up_ends_where_no_home_answers(tmp_path: Path) -> None:
    async def scene(world: HomeWorld) -> None:
        world.make_homes(world.nodes)
        await trio.sleep(LONG_S)
        world.silent |= {2, 3, 4, 5}
        began = trio.current_time()
        await world.nodes[1].find([*world.truth(1), *ABSENT.tolist()])
        assert trio.current_time() - began <= 1.1
        assert world.nodes[1].questions.counters["home_questions_unanswered"] > 0
        world.silent.clear()
        await trio.sleep(20)
        await world.assert_found(ABSENT)

    run(tmp_path, scene)


def test_a_home_that_did_not_answer_is_not_asked_for_a_moment(tmp_path: Path) -> None:
    async def scene(world: HomeWorld) -> None:
        world.make_homes(world.nodes)
        await trio.sleep(LONG_S)
        world.silent.add(3)
        held = sorted(world.truth(1))
        await world.nodes[1].find(held[::2])
        world.calls.clear()
        began = trio.current_time()
        await world.nodes[1].find(held[1::2])
        assert trio.current_time() - began < 0.1
        assert (1, 3, ASK_HOMES) not in world.calls

    run(tmp_path, scene)


def test_a_look_up_ends_in_time_however_many_there_are(tmp_path: Path) -> None:
    took: list[float] = []

    async def look_up(world: HomeWorld, name: int) -> None:
        began = trio.current_time()
        await world.nodes[1].find([name])
        took.append(trio.current_time() - began)

    async def scene(world: HomeWorld) -> None:
        world.make_homes(world.nodes)
        await trio.sleep(LONG_S)
        world.silent |= {2, 3, 4, 5}
        async with trio.open_nursery() as nursery:
            for name in world.truth(1):
                nursery.start_soon(look_up, world, name)
        assert len(took) > 500
        assert max(took) <= 1.1

    run(tmp_path, scene)


def test_a_node_that_does_not_know_the_map_yet_has_nobody_believe_a_part(tmp_path: Path) -> None:
    """The trees of the map's nodes and of all members differ by a dead one."""

    async def scene(world: HomeWorld) -> None:
        world.kill(7)
        await trio.sleep(1)
        alive = sorted(set(world.nodes) - world.dead)
        world.make_homes(alive)
        await trio.sleep(2)
        late = alive[::2]
        world.make_homes(alive, set(alive) - set(late))
        await churn(world, 1)
        for number in late:
            world.adopt(number)
        await trio.sleep(4)
        await world.assert_found(ABSENT)

    run(tmp_path, scene, 20, 10)


def test_a_node_without_memory_for_another_table_goes_by_the_one_it_has(tmp_path: Path) -> None:
    async def scene(world: HomeWorld) -> None:
        for homes in (world.nodes, ()):
            world.has_memory = False
            before = world.truth(1)
            with pytest.raises(NoSpace):
                world.make_homes(homes, [1])
            assert all((await world.nodes[1].find(before)).values())
            assert world.nodes[1].known.report()["others"] > 0
            world.has_memory = True
            for number in world.nodes:
                world.adopt(number)
            await trio.sleep(LONG_S)
            await world.assert_found(ABSENT)

    run(tmp_path, scene)


def test_both_sides_of_a_cut_are_right_after_it(tmp_path: Path) -> None:
    async def scene(world: HomeWorld) -> None:
        world.make_homes(world.nodes)
        await trio.sleep(LONG_S)
        world.silent |= {4, 5}
        await churn(world, 4)
        world.dead |= {4, 5}
        await churn(world, 4)
        world.silent.clear()
        world.dead.clear()
        await trio.sleep(LONG_S)
        await world.assert_found(ABSENT)

    run(tmp_path, scene)


@pytest.mark.parametrize("seed", range(2))
def test_any_changes_of_homes_end_with_all_found(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)

    async def scene(world: HomeWorld) -> None:
        for _ in range(5):
            alive = sorted(set(world.nodes) - world.dead)
            homes = chance.sample(alive, chance.randint(3, len(alive)))
            world.make_homes(homes if chance.random() < 0.8 else (), chance.sample(alive, 2))
            await churn(world, chance.random())
            for number in alive:
                world.adopt(number)
            await churn(world, chance.random())
        world.make_homes(world.nodes)
        await trio.sleep(70)
        await world.assert_found(ABSENT)

    run(tmp_path, scene)
