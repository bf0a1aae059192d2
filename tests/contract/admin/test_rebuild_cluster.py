"""A cluster's engine lost its data, and gets them back from what its nodes have."""

import os
import re
import secrets as randomness
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar, cast

import pytest
import trio

from kvfs.admin.rebuild_cluster import Came, Rebuilding
from kvfs.base.errors import Exists, Unavailable
from kvfs.cluster import node_identity
from kvfs.cluster.membership import About, joined
from kvfs.datastore import layout
from kvfs.datastore.files import DataFiles
from kvfs.datastore.index import NAME, Index
from kvfs.meta import keys
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.records import namespace_root
from kvfs.meta.replica.direct_engine import DirectEngine
from kvfs.node.tasks.sealer import Sealer
from kvfs.node.tasks.stale_data_gc import Strays
from kvfs.tree import lifecycle, namespaces, tree
from kvfs.tree.copies import placements, replica_counts
from kvfs.tree.inodes import read_inodes
from kvfs.tree.rebuilt_records import DirectoryOwner
from kvfs.vfs.content_versions import next_version
from kvfs.vfs.inode_holders import Holders
from tests.contract.mirrors import Mirror
from tests.contract.redis_servers import RedisServer, killed
from tests.contract.small_node import new_inode

T = TypeVar("T")
OWNER = DirectoryOwner(0, 0, 1_700_000_000_000_000_000)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with killed(RedisServer(tmp_path_factory.mktemp("redis"))) as server:
        yield server


class MirrorNode:
    """A node's store, mirror and data files."""

    def __init__(self, root: Path, url: str, secret_of: Path | None = None) -> None:
        self.url = url
        self.store = layout.create_store(root)
        if secret_of is not None:
            shutil.copy(secret_of / node_identity.SECRETS, root / node_identity.SECRETS)
        self.mirror: Mirror | None = None
        self.bare: list[bytes] = []
        """The namespaces that no node had whole, once this one has finished."""

    def start(self) -> None:
        """Join, and read everything."""

        async def join() -> int:
            async with joined(self.store, self.url, About(name=self.store.root.name)) as member:
                self.cluster = member.cluster
                self.incarnation = member.incarnation
                return member.node

        self.number = trio.run(join)
        self.mirror = Mirror(
            self.store.meta,
            self.url,
            node=self.number,
            incarnation=self.incarnation,
            cluster=self.cluster,
        )
        self.files = DataFiles(self.store.data)
        self.index = Index(self.mirror.local.database(NAME))

    def stop(self) -> None:
        if self.mirror is not None:
            self.index.flush()
            self.files.close()
            self.mirror.close()
            self.mirror = None

    def do(self, fn: Callable[[Transaction], T]) -> T:
        assert self.mirror is not None
        result: T = self.mirror.transact_now(fn)
        return result

    def read(self, fn: Callable[[Transaction], T]) -> T:
        assert self.mirror is not None
        self.mirror.catch_up()
        return self.mirror.read_now(fn)

    def write(self, space: int, name: str, content: bytes, *, is_sealed: bool = True) -> int:
        """A file that is closed here."""
        assert self.mirror is not None
        ino = self.do(lambda t: namespaces.allocate_inodes(t, space, 1))
        top = namespace_root(space)
        self.do(lambda t: tree.add(t, top, name.encode(), ino, new_inode()))
        fd = self.files.create(ino, 0)
        os.write(fd, content)
        stat = os.fstat(fd)
        os.close(fd)
        self.do(
            lambda t: lifecycle.publish(
                t,
                ino,
                size=stat.st_size,
                blocks=stat.st_blocks,
                mtime_ns=stat.st_mtime_ns,
                ctime_ns=stat.st_ctime_ns,
                boot=0,
            )
        )
        if is_sealed:
            sealer = Sealer(cast(Engine, self.mirror), self.files, self.index, lambda _: False)
            trio.run(sealer.settle)
        return ino

    def begin_writing(self, ino: int, more: bytes) -> None:
        """As a program that has it open when everything ends."""
        self.do(lambda t: lifecycle.reopen(t, ino))
        with Path(self.files.path(ino, 0)).open("ab") as file:
            file.write(more)

    def take_copy(self, ino: int, other: "MirrorNode") -> None:
        """As a reader or a replica has it."""
        fd = self.files.create(ino, 0)
        os.close(fd)
        shutil.copyfile(other.files.path(ino, 0), self.files.path(ino, 0))
        self.do(lambda t: placements.hold(t, ino, 0))

    def rebuild(
        self, *, finish: bool = False, replace: bool = False, is_partial: bool = False
    ) -> Came:
        local = EmbeddedEngine(self.store.meta)
        try:
            found = node_identity.read_secrets(self.store.root / node_identity.SECRETS)
            assert found is not None
            turn = Rebuilding(self.store, local, self.url, found)
            came = turn.run(OWNER, lambda _: None, replace=replace, is_partial=is_partial)
            if finish:
                self.bare = turn.finish()
            return came
        finally:
            local.close()

    def lose_mirror(self) -> None:
        shutil.rmtree(self.store.meta)
        self.store.meta.mkdir()


class Site:
    """An engine and two nodes."""

    def __init__(self, server: RedisServer, root: Path) -> None:
        self.server = server
        self.prefix = randomness.token_hex(4)
        self.url = f"{server.url}?prefix={self.prefix}"
        self.a = MirrorNode(root / "a", self.url)
        self.a.start()
        self.b = MirrorNode(root / "b", self.url, root / "a")
        self.b.start()
        self.a.do(lambda t: namespaces.format(t, time.time_ns(), 0, 0))
        self.kept = self.a.do(lambda t: namespaces.create(t, b"kept", uid=0, gid=0, now=OWNER.now))
        self.fast = self.a.do(
            lambda t: namespaces.create(
                t, b"fast", kind="cache", replicas=1, uid=0, gid=0, now=OWNER.now
            )
        )
        self.b.read(lambda _t: None)

    def stop(self) -> None:
        self.a.stop()
        self.b.stop()

    def lose_engine(self) -> None:
        self.stop()
        self.server.call("FLUSHALL")

    def all(self) -> dict[bytes, bytes]:
        """What the engine holds."""
        engine = DirectEngine(self.url)
        try:
            return dict(engine.read_now(lambda t: list(t.scan(b"", b"\xff"))))
        finally:
            engine.close()


@pytest.fixture
def site(server: RedisServer, tmp_path: Path) -> Iterator[Site]:
    made = Site(server, tmp_path)
    yield made
    made.stop()


def names(node: MirrorNode, space: int) -> list[str]:
    found = node.read(lambda t: tree.list_children(t, namespace_root(space), b"", 100))
    return [each.name.decode() for each in found]


@pytest.mark.parametrize("is_sealed", [False, True])
def test_what_is_being_written_keeps_its_name(site: Site, is_sealed: bool) -> None:
    """The replica knows it, and the node's start finds how long the file is."""
    ino = site.b.write(site.kept, "log", b"closed", is_sealed=is_sealed)
    top = namespace_root(site.kept)
    now = time.time_ns()
    site.b.do(lambda t: tree.rename(t, top, b"log", top, b"moved", now=now, keep=lambda _: True))
    site.b.begin_writing(ino, b" and more")
    site.a.read(lambda _t: None)
    site.lose_engine()
    site.a.rebuild()
    came = site.b.rebuild(finish=True)
    assert (came.counts["without_name"], came.counts["files"], came.lost) == (0, 1, 0)
    site.a.start()
    site.b.start()
    assert names(site.a, site.kept) == ["moved"]
    assert Path(site.b.files.path(ino, 0)).read_bytes() == b"closed and more"
    assert site.b.read(lambda t: lifecycle.unsealed(t, 0, 10)) == [ino]


@pytest.mark.parametrize("is_begun", [False, True])
def test_what_was_about_to_be_published_keeps_its_name(site: Site, is_begun: bool) -> None:
    """The content has the name of its version before the engine hears of it, and may have lost that
    of the one before when nobody heard of it any more."""
    ino = site.a.write(site.kept, "log", b"closed", is_sealed=False)
    site.a.begin_writing(ino, b" and more")
    version = next_version(0, keys.pack_node(site.a.number))
    os.link(site.a.files.path(ino, 0), site.a.files.path(ino, version))
    if not is_begun:
        site.a.files.unlink(ino, 0)
    site.lose_engine()
    came = site.a.rebuild(finish=True)
    assert (came.counts["without_name"], came.lost) == (0, 0)
    site.a.start()
    assert names(site.a, site.kept) == ["log"]
    (inode,) = site.a.read(lambda t: read_inodes(t, [ino]))
    assert inode is not None
    assert (inode.version, inode.size) == (version, len(b"closed and more"))
    assert Path(site.a.files.path(ino, version)).read_bytes() == b"closed and more"


def test_what_is_not_sealed_yet_stays_with_its_record(site: Site) -> None:
    """Nothing but the record says what it is."""
    for space in (site.kept, site.fast):
        for name, content in (("empty", b""), ("some", b"some")):
            site.a.write(space, name, content, is_sealed=False)
    site.lose_engine()
    came = site.a.rebuild(finish=True)
    assert (came.counts["without_name"], came.counts["files"], came.lost) == (0, 4, 0)
    site.a.start()
    for space in (site.kept, site.fast):
        assert names(site.a, space) == ["empty", "some"]
    assert len(list(site.a.files.scan())) == 4


def test_mirrors_put_all_back_and_nodes_go_on(site: Site) -> None:
    one = site.a.write(site.kept, "one", b"1" * 1000)
    site.b.read(lambda _t: None)
    two = site.b.write(site.fast, "two", b"2")
    site.a.do(lambda t: tree.link(t, one, namespace_root(site.kept), b"linked", OWNER.now))
    site.b.read(lambda _t: None)
    site.a.read(lambda _t: None)
    before = site.all()
    site.lose_engine()
    site.a.rebuild()
    last = site.b.rebuild(finish=True)
    assert last.lost == 0
    assert site.all() == before
    site.a.start()
    site.b.start()
    assert names(site.a, site.kept) == ["linked", "one"]
    again = site.b.write(site.kept, "again", b"3")
    assert names(site.a, site.kept) == ["again", "linked", "one"]
    assert again not in (one, two)
    assert site.a.number == 1
    assert site.b.number == 2


def test_the_newest_mirror_counts_in_whatever_order(site: Site) -> None:
    site.a.write(site.kept, "one", b"1")
    site.b.read(lambda _t: None)
    site.b.stop()
    two = site.a.write(site.kept, "two", b"2")
    site.a.do(lambda t: namespaces.set_policy(t, site.kept, now=0, capacity=1 << 40))
    site.lose_engine()
    assert site.b.rebuild().is_newest
    assert site.a.rebuild().is_newest
    assert not site.b.rebuild(finish=True).is_newest
    site.a.start()
    assert names(site.a, site.kept) == ["one", "two"]
    assert site.a.read(lambda t: namespaces.get(t, site.kept)).capacity == 1 << 40
    assert site.a.read(lambda t: replica_counts.whole_holders(t, two, 0)) == [1]


def test_without_mirrors_data_files_of_all_nodes_tell(site: Site) -> None:
    one = site.a.write(site.kept, "one", b"1" * 1000)
    site.b.read(lambda _t: None)
    site.b.write(site.kept, "two", b"2")
    site.b.take_copy(one, site.a)
    shutil_description(site.a, site.b, one)
    site.lose_engine()
    site.a.lose_mirror()
    site.b.lose_mirror()
    assert site.a.rebuild().position == -1
    assert site.b.rebuild(finish=True).counts["files"] == 2
    site.a.start()
    assert names(site.a, site.kept) == ["one", "two"]
    assert site.a.read(lambda t: replica_counts.whole_holders(t, one, 0)) == [1, 2]
    ino, inode = site.a.read(lambda t: tree.resolve(t, b"/kept/one"))
    assert (ino, inode.size) == (one, 1000)


def shutil_description(of: MirrorNode, to: MirrorNode, ino: int) -> None:
    """A copy describes itself as its original does."""
    said = os.getxattr(of.files.path(ino, 0), "user.kvfs")
    os.setxattr(to.files.path(ino, 0), "user.kvfs", said)
    times = of.files.stat(ino, 0)
    os.utime(to.files.path(ino, 0), ns=(times.st_atime_ns, times.st_mtime_ns))


def test_what_was_written_after_the_mirror_stood_still_is_found_by_its_data_file(
    site: Site,
) -> None:
    site.a.write(site.kept, "one", b"1")
    site.b.read(lambda _t: None)
    site.b.stop()
    site.a.write(site.kept, "two", b"2")
    site.lose_engine()
    site.a.lose_mirror()
    assert site.b.rebuild().is_newest
    site.a.rebuild(finish=True)
    site.b.start()
    assert names(site.b, site.kept) == ["one", "two"]


def test_what_a_node_has_not_any_more_is_taken_back(site: Site) -> None:
    ino = site.a.write(site.kept, "one", b"1")
    site.a.files.unlink(ino, 0)
    site.lose_engine()
    assert site.a.rebuild(finish=True).lost == 1
    site.a.start()
    assert site.a.read(lambda t: replica_counts.whole_holders(t, ino, 0)) == []
    assert names(site.a, site.kept) == ["one"]


def test_many_that_a_node_has_not_any_more_are_taken_back_together(site: Site) -> None:
    """By few requests, since each takes as long as the way to the engine."""
    inos = [site.a.write(site.kept, f"f{number}", b"1") for number in range(40)]
    for ino in inos:
        site.a.files.unlink(ino, 0)
    site.lose_engine()
    site.server.call("CONFIG", "RESETSTAT")
    assert site.a.rebuild(finish=True).lost == len(inos)
    about = site.server.call("INFO", "commandstats").decode()
    requests = sum(map(int, re.findall(r"cmdstat_eval(?:sha)?:calls=(\d+)", about)))
    assert requests < len(inos)
    site.a.start()
    assert site.a.read(lambda t: placements.held_by(t, t.node, 0, 100)) == []


def test_until_the_last_turn_the_engine_is_neither_whole_nor_empty(site: Site) -> None:
    site.a.write(site.kept, "one", b"1")
    site.lose_engine()
    site.a.rebuild()
    engine = DirectEngine(site.url)
    try:
        assert engine.read_now(lambda t: t.get(keys.VERSION)) is None
        assert engine.read_now(lambda t: t.get(keys.copying(0))) is not None
    finally:
        engine.close()


def test_an_engine_that_has_its_metadata_is_left_alone(site: Site) -> None:
    site.a.write(site.kept, "one", b"1")
    before = site.all()
    site.stop()
    with pytest.raises(Exists, match="has its metadata"):
        site.a.rebuild()
    assert site.all() == before


def test_an_engine_that_went_back_is_replaced_when_asked_to(site: Site) -> None:
    site.a.write(site.kept, "one", b"1")
    names_of = [f"{{{site.prefix}:0}}{kind}" for kind in "hzsx"]
    old = [site.server.call("DUMP", name) for name in names_of]
    site.a.write(site.kept, "two", b"2")
    site.stop()
    for name, value in zip(names_of, old, strict=True):
        site.server.call("RESTORE", name, "0", value, "REPLACE")
    assert site.a.rebuild(replace=True, finish=True).is_newest
    site.a.start()
    assert names(site.a, site.kept) == ["one", "two"]


def test_a_mirror_that_took_no_part_is_read_anew(site: Site) -> None:
    two = site.b.write(site.fast, "two", b"2")
    site.b.stop()
    site.a.read(lambda _t: None)
    site.a.write(site.kept, "one", b"1")
    site.lose_engine()
    site.a.rebuild(finish=True)
    site.a.start()
    with pytest.raises(Unavailable):
        trio.run(_join, site.b)
    assert site.b.rebuild().counts["files"] == 1
    site.b.start()
    assert names(site.b, site.kept) == ["one"]
    assert site.b.read(lambda t: replica_counts.whole_holders(t, two, 0)) == [2]


def test_what_only_a_late_node_knew_is_kept(site: Site) -> None:
    """Its mirror gave way to what the others had, and no record names its file any more."""
    site.a.stop()
    site.b.write(site.kept, "later", b"acknowledged by b alone")
    site.b.stop()
    site.lose_engine()
    site.a.rebuild(finish=True)
    site.b.rebuild()
    site.b.start()
    assert names(site.b, site.kept) == []
    strays = Strays(cast(Engine, site.b.mirror), site.b.files, site.b.index, Holders())
    trio.run(strays.sweep, time.time_ns() + 1_000_000_000)
    [left] = site.b.files.quarantined()
    assert Path(left.path).read_bytes() == b"acknowledged by b alone"


async def _join(node: MirrorNode) -> None:
    async with joined(node.store, node.url, About(name="b")):
        pass
