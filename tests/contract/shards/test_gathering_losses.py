"""What a gathering of namespaces makes of losses: of servers that come back without the last
second, or are full, and of nodes that were away, or heard late."""

import contextlib
import threading
from collections.abc import Iterator

import pytest
import trio

from kvfs.base.errors import NoSpace, Unavailable
from kvfs.meta import keys
from kvfs.meta.node_leases import Lost
from kvfs.meta.redis.calling import RetryingClient, locate
from kvfs.meta.redis.log import Proposal
from kvfs.meta.redis.scripts import Item, Script
from kvfs.meta.redis.slots import slot_of
from kvfs.meta.shards import moves
from kvfs.meta.shards.gatherer import (
    CLOSE_SHARD,
    DROP,
    ENTITLE,
    REOPEN_SHARD,
    NamespaceGatherer,
)
from kvfs.meta.shards.mover import NamespaceMover
from kvfs.meta.shards.shard_map import space_of
from kvfs.meta.shards.shard_replica import ShardReplica
from tests.cluster.waiting import wait_until
from tests.contract.hosts import TOP, agree
from tests.contract.redis_servers import RedisCluster, RedisServer
from tests.contract.shards.gathering import SPACE, Site, catch_up, shard_of


@pytest.mark.parametrize("is_trimmed", [False, True])
def test_a_node_that_was_away_over_a_gathering_and_a_spread_has_all_of_it(
    is_trimmed: bool, site: Site, cluster: RedisCluster
) -> None:
    """It knows the shard's earlier log, and perhaps nothing of its end."""
    site.other.mirror.close()
    site.make(site.one, b"meanwhile")
    assert site.gather(site.one) == [1]
    assert site.one.mirror.call(site.one.mirror.engine.spread) == [1]
    site.make(site.one, b"since")
    if is_trimmed:
        top = cluster.owner(slot_of(site.prefix, 0))
        assert top.call("XTRIM", f"{{{site.prefix}:0}}x", "MAXLEN", 0)
    starting = threading.Thread(target=site.other.start, daemon=True)
    starting.start()
    wait_until(lambda: not starting.is_alive(), "it hears of the shard")
    catch_up(site.other)
    for name, ino in site.files.items():
        assert site.other.find(TOP, name) == ino, name
    site.make(site.other, b"more")
    agree(site.one, site.other, site.url)


class Past:
    """What a server has of a shard, to which it comes back when it lost the last second."""

    def __init__(self, cluster: RedisCluster, prefix: str, shard: int) -> None:
        self._server = cluster.owner(slot_of(prefix, shard))
        names = [f"{{{prefix}:{shard}}}{kind}" for kind in "hsx"]
        self._values = {name: self._server.call("DUMP", name) for name in names}

    def come_back(self) -> None:
        for name, value in self._values.items():
            assert self._server.call("RESTORE", name, 0, value, "REPLACE") == "OK"


@pytest.mark.parametrize("is_more_given", [False, True])
def test_keys_that_the_server_lost_before_it_has_all_of_them_are_missed(
    is_more_given: bool, site: Site, cluster: RedisCluster
) -> None:
    def set_mark(name: bytes) -> None:
        site.other.write(lambda t: t.put(keys.xattr(TOP, name), b"value"))

    async def move() -> None:
        moving = NamespaceGatherer(locate(site.url), 10.0, 1)
        await moving.begin()
        await moving.copy()
        await moving.check()
        past = await trio.to_thread.run_sync(Past, cluster, site.prefix, 0)
        await trio.to_thread.run_sync(set_mark, b"user.x")
        if is_more_given:
            await moving.follow()
            past.come_back()
            await trio.to_thread.run_sync(set_mark, b"user.y")
        assert await moving.close()
        past = past if is_more_given else Past(cluster, site.prefix, 0)
        try:
            await moving.follow()
            if not is_more_given:
                past.come_back()
            await moving.open()
        finally:
            moving.stop()

    with pytest.raises(Unavailable, match="lost keys"):
        trio.run(move)
    assert site.gather_in_the_end(site.one) == [1]
    site.check()


def test_a_shard_stays_that_was_gathered_into_a_server_which_lost_that(
    site: Site, cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    past, keep = list[Past](), ShardReplica.keep
    open_ = NamespaceGatherer.open

    async def opened(moving: NamespaceGatherer) -> bool:
        past.append(Past(cluster, site.prefix, 0))
        return await open_(moving)

    async def kept(shard: ShardReplica) -> None:
        past.pop().come_back()
        await keep(shard)

    monkeypatch.setattr(NamespaceGatherer, "open", opened)
    monkeypatch.setattr(ShardReplica, "keep", kept)
    with pytest.raises(Unavailable):
        site.gather(site.one)
    assert cluster.owner(slot_of(site.prefix, 1)).call("EXISTS", f"{{{site.prefix}:1}}h")


@pytest.mark.parametrize("which", ["close", "reopen"])
def test_a_shard_whose_server_lost_that_it_was_closed_or_reopened_is_asked_again(
    which: str, site: Site, cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, run, past = RetryingClient.keep, RetryingClient.script, list[Past]()
    lost = CLOSE_SHARD if which == "close" else REOPEN_SHARD

    async def script(
        client: RetryingClient, script: Script, *arguments: Item, end: float | None = None
    ) -> object:
        if script is lost and not past:
            past.append(Past(cluster, site.prefix, 1))
        return await run(client, script, *arguments, end=end)

    async def kept(client: RetryingClient) -> str:
        if past and shard_of(client) == 1 and not come_back:
            come_back.append(1)
            past[0].come_back()
        return await keep(client)

    async def close() -> bool:
        moving = NamespaceGatherer(locate(site.url), 10.0, 1)
        await moving.begin()
        is_closed = await moving.close()
        moving.stop()
        return is_closed

    come_back = list[int]()
    monkeypatch.setattr(RetryingClient, "script", script)
    monkeypatch.setattr(RetryingClient, "keep", kept)
    assert trio.run(close) == (which == "reopen")
    site.make(site.one, b"since")
    assert come_back
    assert site.gather_in_the_end(site.other) == [1]
    site.check()


@contextlib.contextmanager
def full(server: RedisServer) -> Iterator[None]:
    """While it has no memory for anything more."""
    server.call("CONFIG", "SET", "maxmemory", 1)
    try:
        yield
    finally:
        server.call("CONFIG", "SET", "maxmemory", 0)


def test_what_was_left_closed_is_reopened_though_the_registry_is_full(
    site: Site, cluster: RedisCluster
) -> None:
    async def close() -> None:
        moving = NamespaceGatherer(locate(site.url), 10.0, 1)
        await moving.begin()
        await moving.copy()
        assert await moving.close()
        moving.stop()

    trio.run(close)
    with full(cluster.owner(slot_of(site.prefix, 0))):
        site.make(site.one, b"meanwhile")
    assert site.gather_in_the_end(site.one) == [1]
    site.check()


def test_a_namespace_for_which_the_registry_has_no_memory_leaves_nothing_there(
    site: Site, cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = cluster.owner(slot_of(site.prefix, 0))
    with contextlib.ExitStack() as stack:

        async def check(moving: NamespaceGatherer) -> None:
            stack.enter_context(full(top))
            await trio.to_thread.run_sync(site.make, site.other, b"meanwhile")
            await moving.follow()

        monkeypatch.setattr(NamespaceGatherer, "check", check)
        with pytest.raises(NoSpace):
            site.gather(site.one)
        left = top.call("HKEYS", f"{{{site.prefix}:0}}h")
        assert left
        assert not [key for key in left if space_of(key) == SPACE]
        site.make(site.one, b"since")
    monkeypatch.undo()
    monkeypatch.setattr(moves, "LEFT_S", 0.1)
    assert site.gather(site.one) == [1]
    site.check()


def test_a_change_of_a_namespace_that_is_gathered_before_it_is_begun_is_run_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no second shard any more: whoever ended it would bring back what that one had."""
    engine, intended = site.other.mirror.engine, list[bytes]()
    top = engine._shards.top.proposer
    propose = top.propose

    async def late(given: Proposal, *, is_step: bool = False) -> bool:
        monkeypatch.setattr(top, "propose", propose)
        assert await trio.to_thread.run_sync(site.gather, site.one) == [1]
        is_done = await propose(given, is_step=is_step)
        intended.append(b"") if is_done else None
        return is_done

    monkeypatch.setattr(top, "propose", late)
    site.other.rename(1, b"ns", 1, b"renamed", behind=False)
    assert not intended
    site.check()


def test_what_is_asked_to_be_kept_while_a_namespace_comes_back_is_kept_by_the_registry(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, engine, kept = ShardReplica.keep, site.other.mirror.engine, list[int]()

    async def gathered(shard: ShardReplica) -> None:
        if not kept and shard.shard == 1:
            kept.append(1)
            assert await trio.to_thread.run_sync(site.gather, site.one) == [1]
            await engine.catch_up()
            raise Unavailable("it is followed no more")
        await keep(shard)
        kept.append(shard.shard)

    monkeypatch.setattr(ShardReplica, "keep", gathered)
    site.other.mirror.call(lambda: engine.sync(1))
    assert kept[-1] == 0
    site.check()


def test_a_spread_that_was_stopped_at_its_end_drops_nothing_of_what_came_back_since(
    site: Site,
) -> None:
    async def clean() -> None:
        mover = NamespaceMover(locate(site.url), 10.0, "", [])
        await mover.clean({SPACE})
        mover.close()

    assert site.gather(site.one) == [1]
    trio.run(clean)
    site.check()


def test_a_gathering_that_was_stopped_at_its_end_drops_nothing_of_what_was_spread_since(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, late = RetryingClient.script, list[tuple[Item, ...]]()

    async def script(
        client: RetryingClient, script: Script, *arguments: Item, end: float | None = None
    ) -> object:
        if script is DROP:
            late.append(arguments)
        return await run(client, script, *arguments, end=end)

    async def move() -> None:
        moving = NamespaceGatherer(locate(site.url), 10.0, 1)
        await moving.begin()
        await moving.copy()
        assert await moving.close()
        shard = RetryingClient(locate(site.url), 10.0, 1)
        assert not await run(shard, DROP, *late[0])
        shard.stop()
        await moving.follow()
        assert await moving.open()
        moving.stop()

    monkeypatch.setattr(RetryingClient, "script", script)
    assert site.gather(site.one) == [1]
    assert site.one.mirror.call(site.one.mirror.engine.spread) == [1]
    site.make(site.one, b"since")
    trio.run(move)
    site.check()


def test_a_shard_that_one_closed_and_left_is_reopened_though_another_ones_entitling_comes_late(
    site: Site,
) -> None:
    async def leave_closed() -> None:
        moving = NamespaceGatherer(locate(site.url), 10.0, 1)
        await moving.begin()
        await moving.copy()
        assert await moving.close()
        moving.stop()
        late = RetryingClient(locate(site.url), 10.0, 1)
        await late.script(ENTITLE, b"begun before")
        late.stop()

    trio.run(leave_closed)
    site.make(site.one, b"after")
    assert site.gather_in_the_end(site.other) == [1]
    site.check()


def test_a_start_fails_where_the_server_of_a_namespace_went_back(
    site: Site, cluster: RedisCluster
) -> None:
    past = Past(cluster, site.prefix, 1)
    site.make(site.one, b"lost")
    catch_up(site.other)
    site.other.mirror.close()
    past.come_back()
    with pytest.raises(Lost, match=r"namespace 1: .* went back to older metadata"):
        site.other.start()
