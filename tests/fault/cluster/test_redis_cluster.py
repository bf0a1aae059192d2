"""What befalls a Redis cluster under nodes: its slots move, its servers die and are replaced, and
nodes lose nothing, do nothing twice, and build on nothing that went back."""

import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import trio

from kvfs.base.errors import Invalid, Unavailable
from kvfs.meta.node_leases import HeardLeases, Joined
from kvfs.meta.redis.calling import locate
from kvfs.meta.redis.leasing import LeaseTable
from kvfs.meta.redis.slots import slot_of
from tests.cluster.waiting import wait_until
from tests.contract.mirrors import Mirror, everything, in_redis
from tests.contract.redis_servers import RedisCluster, RedisServer, ask, killed
from tests.fault.cluster.test_mirror import (
    Counter,
    mirroring,
    until_committed_or_refused,
)
from tests.fault.counters import increment, number
from tests.ports import free_port

FAIL_OVER_S = 60.0
"""A deadline within which any server is replaced."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with killed(RedisCluster(tmp_path_factory.mktemp("cluster"), timeout_ms=3_000)) as cluster:
        cluster.add_replica(cluster.servers[0])
        yield cluster


class Place(NamedTuple):
    """Where the metadata of a test are."""

    url: str
    slot: int


@pytest.fixture
def place(cluster: RedisCluster) -> Place:
    """In the shard that has a replica."""
    while True:
        prefix = secrets.token_hex(4)
        slot = slot_of(prefix, 0)
        if cluster.owner(slot, seen_by=1) not in cluster.servers[1:]:
            return Place(f"{cluster.url}?prefix={prefix}", slot)


@pytest.fixture
def one(place: Place, tmp_path: Path) -> Iterator[Mirror]:
    with mirroring(tmp_path / "one", place.url, node=11, deadline_s=FAIL_OVER_S) as mirror:
        yield mirror


@pytest.fixture
def other(place: Place, tmp_path: Path) -> Iterator[Mirror]:
    with mirroring(tmp_path / "other", place.url, node=12, deadline_s=FAIL_OVER_S) as mirror:
        yield mirror


def pair(cluster: RedisCluster) -> tuple[RedisServer, RedisServer]:
    """The servers of the first shard: the master, and the replica that has all it has."""
    both = [cluster.servers[0], cluster.replicas[0]]
    for each in both:
        each.restart()
    wait_until(lambda: sorted(map(role, both)) == ["master", "slave"], "one follows the other")
    master, replica = sorted(both, key=role)
    replica.wait_for("master_link_status", "up")
    return master, replica


def role(server: RedisServer) -> str:
    return server.info("role")


def check_counted(counters: list[Counter], one: Mirror, other: Mirror, place: Place) -> None:
    """All that was acknowledged is there, once, for all; and everything was."""
    for each in counters:
        each.stop()
    assert [each.unknown for each in counters] == [0, 0]
    counted = sum(each.counted for each in counters)
    one.catch_up()
    other.catch_up()
    assert number(one, b"n") == number(other, b"n") == counted
    assert everything(one) == everything(other) == in_redis(place.url)


# ---- slots that move


def test_two_nodes_count_while_their_slot_moves(
    cluster: RedisCluster, place: Place, one: Mirror, other: Mirror
) -> None:
    counters = [Counter(mirror, b"n") for mirror in (one, other)]
    for _ in range(4):
        for each in counters:
            each.wait_for(10)
        home = cluster.servers.index(cluster.owner(place.slot, seen_by=1))
        cluster.move(place.slot, cluster.servers[(home + 1) % 3])
    for each in counters:
        each.wait_for(10)
    check_counted(counters, one, other, place)


def test_who_is_being_given_the_slot_answers_before_it_has_it(
    cluster: RedisCluster, place: Place, one: Mirror, other: Mirror
) -> None:
    one.transact_now(increment(b"n"))
    me = trio.run(join, place.url)
    source = cluster.owner(place.slot, seen_by=1)
    with cluster.moving(place.slot, cluster.servers[1]):
        one.transact_now(increment(b"n"))
        # By the question that waits for what is new.
        wait_until(lambda: number(other, b"n") == 2, "the other node hears of it")
        assert list(trio.run(renew, place.url, me)) == [me.node]
        assert source.call("CLUSTER", "COUNTKEYSINSLOT", place.slot) == 0
    other.transact_now(increment(b"n"))
    one.catch_up()
    assert number(one, b"n") == 3
    cluster.move(place.slot, source)


async def join(url: str) -> Joined:
    table = LeaseTable(locate(url), FAIL_OVER_S)
    try:
        return await table.join("store", "token", b"words", [b"digest"], None)
    finally:
        table.close()


async def renew(url: str, me: Joined) -> dict[int, object]:
    table = LeaseTable(locate(url), FAIL_OVER_S)
    try:
        return dict((await table.renew(me, b"words", HeardLeases())).news.leases)
    finally:
        table.close()


# ---- servers that are gone


def test_servers_that_are_away_or_silent_are_passed_over(place: Place) -> None:
    """Of those that the URL names."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        away = f"127.0.0.1:{free_port()},127.0.0.1:{silent.getsockname()[1]}"
        url = place.url.replace("://", f"://{away},")
        me = trio.run(join, url)
    assert list(trio.run(renew, place.url, me)) == [me.node]


def test_a_wrong_password_is_told_at_once(place: Place, tmp_path: Path) -> None:
    url = place.url.replace("://", "://kvfs:hidden@")
    with pytest.raises(Invalid, match="name a user and password") as refused:
        Mirror(tmp_path / "a", url)
    assert "hidden" not in str(refused.value)


def test_two_nodes_count_while_a_replica_takes_over_in_order(
    cluster: RedisCluster, place: Place, one: Mirror, other: Mirror
) -> None:
    master, replica = pair(cluster)
    counters = [Counter(mirror, b"n") for mirror in (one, other)]
    for each in counters:
        each.wait_for(10)
    assert replica.call("CLUSTER", "FAILOVER") == "OK"
    replica.wait_for("role", "master")
    master.wait_for("role", "slave")
    for each in counters:
        each.wait_for(10)
    check_counted(counters, one, other, place)


def test_a_replica_that_lagged_behind_is_not_built_on(
    cluster: RedisCluster, place: Place, one: Mirror, other: Mirror
) -> None:
    master, replica = pair(cluster)
    one.transact_now(increment(b"n"))
    assert one.call(one.engine.promise) == "it is in the memory of a replica as well"
    other.catch_up()
    cut_off(master)
    one.transact_now(increment(b"n"))
    other.catch_up()
    master.kill()
    replica.wait_for("role", "master")
    for each in (one, other):
        with pytest.raises(Unavailable, match=r"older metadata.*kvfs rebuild"):
            until_committed_or_refused(each)
    assert in_redis(place.url) == [(b"n", b"1")]


def cut_off(master: RedisServer) -> None:
    """From its replica, which must not come back; nodes have their connections already."""
    with master.connected() as connection:
        assert ask(connection, "CONFIG", "SET", "requirepass", "other") == "OK"
        assert ask(connection, "CLIENT", "KILL", "TYPE", "replica")
