"""Metadata whose namespaces have shards of their own are copied, and recreated from what the nodes
have: they lie together afterwards, until they are spread again."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import msgspec
import pytest

from kvfs.base.errors import Conflict, Unavailable
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.redis.calling import RetryingClient
from kvfs.meta.redis.restoring import DISCARD, DISCARD_SHARD, TOGETHER
from kvfs.meta.redis.scripts import Item, Script
from kvfs.meta.redis.slots import slot_of
from kvfs.meta.replica.direct_engine import DirectEngine
from kvfs.meta.replica.replica_mark import read_mark, write_mark
from kvfs.tree import namespaces
from kvfs.tree.metadata_copy import copy_all
from tests.cluster.waiting import wait_until
from tests.contract.admin.test_rebuild_cluster import MirrorNode, Site, names
from tests.contract.redis_servers import RedisCluster, RedisServer, killed
from tests.integration.harness import kvfs


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with killed(RedisCluster(tmp_path_factory.mktemp("cluster"))) as cluster:
        for server in cluster.servers:
            server.call("CONFIG", "SET", "cluster-require-full-coverage", "no")
        yield cluster


@pytest.fixture
def site(cluster: RedisCluster, tmp_path: Path) -> Iterator[Site]:
    """Two nodes with files in two namespaces that were spread."""
    made = Site(cast(RedisServer, cluster), tmp_path)
    made.a.write(made.kept, "one", b"1" * 1000)
    made.a.write(made.fast, "two", b"2")
    spread(made.a)
    made.b.read(lambda _t: None)
    made.b.write(made.kept, "three", b"3")
    yield made
    made.stop()


def spread(node: MirrorNode) -> list[int]:
    assert node.mirror is not None
    found: list[int] = node.mirror.call(node.mirror.engine.spread)
    return found


def have_all(site: Site) -> None:
    """Both nodes start, have all files, and go on."""
    for node in (site.a, site.b):
        node.start()
    for node in (site.a, site.b):
        catch_up(node, site.kept)
        assert names(node, site.kept) == ["one", "three"]
        assert names(node, site.fast) == ["two"]
    site.b.write(site.kept, "four", b"4")
    catch_up(site.a, site.kept)
    assert names(site.a, site.kept) == ["four", "one", "three"]


def catch_up(node: MirrorNode, space: int) -> None:
    mirror = node.mirror
    assert mirror is not None
    mirror.call(lambda: mirror.engine.catch_up(space))


def position(node: MirrorNode, space: int) -> int:
    """Where the log of this namespace's shard stands, as this node has read it."""
    catch_up(node, space)
    mark = node.read(lambda t: read_mark(t, space))
    assert mark is not None
    return mark.position


def shards_of(node: MirrorNode, *spaces: int) -> list[int]:
    assert node.mirror is not None
    return [node.mirror.shard(each) for each in spaces]


@pytest.mark.parametrize("steps", range(4))
def test_a_copy_lies_together_and_comes_back_also_after_a_kill_at_each_step(
    steps: int, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shards_of(site.a, site.kept, site.fast) == [site.kept, site.fast]
    former = position(site.a, site.kept)
    site.stop()
    lone = EmbeddedEngine(tmp_path / "lone")
    engine = DirectEngine(site.url)
    copied = copy_all(engine, lone, replace=False, progress=lambda _: None)
    assert copied.keys
    engine.close()
    done = list[None]()
    script = RetryingClient.script

    def step() -> None:
        if len(done) == steps:
            raise Unavailable("killed")
        done.append(None)

    async def dying(
        client: RetryingClient, asked: Script, *arguments: Item, end: float | None = None
    ) -> object:
        if asked in (DISCARD, DISCARD_SHARD, TOGETHER):
            step()
        return await script(client, asked, *arguments, end=end)

    engine = DirectEngine(site.url)
    monkeypatch.setattr(RetryingClient, "script", dying)
    with pytest.raises(Unavailable, match="killed"):
        engine.discard_shards()
    monkeypatch.undo()
    engine.close()

    engine = DirectEngine(site.url)
    engine.discard_shards()
    again = copy_all(lone, engine, replace=True, progress=lambda _: None)
    assert again.digest == copied.digest
    engine.close()
    lone.close()
    have_all(site)
    assert shards_of(site.b, site.kept, site.fast) == [0, 0]
    if steps == 0:
        assert sorted(spread(site.a)) == [site.kept, site.fast]
        catch_up(site.b, site.kept)
        assert names(site.b, site.kept) == ["four", "one", "three"]
        beyond = position(site.b, site.kept)
        assert beyond > former, "a node that was away would take one log for the other"


@pytest.mark.parametrize("is_all", [True, False])
def test_servers_that_lost_everything_have_it_again_from_the_nodes(
    is_all: bool, site: Site, cluster: RedisCluster
) -> None:
    for node in (site.a, site.b):
        catch_up(node, site.kept)
    site.stop()
    lost = cluster.servers if is_all else [cluster.owner(slot_of(site.prefix, site.kept))]
    for server in lost:
        server.call("FLUSHALL")
    site.a.rebuild(replace=not is_all)
    assert site.b.rebuild(finish=True).lost == 0
    have_all(site)
    assert shards_of(site.b, site.kept, site.fast) == [0, 0]


def test_the_newest_replica_of_each_shard_counts(site: Site, cluster: RedisCluster) -> None:
    assert site.b.mirror is not None
    catch_up(site.b, site.kept)
    following = site.b.mirror.engine._shards.others[site.kept]

    async def stop() -> None:
        following.end()

    site.b.mirror.call(stop)
    site.a.write(site.kept, "newer", b"5")
    site.a.stop()
    site.b.do(lambda t: namespaces.set_policy(t, site.fast, now=0, capacity=1 << 40))
    site.stop()
    for server in cluster.servers:
        server.call("FLUSHALL")
    site.a.rebuild()
    site.b.rebuild(finish=True)
    site.b.start()
    assert names(site.b, site.kept) == ["newer", "one", "three"]
    assert site.b.read(lambda t: namespaces.get(t, site.fast)).capacity == 1 << 40


def test_a_namespace_that_a_node_does_not_follow_comes_from_those_that_do_or_is_empty(
    site: Site, cluster: RedisCluster
) -> None:
    bare = site.a.do(lambda t: namespaces.create(t, b"bare", kind="durable", uid=0, gid=0, now=0))
    for node, kept in ((site.a, {site.kept, site.fast}), (site.b, set[int]())):
        catch_up(node, site.kept)
        let_go(node, kept)
    site.stop()
    for server in cluster.servers:
        server.call("FLUSHALL")
    site.b.rebuild()
    assert site.a.rebuild(finish=True).lost == 0
    assert site.a.bare == [b"bare"]
    have_all(site)
    assert names(site.b, bare) == []
    site.b.write(bare, "new", b"6")
    catch_up(site.a, bare)
    assert names(site.a, bare) == ["new"]


@pytest.mark.parametrize("is_being_read", [False, True])
def test_shards_that_a_node_could_not_put_back_are_not_discarded(
    is_being_read: bool, site: Site
) -> None:
    stop_without_fast(site, is_being_read=is_being_read)
    before = site.all()
    with pytest.raises(Conflict, match=r"all of fast, .*--replace-unfollowed"):
        site.a.rebuild(replace=True)
    assert site.all() == before
    site.a.rebuild(replace=True, is_partial=True)
    site.b.rebuild(finish=True)
    site.a.start()
    assert names(site.a, site.kept) == ["one", "three"]


@pytest.mark.parametrize("is_being_read", [False, True])
def test_a_store_that_lacks_a_namespace_is_no_source_of_a_copy(
    is_being_read: bool, site: Site, tmp_path: Path
) -> None:
    stop_without_fast(site, is_being_read=is_being_read)
    source = str(site.a.store.root)
    for asked in ([], ["--namespace", "fast"]):
        done = kvfs("engine", "copy", source, str(tmp_path / "all"), *asked)
        assert (done.returncode, done.stdout) == (4, "")
        assert "does not have all of fast: copy from the engine's URL" in done.stderr
    done = kvfs("engine", "copy", source, str(tmp_path / "kept"), "--namespace", "kept")
    assert done.returncode == 0, done.stderr


def stop_without_fast(site: Site, *, is_being_read: bool) -> None:
    """Stops the nodes when A does not have all of `fast`: it has let that go, or is reading it
    anew."""
    catch_up(site.a, site.kept)
    catch_up(site.a, site.fast)
    if not is_being_read:
        let_go(site.a, {site.kept})
    site.stop()
    if is_being_read:
        begin_reading(site.a, site.fast)


def begin_reading(node: MirrorNode, space: int) -> None:
    """As a node leaves it that is killed while it reads a namespace anew."""
    with contextlib.closing(EmbeddedEngine(node.store.meta)) as local:

        def fn(t: Transaction) -> None:
            mark = read_mark(t, space)
            assert mark is not None
            write_mark(t, msgspec.structs.replace(mark, filled=b"i"), space)

        local.transact_now(fn)


def let_go(node: MirrorNode, kept: set[int]) -> None:
    """Has a node follow these namespaces alone."""
    assert node.mirror is not None
    following = node.mirror.engine._shards.following
    following._parts = following._parts._replace(must_follow=kept.__contains__)

    async def is_done() -> bool:
        await following.let_go_unused()
        return not following.others.keys() - kept

    wait_until(lambda: bool(node.mirror and node.mirror.call(is_done)), "the others are let go")
