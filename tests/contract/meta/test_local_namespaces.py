"""Namespaces whose names are each node's own: no other node, and no engine, hears of a file there,
and nothing that happens to nodes and engine loses, leaks or leaves any of it wrongly."""

import contextlib
import os
import secrets
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import pytest
import trio

from kvfs.base.errors import (
    CrossNamespace,
    NotEmpty,
    NotPermitted,
    NotSupported,
    Unavailable,
)
from kvfs.cluster.job_lease import Claims
from kvfs.cluster.node_records import NodeRecord
from kvfs.meta import engine_copy, keys
from kvfs.meta.engine import Transaction, apart, itself
from kvfs.meta.lmdb import open_engine
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.records import Flag, Holding, namespace_root, pack
from kvfs.meta.replica import process_transactions
from kvfs.meta.replica.local_namespaces import Then
from kvfs.meta.replica.local_transaction import LocalChange
from kvfs.node.tasks.removed_node_gc import Removal
from kvfs.tree import inodes, namespaces, tree
from kvfs.tree.copies import placements
from kvfs.tree.lifecycle import Evicted
from tests.contract.hosts import NOW, TOP, Host, two_hosts
from tests.contract.mirrors import everything, in_redis
from tests.contract.redis_servers import RedisServer

NS = 2
ROOT = namespace_root(NS)
Pairs = list[tuple[bytes, bytes]]


class Cluster(NamedTuple):
    """Two nodes with a namespace of this kind."""

    one: Host
    other: Host
    url: str
    server: RedisServer

    def shared(self) -> Pairs:
        """Everything that the engine has."""
        return in_redis(self.url)

    def forget_log(self) -> None:
        """Makes nodes that were away read everything anew."""
        prefix = self.url.partition("prefix=")[2]
        self.server.call("XTRIM", f"{{{prefix}:0}}x", "MAXLEN", 1)


@pytest.fixture
def cluster(server: RedisServer, tmp_path: Path) -> Iterator[Cluster]:
    url = f"{server.url}?prefix={secrets.token_hex(4)}"
    with two_hosts(tmp_path, url) as (one, other):
        one.write(
            lambda t: namespaces.create(
                t, b"own", kind="cache", coherence="peer", uid=0, gid=0, now=NOW
            )
        )
        other.mirror.catch_up()
        one.number(NS)
        other.number(NS)
        one.mirror.catch_up()
        yield Cluster(one, other, url, server)


def names_of(host: Host, directory: int = ROOT) -> list[bytes]:
    children = host.mirror.read_now(lambda t: tree.list_children(t, directory, b"", 100))
    return [each.name for each in children]


def usage(host: Host) -> tuple[int, int]:
    found = host.mirror.read_now(lambda t: namespaces.usage(t, NS))
    return found.bytes, found.inodes


def put(host: Host, name: bytes, directory: int = ROOT) -> int:
    ino = host.create(directory, name)
    host.close_file(ino, behind=True)
    return ino


def local(host: Host) -> Pairs:
    """Pairs of the namespace, as the host has it."""
    space = keys.pack_u16(NS)
    return [
        pair
        for pair in everything(host.mirror)
        if (pair[0][3:5] if pair[0][:1] == keys.HELD else pair[0][1:3]) == space
    ]


def dropped(host: Host, most: int = 3) -> None:
    """Has the host drop what is left of namespaces that were removed, a few keys at a time."""
    engine = host.mirror.engine
    while gone := engine.local_remains():
        engine.drop_local(gone[0], most)


def test_nobody_else_hears_of_a_file(cluster: Cluster) -> None:
    one, other = cluster.one, cluster.other
    before, trips = cluster.shared(), one.trips
    ino = put(one, b"a")
    exclusive = one.create(ROOT, b"b", exclusive=True)
    one.close_file(exclusive)
    one.rename(ROOT, b"a", ROOT, b"c")
    one.rename(ROOT, b"c", ROOT, b"b")  # over another
    below = one.mkdir(ROOT, b"d")
    put(one, b"e", below)
    one.unlink(below, b"e")
    one.rmdir(ROOT, b"d")
    one.write(lambda t: inodes.set_xattr(t, ino, b"user.a", b"1", 0, NOW))
    assert one.trips == trips
    assert cluster.shared() == before
    assert names_of(one) == [b"b"]
    assert one.find(ROOT, b"b") == ino
    assert one.inode(ino).flags & Flag.PUBLISHED
    other.mirror.catch_up()
    assert names_of(other) == []
    assert usage(other) == (0, 0)
    assert put(other, b"b") != ino
    assert usage(other) == (4096, 1)


def test_all_goes_on_without_the_engine(cluster: Cluster) -> None:
    one = cluster.one
    ino = put(one, b"a")
    cluster.server.signal(signal.SIGSTOP)
    try:
        put(one, b"b")
        one.rename(ROOT, b"a", ROOT, b"c")
        one.unlink(ROOT, b"b")
        made = one.mkdir(ROOT, b"d")
        with pytest.raises(NotEmpty):
            put(one, b"x", made)
            one.rmdir(ROOT, b"d")
        assert names_of(one) == [b"c", b"d"]
        assert one.find(ROOT, b"c") == ino
    finally:
        cluster.server.signal(signal.SIGCONT)


def test_a_restart_and_a_gap_of_the_log_keep_it(cluster: Cluster) -> None:
    one, other = cluster.one, cluster.other
    put(one, b"a")
    before = kept(one)
    one.restart()
    assert kept(one) == before
    one.mirror.close()
    for number in range(3):
        put(other, b"%d" % number, TOP)
    other.settle()
    cluster.forget_log()
    one.start()
    assert kept(one) == before
    assert one.find(TOP, b"2") is not None
    put(one, b"b")
    assert names_of(one) == [b"a", b"b"]
    assert usage(one) == (2 * 4096, 2)


def kept(host: Host) -> list[tuple[bytes, bytes]]:
    """What is its own, but for the numbers taken ahead, which each run takes anew."""
    return [pair for pair in local(host) if not pair[0].startswith(keys.COUNTER)]


@pytest.mark.parametrize("boot", [7, 0], ids=["power cut", "older image of the store"])
def test_a_number_that_was_given_out_and_taken_back_is_not_given_out_again(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boot: int
) -> None:
    """Other nodes may have the file by this number."""
    one = cluster.one
    one.mirror.call(one.mirror.local.sync)
    shutil.copytree(one.mirror.local.path, tmp_path / "on disk")
    lost = {one.number(NS) for _ in range(100)}
    one.mirror.close()
    shutil.rmtree(one.mirror.local.path)
    shutil.copytree(tmp_path / "on disk", one.mirror.local.path)
    if boot:
        monkeypatch.setattr(open_engine, "boot_of", lambda *_: boot)
    one.start()
    one._numbers.clear()
    assert lost.isdisjoint(one.number(NS) for _ in range(200))


def test_the_directory_itself_is_everybodys(cluster: Cluster) -> None:
    one, other = cluster.one, cluster.other
    put(one, b"a")
    changes = inodes.AttributeChanges(mode=0o700, mtime_ns=5)
    other.write(lambda t: inodes.set_attributes(t, ROOT, changes, NOW))
    other.write(lambda t: inodes.set_xattr(t, ROOT, b"user.a", b"1", 0, NOW))
    one.mirror.catch_up()
    assert (one.inode(ROOT).mode & 0o777, one.inode(ROOT).mtime_ns) == (0o700, 5)
    assert one.mirror.read_now(lambda t: inodes.get_xattr(t, ROOT, b"user.a")) == b"1"
    assert one.inode(ROOT).nlink == 2
    one.mkdir(ROOT, b"d")
    assert one.inode(ROOT).nlink == 2  # which it does not count
    assert one.inode(ROOT).mtime_ns == NOW


def test_nothing_is_changed_here_and_elsewhere_at_once(cluster: Cluster) -> None:
    one = cluster.one
    ino, shared = put(one, b"a"), put(one, b"s", TOP)
    one.settle()
    before = everything(one.mirror), cluster.shared()
    with pytest.raises(CrossNamespace):
        one.rename(ROOT, b"a", TOP, b"a")

    def both(t: object) -> None:
        for each in (ino, shared):
            inodes.set_attributes(t, each, inodes.AttributeChanges(mode=0o600), NOW)  # type: ignore[arg-type]

    with pytest.raises(CrossNamespace):
        one.write(both)
    with pytest.raises(CrossNamespace):  # from the other side
        one.write(lambda t: (t.put(keys.inode(shared), b""), t.put(keys.inode(ino), b"")))
    assert (everything(one.mirror), cluster.shared()) == before
    engine = one.mirror.engine
    assert apart(engine, [shared, ino, ino + 1], itself) == [[ino, ino + 1], [shared]]


def test_what_other_nodes_would_have_to_follow_is_refused(cluster: Cluster) -> None:
    one = cluster.one
    ino, _ = put(one, b"a"), one.mkdir(ROOT, b"d")
    with pytest.raises(NotPermitted, match="one name"):
        one.write(lambda t: tree.link(t, ino, ROOT, b"b", NOW))
    with pytest.raises(CrossNamespace, match="does not move"):
        one.rename(ROOT, b"d", ROOT, b"e", behind=False)
    one.write(lambda t: tree.rename(t, 1, b"own", 1, b"new", now=NOW, keep=lambda _: False))
    assert names_of(one) == [b"a", b"d"]
    for wrong in (
        {"media": ["shared:lustre"]},
        {"kind": "durable"},
        {"locks": "cluster"},
    ):
        with pytest.raises(NotSupported, match="--coherence peer"):
            one.write(lambda t, wrong=wrong: namespaces.set_policy(t, NS, now=NOW, **wrong))


@pytest.mark.parametrize("away", [False, True])
def test_a_removed_namespace_is_dropped_by_each_node(cluster: Cluster, away: bool) -> None:
    one, other = cluster.one, cluster.other
    put(one, b"a", one.mkdir(ROOT, b"d"))
    assert one.mirror.engine.local_remains() == []
    if away:
        one.mirror.close()
    other.write(lambda t: namespaces.remove(t, b"own", NOW))
    if away:
        for number in range(3):
            put(other, b"%d" % number, TOP)
        other.settle()
        cluster.forget_log()
        one.start()
    one.mirror.catch_up()
    assert one.mirror.engine.local_remains() == [NS]
    left = len(local(one))
    assert not one.mirror.engine.drop_local(NS, 3)
    one.restart()  # killed halfway
    assert len(local(one)) == left - 3
    dropped(one)
    dropped(other)
    one.restart()
    assert one.mirror.engine.local_remains() == []
    assert everything(one.mirror) == everything(other.mirror) == cluster.shared()
    assert local(one) == [(keys.counter(NS), dict(local(one))[keys.counter(NS)])]


def test_a_removed_namespace_is_removed_by_a_node_that_had_files(cluster: Cluster) -> None:
    one, other = cluster.one, cluster.other
    put(one, b"a")
    with pytest.raises(NotEmpty):
        one.write(lambda t: namespaces.remove(t, b"own", NOW))
    one.unlink(ROOT, b"a")
    one.write(lambda t: tree.rmdir(t, 1, b"own", NOW, lambda _: False))
    other.mirror.catch_up()
    for host in (one, other):
        dropped(host)
    assert everything(one.mirror) == everything(other.mirror) == cluster.shared()


def test_a_node_that_joins_again_under_another_number_has_none(
    cluster: Cluster, tmp_path: Path
) -> None:
    put(cluster.one, b"a")
    cluster.one.mirror.close()
    again = Host(tmp_path / "one", cluster.url, 3)
    try:
        again.number(NS)
        assert len(local(again)) == len(local(cluster.other))
        assert (names_of(again), usage(again)) == ([], (0, 0))
        put(again, b"b")
        assert names_of(again) == [b"b"]
    finally:
        again.mirror.close()
    cluster.one.start()


def test_other_processes_of_the_host_change_it_too(cluster: Cluster) -> None:
    one, other = cluster.one, cluster.other
    ino, trips = put(one, b"a"), one.trips

    def propose(packed: bytes) -> bool:
        proposal = process_transactions.unpack(packed)
        return bool(one.mirror.call(lambda: one.mirror.engine.propose(proposal)))

    def ask(fn: object) -> None:
        process_transactions.ask(one.mirror.local, fn, propose, most_bytes=1 << 20)  # type: ignore[arg-type]

    runs: list[int] = []

    def change(t: object) -> None:
        inodes.set_attributes(t, ino, inodes.AttributeChanges(mode=0o600), NOW)  # type: ignore[arg-type]
        if not runs:  # another commit comes in between
            one.rename(ROOT, b"a", ROOT, b"b")
        runs.append(1)

    ask(change)
    assert len(runs) == 2
    assert (one.inode(ino).mode & 0o777, one.find(ROOT, b"b")) == (0o600, ino)
    assert one.trips == trips
    with pytest.raises(CrossNamespace):
        ask(lambda t: (t.put(keys.inode(ino), b""), t.put(keys.inode(ROOT), b"")))
    with pytest.raises(NotEmpty):
        ask(lambda t: namespaces.remove(t, b"own", NOW))
    one.unlink(ROOT, b"b")
    for orphan in (ino,):
        one.write(lambda t, orphan=orphan: tree.reap(t, orphan))
    ask(lambda t: namespaces.remove(t, b"own", NOW))
    other.mirror.catch_up()
    assert other.find(1, b"own") is None


def test_a_cluster_with_nodes_of_the_version_before_has_none(cluster: Cluster) -> None:
    one = cluster.one
    one.write(lambda t: t.put(keys.VERSION, b"1"))
    with pytest.raises(NotSupported, match="finish-upgrade"):
        one.write(
            lambda t: namespaces.create(
                t, b"more", kind="cache", coherence="peer", uid=0, gid=0, now=NOW
            )
        )


def test_what_is_committed_here_is_told_once_others_may_see_it(
    server: RedisServer, tmp_path: Path
) -> None:
    url = f"{server.url}?prefix={secrets.token_hex(4)}"
    told: list[LocalChange] = []
    with two_hosts(tmp_path, url) as (one, _):
        one.mirror.close()

        def on_local(_t: Transaction, changes: Sequence[LocalChange]) -> Then:
            told.extend(changes)
            return lambda: None

        one.on_local = on_local
        one.start()
        one.write(
            lambda t: namespaces.create(
                t, b"own", kind="cache", coherence="peer", uid=0, gid=0, now=NOW
            )
        )
        put(one, b"s", TOP)
        one.number(NS)
        assert [each.key for each in told] == [keys.own_counter(NS, keys.pack_node(1))]
        told.clear()
        ino = one.create(ROOT, b"a")
        assert told == []  # nobody sees it yet
        one.close_file(ino, behind=True)
        assert keys.inode(ino) in [each.key for each in told]
        told.clear()
        one.unlink(ROOT, b"a")
        assert LocalChange(keys.file_entry(ROOT, b"a"), keys.pack_u64(ino), None) in told


def test_a_change_that_fails_leaves_nothing(cluster: Cluster) -> None:
    one = cluster.one
    put(one, b"a")
    before = local(one)

    def fails(t: object) -> None:
        tree.unlink(t, ROOT, b"a", NOW, lambda _: False)  # type: ignore[arg-type]
        raise Unavailable(os.strerror(5))

    with pytest.raises(Unavailable):
        one.write(fails)
    assert local(one) == before


def test_what_a_removed_node_held_is_let_go_here_too(cluster: Cluster) -> None:
    one, removed = cluster.one, keys.pack_node(7)
    here, away = put(one, b"here"), put(one, b"away")

    def taken_over(t: Transaction) -> None:
        for ino in (here, away):
            t.put(keys.placement(ino, removed), pack(Holding(version=0)))
            t.put(keys.held(removed, ino), b"")
        placements.let_go(t, away, t.node)  # its data did not come

    one.write(taken_over)
    evicted: list[bytes] = []

    async def forget(gone: Sequence[Evicted]) -> None:
        evicted.extend(each.inode.name for each in gone)

    async def fence(_removed: Sequence[NodeRecord]) -> None:
        """There is one shard."""

    before = cluster.shared()
    removal = Removal(one.mirror, cast(Claims, None), forget, fence)  # type: ignore[arg-type]
    trio.run(removal.clear_own, 7)
    assert (names_of(one), len(evicted)) == ([b"here"], 1)
    assert one.mirror.read_now(lambda t: placements.held_by(t, removed, 0, 9)) == []
    assert cluster.shared() == before


def test_a_copy_leaves_out_what_is_one_nodes_own(cluster: Cluster, tmp_path: Path) -> None:
    put(cluster.one, b"a")
    cluster.one.settle()
    part = engine_copy.whole()
    with contextlib.closing(EmbeddedEngine(tmp_path / "copy")) as target:
        target.transact_now(lambda t: t.put(part.mark, b""))
        engine_copy.copy(cluster.one.mirror.local, target, part, lambda _: None)
        copied = target.read_now(lambda t: list(t.scan(b"", b"\xff")))
    shared = [pair for pair in cluster.shared() if pair[0] not in part.apart]
    assert [pair for pair in copied if pair[0] != part.mark] == shared
