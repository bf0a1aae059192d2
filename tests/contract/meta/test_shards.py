"""Namespaces with shards of their own, on a real Redis cluster of three servers: each has a log,
and goes on while the server of another is away."""

import contextlib
import secrets
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest
import trio

from kvfs.base.errors import Conflict, NotEmpty, NotFound, Unavailable
from kvfs.cluster.job_lease import Claims
from kvfs.cluster.node_records import NodeRecord, put_node
from kvfs.meta import keys
from kvfs.meta.records import namespace_root
from kvfs.meta.redis.calling import RetryingClient, locate
from kvfs.meta.redis.log import Proposal
from kvfs.meta.redis.scripts import Item, Script
from kvfs.meta.redis.slots import slot_of
from kvfs.meta.replica.committer import Proposer
from kvfs.meta.shards import moves
from kvfs.meta.shards.mover import (
    BEGIN_LOG,
    CHANGE_PLACE,
    EMPTY,
    SHUT_OUT,
    TAKE,
    NamespaceMover,
)
from kvfs.meta.shards.shard_replica import ShardReplica
from kvfs.node.tasks.removed_node_gc import Removal
from kvfs.tree import namespaces, tree
from kvfs.tree.lifecycle import Evicted
from tests.contract.hosts import NOW, Host, two_hosts
from tests.contract.redis_servers import RedisCluster, killed


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with killed(RedisCluster(tmp_path_factory.mktemp("cluster"))) as cluster:
        for server in cluster.servers:
            server.call("CONFIG", "SET", "cluster-require-full-coverage", "no")
        yield cluster


@pytest.fixture
def hosts(cluster: RedisCluster, tmp_path: Path) -> Iterator[tuple[Host, Host, str]]:
    """Two nodes, and the prefix of their keys. New namespaces get shards: the first two, and the
    root, are on a server each."""
    while True:
        prefix = secrets.token_hex(4)
        owners = [cluster.owner(slot_of(prefix, shard)).port for shard in (0, 2, 3)]
        if len(set(owners)) == 3:
            break
    with two_hosts(tmp_path, f"{cluster.url}?prefix={prefix}") as (one, other):
        one.write(lambda t: t.put(keys.place(0), b""))
        yield one, other, prefix


def make(host: Host, name: bytes) -> int:
    return int(host.write(lambda t: namespaces.create(t, name, uid=0, gid=0, now=NOW)))


def look_up(host: Host, parent: int, name: bytes) -> int:
    host.mirror.call(lambda: host.mirror.engine.catch_up(parent >> 48))
    return int(host.mirror.read_now(lambda t: tree.lookup(t, parent, name))[0])


def test_files_of_two_namespaces(hosts: tuple[Host, Host, str], cluster: RedisCluster) -> None:
    one, other, prefix = hosts
    first, second = make(one, b"first"), make(one, b"second")
    tops = namespace_root(first), namespace_root(second)
    files = [one.create(top, b"name") for top in tops]
    for ino in files:
        one.close_file(ino)
    for top, ino in zip(tops, files, strict=True):
        assert look_up(other, 1, b"first") == tops[0]
        assert look_up(other, top, b"name") == ino
    other.rename(tops[0], b"name", tops[0], b"renamed", behind=False)
    assert look_up(one, tops[0], b"renamed") == files[0]
    for shard in (first, second):
        server = cluster.owner(slot_of(prefix, shard))
        assert server.call("HEXISTS", f"{{{prefix}:{shard}}}h", keys.inode(files[0])) == (
            shard == first
        )


def test_a_namespace_is_renamed_and_removed_by_another_node(hosts: tuple[Host, Host, str]) -> None:
    one, other, _ = hosts
    number = make(one, b"old")
    top = namespace_root(number)
    one.close_file(one.create(top, b"name"))
    assert look_up(other, 1, b"old") == top
    other.rename(1, b"old", 1, b"new", behind=False)
    assert look_up(one, 1, b"new") == top
    assert one.find(1, b"old") is None
    with pytest.raises(NotEmpty):
        other.rmdir(1, b"new")
    look_up(other, top, b"name")
    other.unlink(top, b"name")
    other.rmdir(1, b"new")
    one.mirror.catch_up()
    assert one.find(1, b"new") is None
    one.mirror.call(lambda: one.mirror.engine.catch_up(number))
    with pytest.raises(NotFound):
        one.create(top, b"late")
    assert make(one, b"new") != number


def test_a_server_that_is_gone_takes_its_namespaces_alone(
    hosts: tuple[Host, Host, str], cluster: RedisCluster
) -> None:
    one, other, prefix = hosts
    first, second = make(one, b"first"), make(one, b"second")
    kept, lost = namespace_root(first), namespace_root(second)
    there = one.create(lost, b"there")
    one.close_file(there)
    look_up(other, lost, b"there")
    for host in (one, other):
        for caller in host.mirror.engine._shards.others[second].callers:
            caller.deadline_s = 1.0
    server = cluster.owner(slot_of(prefix, second))
    server.kill()
    try:
        with pytest.raises(Unavailable):
            one.mkdir(lost, b"directory")
        with pytest.raises(Unavailable):
            look_up(other, lost, b"there")
        ino = one.create(kept, b"name")
        one.close_file(ino)
        assert look_up(other, kept, b"name") == ino
    finally:
        server.restart()


def test_a_removed_node_is_fenced_in_all_shards_that_can_be_reached_and_later_in_the_others(
    hosts: tuple[Host, Host, str], cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, prefix = hosts
    first, second = make(one, b"first"), make(one, b"second")
    for number in (first, second):
        look_up(other, 1, b"first")
        other.close_file(other.create(namespace_root(number), b"name"))
    run = ShardReplica.script

    async def away(shard: ShardReplica, script: Script, *arguments: Item) -> object:
        if shard.shard == first:
            raise Unavailable("its server is away")
        return await run(shard, script, *arguments)

    async def fence(removed: Sequence[NodeRecord]) -> None:
        await one.mirror.engine.fence([each.number for each in removed])

    record = NodeRecord(number=2, name="other", store="other", incarnation=0, state="removed")
    one.write(lambda t: put_node(t, record))
    server = cluster.owner(slot_of(prefix, 0))
    server.call("HSET", f"{{{prefix}:0}}s", "n:2", 1)  # as its removal leaves it
    removal = Removal(one.mirror, cast(Claims, None), _forget, fence)  # type: ignore[arg-type]
    monkeypatch.setattr(ShardReplica, "script", away)
    with pytest.raises(Unavailable, match="is away"):
        one.mirror.call(removal.fence)
    with pytest.raises(Unavailable, match="was removed"):
        other.mkdir(namespace_root(second), b"directory")
    other.mkdir(namespace_root(first), b"directory")
    monkeypatch.undo()
    one.mirror.call(removal.fence)
    with pytest.raises(Unavailable, match="was removed"):
        other.mkdir(namespace_root(first), b"late")


async def _forget(_evicted: Sequence[Evicted]) -> None:
    """There is no mount."""


def mover(host: Host, url: str) -> NamespaceMover:
    cluster = host.mirror.engine._applier.mark.cluster
    return NamespaceMover(locate(url), 10.0, cluster, [1])


def test_a_move_whose_answers_are_lost_and_whose_requests_come_late_too(
    cluster: RedisCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, top = secrets.token_hex(4), namespace_root(1)
    url, run = f"{cluster.url}?prefix={prefix}", RetryingClient.script
    taken = list[tuple[Item, ...]]()

    async def again(
        client: RetryingClient, script: Script, *arguments: Item, end: float | None = None
    ) -> object:
        if script is TAKE:
            taken.append(arguments)
        if script in (EMPTY, TAKE, SHUT_OUT, BEGIN_LOG, CHANGE_PLACE):
            await run(client, script, *arguments)
        return await run(client, script, *arguments, end=end)

    with two_hosts(tmp_path, url) as (one, other):
        one.close_file(one.create(top, b"name"))
        one.write(lambda t: t.put(keys.xattr(top, b"user.x"), b"before"))

        async def move() -> None:
            moving = mover(one, url)
            await moving.begin()
            await moving.copy()
            await trio.to_thread.run_sync(
                other.write, lambda t: t.put(keys.xattr(top, b"user.x"), b"changed")
            )
            await moving.follow()
            for late in list(taken):
                await run(moving._targets[keys.pack_u16(1)], TAKE, *late)
            await moving.check()
            space = keys.pack_u16(1)
            assert await moving.shut(space)
            await moving.follow()
            assert await moving.open(space)
            moving.close()

        monkeypatch.setattr(RetryingClient, "script", again)
        trio.run(move)
        monkeypatch.undo()
        one.close_file(one.create(top, b"after"))
        look_up(other, top, b"after")
        value = other.mirror.read_now(lambda t: t.get(keys.xattr(top, b"user.x")))
        assert value == b"changed"


STEPS = ("begin", "copy", "check", "shut", "follow", "open", "clean")


@pytest.mark.parametrize("steps", range(len(STEPS) + 1))
def test_a_namespace_is_moved_under_writes_also_after_a_kill_at_each_step(
    steps: int, cluster: RedisCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_moved = steps > STEPS.index("open")
    monkeypatch.setattr(moves, "PATIENCE_S", 60.0 if is_moved else 0.5)
    prefix = secrets.token_hex(4)
    url = f"{cluster.url}?prefix={prefix}"
    top = namespace_root(1)
    with two_hosts(tmp_path, url) as (one, other):
        files = {}
        for number in range(20):
            name = b"f%d" % number
            files[name] = one.create(top, name)
            one.close_file(files[name])
        one.unlink(top, b"f3")
        del files[b"f3"]

        async def some() -> None:
            moving = mover(one, url)
            for step in STEPS[:steps]:
                space = keys.pack_u16(1)
                arguments = {"shut": (space,), "open": (space,), "clean": ({space},)}
                await getattr(moving, step)(*arguments.get(step, ()))
            moving.close()

        async def all_of_it() -> None:
            moving = mover(other, url)
            try:
                await moving.move()
                await moving.clean({keys.pack_u16(1)})
            finally:
                moving.close()

        def move_in_the_end() -> None:
            """A slow machine may lose its patience with it, as with what was left half done."""
            while True:
                with contextlib.suppress(Conflict):
                    return trio.run(all_of_it)

        trio.run(some)
        files[b"behind"] = one.create(top, b"behind")
        one.close_file(files[b"behind"], behind=True)
        files[b"between"] = other.create(top, b"between")
        other.close_file(files[b"between"])
        one.rename(top, b"f4", top, b"g4", behind=False)
        files[b"g4"] = files.pop(b"f4")
        if not is_moved:
            move_in_the_end()
        files[b"after"] = one.create(top, b"after")
        one.close_file(files[b"after"])
        one.settle()
        for host in (one, other):
            for name, ino in files.items():
                assert look_up(host, top, name) == ino
            assert host.find(top, b"f3") is None
        server = cluster.owner(slot_of(prefix, 1))
        for ino in files.values():
            assert server.call("HEXISTS", f"{{{prefix}:1}}h", keys.inode(ino))
        one.restart()
        for name, ino in files.items():
            assert look_up(one, top, name) == ino


def test_the_registry_refuses_late_commits_of_a_namespace_whose_record_an_earlier_version_wrote(
    cluster: RedisCluster, tmp_path: Path
) -> None:
    prefix = secrets.token_hex(4)
    url = f"{cluster.url}?prefix={prefix}"
    top, space = namespace_root(1), keys.pack_u16(1)
    with two_hosts(tmp_path, url) as (one, other):
        one.close_file(one.create(top, b"name"))
        look_up(other, top, b"name")
        server = cluster.owner(slot_of(prefix, 0))
        server.call("HDEL", f"{{{prefix}:0}}s", "turn")

        async def shut() -> bool:
            moving = mover(one, url)
            await moving.begin()
            is_shut = await moving.shut(space)
            moving.close()
            return is_shut

        assert trio.run(shut)
        # A node that has not heard of it proposes as it did before.
        late = Proposal({}, (), {keys.xattr(top, b"late"): b"lost"}, ())
        assert not other.mirror.call(lambda: other.mirror.engine._shards.top.proposer.propose(late))
        values = f"{{{prefix}:0}}h"
        assert not server.call("HEXISTS", values, keys.xattr(top, b"late"))


def test_a_change_that_is_left_half_done_holds_up_what_it_touches_alone(
    hosts: tuple[Host, Host, str], cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, prefix = hosts
    kept, first = make(one, b"kept"), make(one, b"first")
    number, kept_root = (look_up(other, 1, name) for name in (b"first", b"kept"))
    assert number == namespace_root(first)
    propose = Proposer.propose

    async def dying(proposer: Proposer, given: Proposal, *, is_step: bool = False) -> bool:
        if is_step and proposer is not one.mirror.engine._shards.top.proposer:
            raise Unavailable("it died")
        return await propose(proposer, given, is_step=is_step)

    server = cluster.owner(slot_of(prefix, first))
    monkeypatch.setattr(Proposer, "propose", dying)
    with pytest.raises(Unavailable, match="it died"):
        one.rename(1, b"first", 1, b"renamed", behind=False)
    server.signal(signal.SIGSTOP)
    monkeypatch.undo()
    try:
        other.mirror.catch_up()
        other.write(lambda t: namespaces.set_policy(t, kept, now=NOW, capacity=1 << 30))
        other.write(lambda t: t.put(keys.user("somebody"), b"user"))
        other.mkdir(kept_root, b"directory")
        other.mirror.engine._shards.top.proposing.deadline_s = 1.0
        with pytest.raises(Unavailable, match=f"'first'.*127.0.0.1:{server.port}"):
            other.write(lambda t: namespaces.set_policy(t, first, now=NOW, capacity=1 << 30))
        with pytest.raises(Unavailable, match=f"'first'.*127.0.0.1:{server.port}"):
            make(other, b"second")
    finally:
        server.signal(signal.SIGCONT)
        other.mirror.engine._shards.top.proposing.deadline_s = 10.0
    other.write(lambda t: namespaces.set_policy(t, first, now=NOW, capacity=1 << 30))
    assert make(other, b"second")


@pytest.mark.parametrize("steps", [1, 2])
def test_what_a_node_began_in_two_shards_and_left_another_one_ends(
    steps: int, hosts: tuple[Host, Host, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, _ = hosts
    ours = {id(each.proposer) for each in [one.mirror.engine._shards.top]}
    done, propose = list[None](), Proposer.propose

    async def dying(proposer: Proposer, given: Proposal, *, is_step: bool = False) -> bool:
        shards = one.mirror.engine._shards
        ours.update(id(each.proposer) for each in shards.all)
        if is_step and id(proposer) in ours:
            if len(done) == steps:
                raise Unavailable("it died")
            done.append(None)
        return await propose(proposer, given, is_step=is_step)

    monkeypatch.setattr(Proposer, "propose", dying)
    with pytest.raises(Unavailable, match="it died"):
        make(one, b"first")
    number = make(other, b"second")
    found = other.find(1, b"first")
    assert (found is not None) == (steps == 2)
    monkeypatch.undo()
    one.mirror.catch_up()
    assert one.find(1, b"first") == found
    if found is None:
        found = namespace_root(make(one, b"first"))
    assert found != namespace_root(number)
    ino = other.create(look_up(other, 1, b"first"), b"name")
    other.close_file(ino)
    assert look_up(one, found, b"name") == ino
