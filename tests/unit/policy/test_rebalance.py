"""Evening out, heat and pace: the pure decisions of what moves by itself."""

import random

from hypothesis import given
from hypothesis import strategies as st

from kvfs.policy import hot_files, rebalance_plan
from kvfs.policy.cluster_snapshot import ClusterSnapshot, Host
from kvfs.policy.pace import Pace
from kvfs.policy.rebalance_plan import Copy

GIB = 1 << 30


class Cluster:
    """Nodes with files, and what is moved between them."""

    def __init__(self, capacities: dict[int, int], seed: int = 0) -> None:
        self.capacities = capacities
        self.files: dict[int, dict[int, int]] = {number: {} for number in capacities}
        self.random = random.Random(seed)
        self.moved = 0
        self._next = 1

    def put(self, number: int, size: int) -> None:
        self.files[number][self._next] = size
        self._next += 1

    def fill(self, share: float, size: int) -> None:
        for number, capacity in self.capacities.items():
            while self.used(number) + size <= share * capacity:
                self.put(number, self.random.randint(size // 2, size))

    def used(self, number: int) -> int:
        return sum(self.files[number].values())

    def snapshot(self) -> ClusterSnapshot:
        return ClusterSnapshot(
            Host(number, capacity, capacity - self.used(number))
            for number, capacity in self.capacities.items()
        )

    def round(self) -> int:
        """What all nodes decide from one snapshot, done; how many files moved."""
        snapshot, count = self.snapshot(), 0
        for number in self.capacities:
            copies = [Copy(ino, size, (number,)) for ino, size in self.files[number].items()]
            for move in rebalance_plan.shed(snapshot, number, copies):
                self.files[move.target][move.ino] = self.files[number].pop(move.ino)
                self.moved += move.size
                count += 1
        return count


def test_after_a_node_is_added_hardly_more_than_its_share_moves() -> None:
    cluster = Cluster(dict.fromkeys(range(1, 21), 100 * GIB), seed=1)
    cluster.fill(0.5, GIB // 4)
    cluster.capacities[21] = 100 * GIB
    cluster.files[21] = {}
    ideal = rebalance_plan.fill(cluster.snapshot()) * 100 * GIB
    rounds = 0
    while cluster.round():
        rounds += 1
        assert rounds < 10
    assert cluster.used(21) > 0.85 * ideal
    assert cluster.moved <= 1.1 * ideal


def test_nodes_of_any_size_become_equally_full() -> None:
    cluster = Cluster({1: 400 * GIB, 2: 100 * GIB, 3: 100 * GIB, 4: 50 * GIB}, seed=2)
    for _ in range(800):
        cluster.put(1, GIB // 4)
    for _ in range(10):
        cluster.round()
    fills = [cluster.used(number) / size for number, size in cluster.capacities.items()]
    assert max(fills) - min(fills) <= 2 * rebalance_plan.TOLERANCE


def test_nothing_moves_where_nodes_are_nearly_even_or_may_not_be_given_anything() -> None:
    copies = [Copy(1, GIB, (1,))]
    even = [Host(1, 100 * GIB, 50 * GIB), Host(2, 100 * GIB, 52 * GIB)]
    assert not list(rebalance_plan.shed(ClusterSnapshot(even), 1, copies))
    empty = even[1]._replace(free=100 * GIB)
    for other in (empty._replace(state="draining"), empty._replace(alive=False)):
        assert not list(rebalance_plan.shed(ClusterSnapshot([even[0], other]), 1, copies))
    assert list(rebalance_plan.shed(ClusterSnapshot([even[0], empty]), 1, copies))


def test_a_copy_moves_to_no_node_that_has_one_nor_nearer_to_the_others() -> None:
    hosts = [
        Host(1, 100 * GIB, 20 * GIB, zone="a"),
        Host(2, 100 * GIB, 70 * GIB, zone="b"),
        Host(3, 100 * GIB, 100 * GIB, zone="b"),
    ]
    snapshot = ClusterSnapshot(hosts)
    assert not list(rebalance_plan.shed(snapshot, 1, [Copy(1, GIB, (1, 3))]))  # 2 is in 3's zone
    moves = list(rebalance_plan.shed(snapshot, 1, [Copy(each, GIB, (1,)) for each in range(1, 20)]))
    assert {move.target for move in moves} == {2, 3}


@given(st.floats(0, 1e6))
def test_copies_follow_the_heat_and_cold_ones_have_none(heat: float) -> None:
    assert hot_files.extra(heat * 2) in (hot_files.extra(heat), hot_files.extra(heat) + 1)
    assert not (hot_files.extra(heat) and hot_files.is_cold(heat))


def test_a_file_grows_hot_by_demand_and_cold_by_time() -> None:
    heat = hot_files.Heat()
    for _ in range(40):
        heat.demanded(7, 100.0)
    heat.demanded(8, 100.0)
    assert heat.hot(100.0) == [(7, 2)]
    assert hot_files.is_cold(heat.of(7, 100.0 + 5 * hot_files.HALF_LIFE_S))
    assert heat.hot(200.0) == []


def test_heat_is_remembered_of_a_bounded_number_of_files() -> None:
    heat = hot_files.Heat()
    for _ in range(100):
        heat.demanded(0, 0.0)
    for ino in range(1, 20_000):
        heat.demanded(ino, 0.0)
    assert heat.of(0, 0.0) == 100
    assert len(heat._seen) <= 4096


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=200))
def test_work_that_waits_as_told_stays_within_its_pace(sizes: list[int]) -> None:
    pace, now, spent = Pace(100.0, 0.0), 0.0, 0
    for size in sizes:
        now += pace.spend(size, now)
        assert spent <= 100 + 100 * now + 1e-6  # before this one is begun
        spent += size


def test_no_pace_is_no_limit() -> None:
    assert Pace(0, 0.0).spend(1 << 40, 0.0) == 0.0
