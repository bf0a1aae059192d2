"""Namespaces with shards of their own are gathered again into the one of all, on a real Redis
cluster of three servers, while nodes write."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from kvfs.base.errors import Unavailable
from kvfs.meta import keys
from kvfs.meta.records import namespace_root
from kvfs.meta.redis.calling import RetryingClient, locate
from kvfs.meta.redis.log import Proposal
from kvfs.meta.redis.scripts import Item, Script
from kvfs.meta.redis.slots import slot_of
from kvfs.meta.replica.follower import Follower
from kvfs.meta.shards.gatherer import (
    CLOSE,
    CLOSE_SHARD,
    DROP,
    ENTITLE,
    GATHER,
    OPEN,
    REOPEN_SHARD,
    TAKE_BACK,
    NamespaceGatherer,
)
from kvfs.meta.shards.mover import CHANGE_PLACE
from kvfs.tree import namespaces
from tests.cluster.waiting import wait_until
from tests.contract.hosts import NOW, TOP, Host
from tests.contract.redis_servers import RedisCluster
from tests.contract.shards.gathering import Site, catch_up, shard_of

STEPS = ("begin", "copy", "check", "close", "follow", "open")


@contextlib.contextmanager
def writing(site: Site, host: Host) -> Iterator[None]:
    """While a program on this node makes files, renames and removes them: none of its changes
    fails."""
    stopping, failures = threading.Event(), list[Exception]()

    def write() -> None:
        number = 0
        try:
            while not stopping.is_set():
                site.make(host, b"w%d" % number, behind=number % 2 == 1)
                if number % 5 == 3:
                    host.unlink(TOP, b"w%d" % (number - 3))
                    del site.files[b"w%d" % (number - 3)]
                if number % 5 == 4:
                    before, after = b"w%d" % (number - 3), b"r%d" % number
                    host.rename(TOP, before, TOP, after, behind=False)
                    site.files[after] = site.files.pop(before)
                number += 1
        except Exception as error:
            failures.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        stopping.set()
        writer.join()
    assert not failures


@pytest.mark.parametrize("steps", range(len(STEPS) + 1))
def test_a_namespace_is_gathered_under_writes_also_after_a_kill_at_each_step(
    steps: int, site: Site, cluster: RedisCluster
) -> None:
    async def some() -> None:
        moving = NamespaceGatherer(locate(site.url), 10.0, 1)
        for step in STEPS[:steps]:
            assert await getattr(moving, step)() in (None, True)
        moving.stop()

    with writing(site, site.one):
        trio.run(some)
        site.one.rename(TOP, b"f4", TOP, b"g4", behind=False)
        site.files[b"g4"] = site.files.pop(b"f4")
        site.gather_in_the_end(site.other)
    site.make(site.other, b"after")
    site.check()
    assert not cluster.owner(slot_of(site.prefix, 1)).call("EXISTS", f"{{{site.prefix}:1}}h")
    made = site.one.write(lambda t: namespaces.create(t, b"new", uid=0, gid=0, now=NOW))
    assert site.one.mirror.shard(made) == 0
    site.one.restart()
    site.check()
    if steps in (0, len(STEPS)):
        spread_again(site)


def spread_again(site: Site) -> None:
    """It has a shard anew, whose log is another one."""
    assert 1 in site.one.mirror.call(site.one.mirror.engine.spread)
    site.make(site.one, b"again")
    catch_up(site.other)
    assert site.other.find(TOP, b"again") == site.files[b"again"]
    site.make(site.other, b"more")
    assert 1 in site.gather(site.other)
    site.check()


def test_requests_that_come_again_and_late_ones_change_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, sent = RetryingClient.script, list[tuple[RetryingClient, Script, tuple[Item, ...]]]()
    ours = GATHER, ENTITLE, TAKE_BACK, CLOSE, CLOSE_SHARD, OPEN, CHANGE_PLACE, REOPEN_SHARD, DROP

    async def again(
        client: RetryingClient, script: Script, *arguments: Item, end: float | None = None
    ) -> object:
        if script in ours:
            sent.append((client, script, arguments))
            await run(client, script, *arguments)
        return await run(client, script, *arguments, end=end)

    def set_mark(host: Host, value: bytes) -> None:
        host.write(lambda t: t.put(keys.xattr(TOP, b"user.x"), value))

    async def move() -> None:
        moving = NamespaceGatherer(locate(site.url), 10.0, 1)
        await moving.begin()
        await moving.copy()
        await trio.to_thread.run_sync(set_mark, site.other, b"changed")
        await moving.follow()
        await late((TAKE_BACK,))
        await moving.check()
        assert await moving.close()
        await moving.follow()
        assert await moving.open()
        await late(ours)
        moving.stop()

    async def late(scripts: tuple[Script, ...]) -> None:
        for client, script, arguments in list(sent):
            if script in scripts:
                anew = RetryingClient(client.location, 10.0, shard_of(client))
                await run(anew, script, *arguments)
                anew.close()

    set_mark(site.one, b"before")
    monkeypatch.setattr(RetryingClient, "script", again)
    trio.run(move)
    monkeypatch.undo()
    site.make(site.one, b"after")
    site.check()
    value = site.other.mirror.read_now(lambda t: t.get(keys.xattr(TOP, b"user.x")))
    assert value == b"changed"


def test_a_commit_of_a_node_that_has_not_heard_of_it_is_refused(site: Site) -> None:
    """In the shard that was closed, and in the registry's until it takes over."""
    late = Proposal({}, (), {keys.xattr(TOP, b"late"): b"lost"}, ())
    shards = site.other.mirror.engine._shards
    apart, registry = shards.others[1].proposer, shards.top.proposer

    async def close() -> None:
        moving = NamespaceGatherer(locate(site.url), 10.0, 1)
        await moving.begin()
        assert await moving.close()
        moving.stop()

    trio.run(close)
    for proposer in (apart, registry):
        assert not site.other.mirror.call(lambda: proposer.propose(late))  # noqa: B023
    assert site.gather_in_the_end(site.one) == [1]
    with pytest.raises(Unavailable):
        site.other.mirror.call(lambda: apart.propose(late))
    assert site.other.mirror.read_now(lambda t: t.get(keys.xattr(TOP, b"late"))) is None
    site.check()


def test_a_node_that_was_away_has_all_of_it_when_it_is_back(site: Site) -> None:
    site.other.mirror.close()
    site.make(site.one, b"meanwhile")
    assert site.gather(site.one) == [1]
    site.make(site.one, b"since")
    site.other.start()
    site.check()


def test_a_node_that_does_not_hear_the_end_of_the_shard_reads_all_anew(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    catch, begun = Follower.catch_up, list[int]()
    deaf = site.other.mirror.engine._shards.others[1].follower

    async def catch_up_(follower: Follower) -> None:
        if follower is deaf:
            begun.append(1)
            raise Unavailable("its server is away")
        await catch(follower)

    monkeypatch.setattr(Follower, "catch_up", catch_up_)
    assert site.gather(site.one) == [1]
    site.make(site.one, b"since")
    wait_until(lambda: bool(begun) and is_whole(site.other), "it is read anew")
    site.check()


def is_whole(host: Host) -> bool:
    shards = host.mirror.engine._shards
    return shards.top.is_whole and not shards.others


def test_a_node_that_joins_while_a_namespace_is_gathered_has_all_of_it(
    site: Site, tmp_path: Path
) -> None:
    moving = NamespaceGatherer(locate(site.url), 10.0, 1)

    async def begin() -> None:
        await moving.begin()
        await moving.copy()
        moving.stop()

    trio.run(begin)
    site.one.unlink(TOP, b"f3")
    del site.files[b"f3"]
    third = Host(tmp_path / "third", site.url, 3, must_follow=lambda _: False)
    assert site.gather(site.one) == [1]
    catch_up(third)
    assert third.find(TOP, b"f3") is None
    assert [third.find(TOP, name) for name in site.files] == list(site.files.values())
    site.check()
    third.mirror.close()


def test_a_node_that_reads_all_anew_while_a_namespace_comes_back_has_all_of_it(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that came beside the log, behind what it had read, and a place that it never saw."""
    page, call, read = 4, RetryingClient.call, list[int]()

    async def gathering(client: RetryingClient, *command: Item, end: float | None = None) -> object:
        found = await call(client, *command, end=end)
        if command[0] == b"HSCAN" and command[-1] == page and shard_of(client) == 0:
            read.append(page)
            if len(read) == 2:
                assert await trio.to_thread.run_sync(site.gather, site.one) == [1]
        return found

    monkeypatch.setattr("kvfs.meta.replica.filling.filler._PAGE_KEYS", page)
    monkeypatch.setattr(RetryingClient, "call", gathering)
    third = Host(tmp_path / "third", site.url, 3, must_follow=lambda _: False)
    assert len(read) > 2
    assert [third.find(TOP, name) for name in site.files] == list(site.files.values())
    site.check()
    third.mirror.close()


def test_one_namespace_is_gathered_and_others_keep_their_shards(site: Site) -> None:
    number = site.one.write(lambda t: namespaces.create(t, b"kept", uid=0, gid=0, now=NOW))
    site.other.mirror.catch_up()
    assert site.gather(site.other, 1) == [1]
    site.one.mirror.catch_up()
    assert [site.one.mirror.shard(each) for each in (1, number)] == [0, number]
    assert site.gather(site.other, 1) == []
    made = site.one.write(lambda t: namespaces.create(t, b"new", uid=0, gid=0, now=NOW))
    assert site.one.mirror.shard(made) == made
    top = namespace_root(number)
    ino = site.one.create(top, b"name")
    site.one.close_file(ino)
    assert sorted(site.gather(site.other)) == [number, made]
    site.other.mirror.catch_up()
    assert site.other.find(top, b"name") == ino
    site.check()
