"""Nodes that follow the namespaces that they use, on a real Redis cluster of three servers."""

import base64
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from kvfs.base.errors import NoSpace, NotFound, Unavailable, Unreached
from kvfs.datastore.files import DataFiles
from kvfs.datastore.index import Index
from kvfs.datastore.layout import create_store
from kvfs.meta import delegations, keys
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.records import namespace_root
from kvfs.meta.redis.slots import slot_of
from kvfs.meta.replica.filling.staging import StagedPairs
from kvfs.meta.replica.follower import Follower
from kvfs.meta.shards.demand import LOOKS
from kvfs.meta.shards.following import Following
from kvfs.meta.shards.remote_reads import RemoteReads
from kvfs.node.tasks.stale_data_gc import Strays
from kvfs.session.replica_transactions import ReplicaTransactions
from kvfs.tree import namespaces, tree
from kvfs.vfs.inode_holders import Holders
from tests.cluster.waiting import wait_until
from tests.contract.hosts import NOW, Host, two_hosts
from tests.contract.mirrors import no_space
from tests.contract.redis_servers import RedisCluster, killed
from tests.fault.impatience import SHORT_S

FILES = 40


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with killed(RedisCluster(tmp_path_factory.mktemp("cluster"))) as cluster:
        for server in cluster.servers:
            server.call("CONFIG", "SET", "cluster-require-full-coverage", "no")
        yield cluster


class _NoIndex:
    def get(self, _ino: int) -> None:
        """It has none."""

    def remove(self, _inos: list[int]) -> None:
        """There is nothing."""


class Site:
    """A writer with a namespace of files in a shard of its own, and a node that joins later."""

    def __init__(self, writer: Host, url: str, path: Path, prefix: str) -> None:
        self.writer = writer
        self.prefix = prefix
        self.url = url
        self.number = self.make(b"far")
        self.top = namespace_root(self.number)
        self.files = {b"f%d" % number: 0 for number in range(FILES)}
        for name in self.files:
            self.files[name] = writer.create(self.top, name)
            writer.close_file(self.files[name])
        self.held = set[int]()
        """Namespaces of which the node has data files."""
        self.node = Host(path / "node", url, 3, must_follow=self.held.__contains__)

    def make(self, name: bytes, kind: str = "durable") -> int:
        return int(
            self.writer.write(
                lambda t: namespaces.create(t, name, kind=kind, uid=0, gid=0, now=NOW)
            )
        )

    @property
    def following(self) -> Following:
        return self.node.mirror.engine._shards.following

    def is_followed(self) -> bool:
        return self.number in self.following.others

    def is_whole(self) -> bool:
        return self.is_followed() and self.following.others[self.number].is_whole

    def read(self, fn: Callable[[Transaction], Any]) -> Any:
        return self.node.mirror.call(lambda: self.node.mirror.engine.read(fn))

    def look_up(self, name: bytes) -> int:
        return int(self.read(lambda t: tree.lookup(t, self.top, name))[0])

    def names_here(self) -> int:
        """Names of the namespace that the node's file has."""
        prefix = keys.entries(self.top)
        local = self.node.mirror.local
        return local.read_now(lambda t: len(list(t.scan_keys(prefix, keys.after(prefix)))))

    def list_names(self) -> list[bytes]:
        prefix = keys.entries(self.top)
        listed = self.read(lambda t: list(t.scan_keys(prefix, keys.after(prefix))))
        return [key[len(prefix) :] for key in listed]

    def let_go(self) -> None:
        """A round in which nothing is asked."""
        self.node.mirror.call(self.following.let_go_unused)


@pytest.fixture
def site(cluster: RedisCluster, tmp_path: Path) -> Iterator[Site]:
    while True:  # the namespace is on another server than the registry
        prefix = secrets.token_hex(4)
        if len({cluster.owner(slot_of(prefix, shard)).port for shard in (0, 2)}) == 2:
            break
    url = f"{cluster.url}?prefix={prefix}"
    with two_hosts(tmp_path, url) as (one, _):
        one.write(lambda t: t.put(keys.place(0), b""))
        made = Site(one, url, tmp_path, prefix)
        yield made
        made.node.mirror.close()


def test_a_look_up_in_a_namespace_that_is_not_followed_brings_that_name_alone(site: Site) -> None:
    asked = site.node.trips
    assert site.look_up(b"f7") == site.files[b"f7"]
    assert site.node.trips - asked == 2  # the name; the inode with its marks
    with pytest.raises(NotFound):
        site.look_up(b"absent")
    # It is as new as the look-up.
    site.writer.rename(site.top, b"f7", site.top, b"renamed", behind=False)
    assert site.look_up(b"renamed") == site.files[b"f7"]
    with pytest.raises(NotFound):
        site.look_up(b"f7")
    assert not site.is_followed()
    assert site.names_here() == 0
    listed = site.read(lambda t: {each.id: each for each in namespaces.list_all(t)})
    assert listed[site.number].usage.inodes == FILES


def test_a_namespace_that_is_being_made_does_not_stand_for_one_that_is_not_followed(
    site: Site,
) -> None:
    following = site.following

    async def make() -> None:
        made = following.open(site.number + 1)  # as its maker does, before its place is known
        made.is_new = True
        await following.whole(made)

    site.node.mirror.call(make)
    assert site.look_up(b"f7") == site.files[b"f7"]
    assert sorted(site.list_names()) == sorted(site.files)


def test_data_files_of_two_namespaces_that_are_not_whole_are_judged_by_each_ones_server(
    site: Site, tmp_path: Path
) -> None:
    near = site.make(b"near")
    inos = [site.writer.number(number) for number in (site.number, near)]
    for ino in inos:
        site.writer.write(lambda t: t.put(keys.reserved(ino), t.node))  # noqa: B023
    site.node.mirror.catch_up()
    (tmp_path / "data").mkdir()
    files = DataFiles(tmp_path / "data")
    for ino in inos:
        os.close(files.create(ino, 0))
    nobodys = inos[0] + 1_000
    os.close(files.create(nobodys, 0))
    strays = Strays(
        cast(Engine, site.node.mirror.engine), files, cast(Index, _NoIndex()), Holders()
    )
    site.node.mirror.call(lambda: strays.sweep(time.time_ns() + 1_000_000_000))
    assert not site.following.others
    assert sorted(files.scan()) == [(ino, 0) for ino in sorted(inos)]


def test_a_process_beside_the_node_reads_two_namespaces_at_each_ones_server(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = namespace_root(site.make(b"near"))
    ino = site.writer.create(near, b"name")
    site.writer.close_file(ino)
    site.node.mirror.catch_up()
    engine = site.node.mirror.engine

    def ask(_: ReplicaTransactions, method: str, params: dict[str, Any]) -> list[str | None]:
        assert method == "fetch"
        names = [base64.b64decode(each) for each in params["keys"]]
        found = site.node.mirror.call(lambda: engine.fetch(names))
        return [None if each is None else base64.b64encode(each).decode() for each in found]

    monkeypatch.setattr(ReplicaTransactions, "_ask", ask)
    transactions = ReplicaTransactions(create_store(tmp_path / "store"))
    found = transactions.read_known(
        site.node.mirror.local,
        lambda t: [tree.lookup(t, *each)[0] for each in ((site.top, b"f7"), (near, b"name"))],
    )
    assert found == [site.files[b"f7"], ino]


def test_many_look_ups_a_listing_or_a_change_begin_to_follow(site: Site) -> None:
    for _ in range(LOOKS):
        site.look_up(b"f7")
    wait_until(site.is_whole, "it is followed")
    assert site.names_here() == FILES


def test_look_ups_at_once_are_answered_while_the_node_begins_to_follow(site: Site) -> None:
    engine, found = site.node.mirror.engine, list[int]()

    async def one() -> None:
        found.append((await engine.read(lambda t: tree.lookup(t, site.top, b"f7")))[0])

    async def all_of_them() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(2 * LOOKS):
                nursery.start_soon(one)

    site.node.mirror.call(all_of_them)
    assert found == [site.files[b"f7"]] * 2 * LOOKS


def test_a_look_up_during_which_the_namespace_has_come_is_as_new_as_the_look_up(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    ino = site.files[b"f7"]
    mark = keys.xattr(ino, b"user.x")
    fetch, came = RemoteReads.fetch, list[int]()

    async def once_whole(
        reads: RemoteReads, shard: int, names: Sequence[bytes]
    ) -> dict[bytes, bytes | None]:
        if not came:
            came.append(shard)
            await site.following.ready(shard)
            await trio.to_thread.run_sync(site.writer.write, lambda t: t.put(mark, b"new"))
        return await fetch(reads, shard, names)

    # It is whole as of before the change, and hears nothing by itself.
    monkeypatch.setattr(Follower, "_follow", lambda _: trio.sleep_forever())
    monkeypatch.setattr(RemoteReads, "fetch", once_whole)
    assert site.read(lambda t: (tree.lookup(t, site.top, b"f7")[0], t.get(mark))) == (ino, b"new")
    assert came


def test_a_listing_waits_until_the_namespace_is_here(site: Site) -> None:
    assert sorted(site.list_names()) == sorted(site.files)
    assert site.is_whole()
    site.node.restart()
    assert site.is_whole()


@pytest.mark.parametrize("is_sorted", [True, False])
def test_what_is_read_of_a_namespace_is_progress(
    site: Site, monkeypatch: pytest.MonkeyPatch, is_sorted: bool
) -> None:
    """Callers wait as long as there is any, also where there is no space to sort what is read."""
    if not is_sorted:
        monkeypatch.setattr(StagedPairs, "add", no_space)
    assert sorted(site.list_names()) == sorted(site.files)
    found = site.following.others[site.number]
    filled = found.applier.filled
    assert filled > FILES

    async def read_anew() -> None:
        found.follower.begin_anew()
        await site.following.ready(site.number)

    site.node.mirror.call(read_anew)
    assert sorted(site.list_names()) == sorted(site.files)
    assert found.applier.filled > filled + FILES


def test_what_a_node_holds_it_follows_from_its_join_on(site: Site, tmp_path: Path) -> None:
    site.node.mirror.close()
    holder = Host(tmp_path / "holder", site.url, 4)
    assert holder.find(site.top, b"f7") == site.files[b"f7"]
    holder.mirror.close()
    site.node.start()


def test_a_change_follows_and_others_see_it(site: Site) -> None:
    ino = site.node.create(site.top, b"new")
    site.node.close_file(ino)
    assert site.is_whole()
    site.writer.mirror.call(lambda: site.writer.mirror.engine.catch_up(site.number))
    assert site.writer.find(site.top, b"new") == ino


def test_what_is_not_used_is_let_go_but_for_what_this_node_holds(site: Site) -> None:
    site.node.write(lambda t: delegations.take(t, site.number))
    site.held.add(site.number)
    site.let_go()
    site.let_go()
    assert site.is_whole()
    site.held.clear()
    site.let_go()  # its delegation goes first
    delegation = keys.delegation(site.number, keys.pack_node(3))
    local = site.node.mirror.local
    wait_until(lambda: local.read_now(lambda t: t.get(delegation)) is None, "it is given back")
    site.let_go()
    site.let_go()
    assert not site.is_followed()
    assert site.names_here() == 0
    assert site.look_up(b"f7") == site.files[b"f7"]
    assert sorted(site.list_names()) == sorted(site.files)


def test_a_node_that_dies_while_it_lets_go_goes_on_with_that(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.list_names()
    monkeypatch.setattr("kvfs.meta.shards.following._PAGE_KEYS", 20)
    drop = Following._drop_some

    def dying(following: Following, shard: int, t: Transaction) -> bool:
        if len(dropped) == 2:
            raise Unavailable("it dies")
        dropped.append(shard)
        return drop(following, shard, t)

    dropped: list[int] = []
    monkeypatch.setattr(Following, "_drop_some", dying)
    site.let_go()
    with pytest.raises(Unavailable, match="it dies"):
        site.let_go()
    monkeypatch.setattr(Following, "_drop_some", drop)
    assert site.look_up(b"f7") == site.files[b"f7"]
    site.node.restart()
    assert not site.is_followed()
    wait_until(lambda: site.names_here() == 0, "the rest is dropped")
    assert site.look_up(b"f7") == site.files[b"f7"]


def test_a_full_disk_holds_up_letting_go_alone(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    drop, is_full = Following._drop_some, threading.Event()

    def full_at_first(following: Following, shard: int, t: Transaction) -> bool:
        if not is_full.is_set():
            is_full.set()
            raise NoSpace("the disk is full")
        return drop(following, shard, t)

    monkeypatch.setattr(Following, "_drop_some", full_at_first)
    monkeypatch.setattr("kvfs.meta.shards.following.IDLE_S", 0.05)
    site.list_names()
    site.node.restart()
    wait_until(is_full.is_set, "it is let go")
    wait_until(lambda: site.names_here() == 0, "it is dropped")
    assert site.look_up(b"f7") == site.files[b"f7"]


def test_a_removed_node_is_fenced_in_a_namespace_that_the_asked_node_does_not_follow(
    site: Site, cluster: RedisCluster
) -> None:
    ino = site.writer.create(site.top, b"late")
    registry = cluster.owner(slot_of(site.prefix, 0))
    registry.call("HSET", f"{{{site.prefix}:0}}s", "n:1", 1)  # as its removal leaves it
    site.node.mirror.call(lambda: site.node.mirror.engine.fence([1]))
    with pytest.raises(Unavailable, match="was removed"):
        site.writer.close_file(ino)


def test_without_its_server_a_strict_name_is_an_error_and_a_cached_one_a_miss(
    site: Site, cluster: RedisCluster
) -> None:
    server = cluster.owner(slot_of(site.prefix, site.number))
    site.following.remote._deadline_s = SHORT_S
    server.signal(signal.SIGSTOP)
    try:
        with pytest.raises(Unavailable):
            site.look_up(b"f7")
    finally:
        server.signal(signal.SIGCONT)
    number = site.make(b"cached", "cache")
    top = namespace_root(number)
    site.node.mirror.catch_up()
    server = cluster.owner(slot_of(site.prefix, number))
    if server is cluster.owner(slot_of(site.prefix, 0)):
        pytest.skip("it is the registry's server too")
    server.signal(signal.SIGSTOP)
    try:
        with pytest.raises(Unreached):
            site.read(lambda t: tree.lookup(t, top, b"name"))
    finally:
        server.signal(signal.SIGCONT)


def test_a_namespace_is_renamed_and_removed_where_it_is_not_followed(site: Site) -> None:
    site.node.rename(1, b"far", 1, b"near", behind=False)
    assert site.writer.write(lambda t: namespaces.by_name(t, b"near")[0]) == site.number
    for name in site.files:
        site.writer.unlink(site.top, name)
    site.writer.rmdir(1, b"near")
    for number in (0, site.number):
        site.node.mirror.call(lambda: site.node.mirror.engine.catch_up(number))  # noqa: B023
    assert site.node.find(1, b"near") is None
    with pytest.raises(NotFound):
        site.look_up(b"f7")
