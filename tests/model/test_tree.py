"""Random operations on names, done to the engine and to plain objects: the same is refused, and the
same is left; and the records keep their books (links, usage, lists) at every step."""

import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvfs.base.errors import KvfsError
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import ROOT_INODE, Flag, Inode, namespace_of, namespace_root
from kvfs.tree import inodes, lifecycle, namespaces, tree
from tests.contract.direct import Direct
from tests.contract.memory_engine import MemoryEngine
from tests.contract.mirrors import Mirror
from tests.contract.redis_servers import RedisCluster, RedisServer, killed
from tests.model.plain_tree import Node, PlainTree, Refusal

AnyEngine = MemoryEngine | Direct | Mirror

BOOT = 7
PICK = st.integers(0, 1 << 16)
NAMES = st.sampled_from([b"a", b"b", b"c", b"a0", b"\xff"])
KINDS = st.sampled_from([stat.S_IFDIR, stat.S_IFREG, stat.S_IFREG, stat.S_IFLNK])


def new_inode(kind: int, now: int) -> Inode:
    return Inode(
        mode=kind | 0o755,
        uid=0,
        gid=0,
        nlink=0,
        atime_ns=now,
        mtime_ns=now,
        ctime_ns=now,
        parent=0,
        name=b"",
        boot=BOOT if kind == stat.S_IFREG else 0,
    )


class Trees(RuleBasedStateMachine):
    """The machine; every rule is one transaction at a later time."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = self.make_engine()
        self.now = 1
        self.engine.transact_now(lambda t: namespaces.format(t, self.now, 0, 0))
        self.plain = PlainTree(ROOT_INODE, self.now)
        self.regular: set[int] = set()

    def make_engine(self) -> AnyEngine:
        return MemoryEngine()

    def teardown(self) -> None:
        self.engine.close()

    @initialize()
    def some_names(self) -> None:
        """Two namespaces, each with a file, an empty directory, and a directory with a file."""
        for space in (b"a", b"b"):
            self.add(0, space, stat.S_IFDIR)
            top = self.position(self.plain.root.children[space])
            for name, kind in ((b"a", stat.S_IFREG), (b"b", stat.S_IFDIR), (b"c", stat.S_IFDIR)):
                self.add(top, name, kind)
            self.add(
                self.position(self.plain.root.children[space].children[b"c"]), b"a", stat.S_IFREG
            )

    def position(self, directory: Node) -> int:
        """What to give `directory` to get this one."""
        return [node for node in self.plain.nodes.values() if node.directory].index(directory)

    def keep(self, ino: int) -> bool:
        return ino in self.plain.held

    def directory(self, pick: int) -> Node:
        """Any directory, now and then one that was removed but is held."""
        found = [node for node in self.plain.nodes.values() if node.directory]
        return found[pick % len(found)]

    def place(self, pick: int, name: bytes) -> tuple[Node, bytes]:
        """Two times in three a name that is there, else any name in any directory."""
        taken = [(node, child) for node in self.plain.nodes.values() for child in node.children]
        if pick % 3 and taken:
            return taken[pick // 3 % len(taken)]
        return self.directory(pick // 3), name

    def node(self, pick: int) -> Node:
        return list(self.plain.nodes.values())[pick % len(self.plain.nodes)]

    def file(self, pick: int) -> Node | None:
        """A regular file, also one that is an orphan."""
        found = [node for node in self.plain.nodes.values() if node.ino in self.regular]
        return found[pick % len(found)] if found else None

    def both(self, fn: Callable[[Transaction], Any], refusal: Refusal) -> Any:
        """Do it to the engine; it must be refused just as the plain tree refused it."""
        try:
            result = self.engine.transact_now(fn)
        except KvfsError as error:
            assert type(error) is refusal, f"{error!r}, but the plain tree said {refusal}"
            return None
        assert refusal is None, f"done, but the plain tree said {refusal}"
        return result

    def fresh(self, parent: Node) -> int:
        """A new inode number in the parent's namespace (which may be gone, if it is held)."""
        space = namespace_of(parent.ino)
        if not self.engine.read_now(lambda t: t.get(keys.namespace(space))):
            return parent.ino + self.now  # refused anyway
        return self.engine.transact_now(lambda t: namespaces.allocate_inodes(t, space, 1))

    @rule(at=PICK, name=NAMES, kind=KINDS)
    def add(self, at: int, name: bytes, kind: int) -> None:
        self.now += 1
        parent = self.directory(at)
        ino = self.fresh(parent)
        if parent.ino == ROOT_INODE:
            counter = self.engine.read_now(lambda t: t.get(keys.counter(0)))
            assert counter is not None
            ino = namespace_root(keys.unpack_u64(counter))
        refusal = self.plain.add(parent, name, ino, kind == stat.S_IFDIR, self.now)
        inode = new_inode(kind, self.now)
        made = self.both(lambda t: tree.add(t, parent.ino, name, ino, inode), refusal)
        if refusal is None:
            assert made == ino
            if kind == stat.S_IFREG:
                self.regular.add(ino)

    @rule(which=PICK, at=PICK, name=NAMES)
    def link(self, which: int, at: int, name: bytes) -> None:
        self.now += 1
        node = self.file(which) or self.node(which)
        if which % 8 == 0:
            node = self.node(which)
        parent = self.directory(at)
        refusal = self.plain.link(node, parent, name, self.now)
        self.both(lambda t: tree.link(t, node.ino, parent.ino, name, self.now), refusal)

    @rule(at=PICK, name=NAMES)
    def unlink(self, at: int, name: bytes) -> None:
        self.now += 1
        parent, name = self.place(at, name)
        node = parent.children.get(name)
        refusal = self.plain.unlink(parent, name, self.now)
        gone = self.both(lambda t: tree.unlink(t, parent.ino, name, self.now, self.keep), refusal)
        if refusal is None:
            assert node is not None
            assert gone.ino == node.ino
            assert gone.dropped == (node.ino not in self.plain.nodes)

    @rule(at=PICK, name=NAMES)
    def rmdir(self, at: int, name: bytes) -> None:
        self.now += 1
        parent, name = self.place(at, name)
        refusal = self.plain.rmdir(parent, name, self.now)
        self.both(lambda t: tree.rmdir(t, parent.ino, name, self.now, self.keep), refusal)

    @rule(at=PICK, name=NAMES, to=PICK, new=NAMES, flags=st.sampled_from([0, 0, 0, 1, 3]))
    def rename(self, at: int, name: bytes, to: int, new: bytes, flags: int) -> None:
        self.now += 1
        source, name = self.place(at, name)
        target, new = self.place(to, new)
        refusal = self.plain.rename(source, name, target, new, flags, self.now)
        self.both(
            lambda t: tree.rename(
                t, source.ino, name, target.ino, new, flags=flags, now=self.now, keep=self.keep
            ),
            refusal,
        )

    @rule(at=PICK, name=NAMES, to=PICK, new=NAMES)
    def exchange(self, at: int, name: bytes, to: int, new: bytes) -> None:
        self.rename(at, name, to, new, 2)

    @rule(at=PICK, name=NAMES)
    def replace(self, at: int, name: bytes) -> None:
        self.now += 1
        parent, name = self.place(at, name)
        ino = self.fresh(parent)
        refusal = self.plain.replace(parent, name, ino, self.now)
        inode = new_inode(stat.S_IFREG, self.now)
        self.both(
            lambda t: tree.replace(t, parent.ino, name, ino, inode, self.now, self.keep), refusal
        )
        if refusal is None:
            self.regular.add(ino)

    @rule(which=PICK, blocks=st.integers(0, 1000))
    def publish(self, which: int, blocks: int) -> None:
        self.now += 1
        node = self.file(which)
        if node is None:
            return
        self.plain.publish(node, blocks, self.now)
        self.engine.transact_now(
            lambda t: lifecycle.publish(
                t,
                node.ino,
                size=blocks * 512,
                blocks=blocks,
                mtime_ns=self.now,
                ctime_ns=self.now,
                boot=BOOT,
            )
        )

    @rule(which=PICK, stale=st.booleans())
    def seal(self, which: int, stale: bool) -> None:
        node = self.file(which)
        if node is None:
            return
        sealed = self.engine.transact_now(
            lambda t: lifecycle.seal(
                t,
                node.ino,
                tree.read_inode(t, node.ino),
                version=0,
                size=node.blocks * 512,
                blocks=node.blocks,
                mtime_ns=node.mtime - stale,
                ctime_ns=node.mtime,
                checksum=b"sum",
            )
        )
        assert sealed == (node.published and not stale)
        node.sealed = node.sealed or sealed

    @rule(which=PICK)
    def reopen(self, which: int) -> None:
        node = self.file(which)
        if node is not None:
            self.engine.transact_now(lambda t: lifecycle.reopen(t, node.ino))
            node.sealed = False

    @rule(which=PICK)
    def evict(self, which: int) -> None:
        self.now += 1
        node = self.file(which)
        if node is None:
            return
        names = set(node.names)
        evicted = self.engine.transact_now(lambda t: lifecycle.evict(t, node.ino, self.now))
        assert (set(evicted.names) if evicted else set()) == names
        self.plain.evict(node, self.now)

    @rule(which=PICK)
    def hold(self, which: int) -> None:
        self.plain.held.add(self.node(which).ino)

    @rule(which=PICK)
    def release(self, which: int) -> None:
        ino = self.node(which).ino
        self.engine.transact_now(lambda t: tree.reap(t, ino))
        self.plain.release(ino)

    @invariant()
    def trees_are_equal(self) -> None:
        for directory in self.plain.walk(self.plain.root):
            listed = self.engine.read_now(
                lambda t, at=directory.ino: tree.list_children(t, at, b"", 100)
            )
            assert {child.name: child.ino for child in listed} == {
                name: node.ino for name, node in directory.children.items()
            }

    @invariant()
    def records_are_right(self) -> None:
        def fn(t: Transaction) -> None:
            found = [keys.unpack_u64(key, 1) for key, _ in t.scan(b"i", b"j")]
            assert found == sorted(self.plain.nodes)
            for node in self.plain.nodes.values():
                inode = tree.read_inode(t, node.ino)
                assert (inode.nlink, inode.mtime_ns, inode.ctime_ns, inode.blocks) == (
                    node.nlink,
                    node.mtime,
                    node.ctime,
                    node.blocks,
                )
                assert stat.S_ISDIR(inode.mode) == node.directory
                self.check_links(t, node, inode)
                if node.ino in self.regular:
                    assert bool(inode.flags & Flag.PUBLISHED) == node.published
                    assert bool(inode.flags & Flag.SEALED) == node.sealed

        self.engine.read_now(fn)

    def check_links(self, t: Transaction, node: Node, inode: Inode) -> None:
        prefix = keys.backlinks(node.ino)
        backlinks = {
            (keys.unpack_u64(key, 9), key[17:]) for key, _ in t.scan(prefix, keys.after(prefix))
        }
        assert backlinks == (node.names if len(node.names) > 1 else set())
        if node.names:
            assert (inode.parent, inode.name) in node.names
            found, _ = tree.resolve(t, tree.path_of(t, node.ino))
            assert found == node.ino
        elif node is not self.plain.root:
            assert inode.parent == 0
        assert set(tree.links(t, node.ino, inode)) == (
            node.names or ({(ROOT_INODE, b"")} if node is self.plain.root else set())
        )

    @invariant()
    def lists_are_right(self) -> None:
        regular = {ino: node for ino, node in self.plain.nodes.items() if ino in self.regular}
        unsealed = [ino for ino in sorted(regular) if not regular[ino].sealed]
        unpublished = [ino for ino in sorted(regular) if not regular[ino].published]

        def fn(t: Transaction) -> None:
            assert lifecycle.unsealed(t, 0, 1000) == unsealed
            assert lifecycle.unpublished(t, 0, 1000) == unpublished
            assert lifecycle.orphans(t, 0, 1000) == sorted(self.plain.orphans)

        self.engine.read_now(fn)

    @invariant()
    def usage_is_right(self) -> None:
        for listed in self.engine.read_now(namespaces.list_all):
            node = self.plain.nodes[namespace_root(listed.id)]
            assert node.names == {(ROOT_INODE, listed.namespace.name)}
            inside = [
                each
                for each in self.plain.nodes.values()
                if namespace_of(each.ino) == listed.id and each is not node
            ]
            assert listed.usage.inodes == len(inside)
            assert listed.usage.bytes == inodes.BLOCK * sum(each.blocks for each in inside)


class DistantTrees(Trees):
    """On a server that is started for the tests, each example under a prefix of its own."""

    url: ClassVar[str]

    def make_engine(self) -> AnyEngine:
        return Direct(f"{self.url}?prefix={secrets.token_hex(8)}")


Trees.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestTrees = Trees.TestCase


def test_trees_on_redis(tmp_path: Path) -> None:
    with killed(RedisServer(tmp_path)) as server:
        run_distant(server.url)


def test_trees_on_a_mirror(tmp_path: Path) -> None:
    """What the machine reads is the mirror, what it changes is committed by the server."""

    class MirroredTrees(DistantTrees):
        def make_engine(self) -> AnyEngine:
            name = secrets.token_hex(8)
            mirror = Mirror(tmp_path / name, f"{self.url}?prefix={name}")
            # As a lone node's: in a cluster a file goes when the last host has dropped its data.
            mirror.local.node = b""
            return mirror

    with killed(RedisServer(tmp_path / "redis")) as server:
        run_distant(server.url, MirroredTrees)


def test_trees_on_a_redis_cluster(tmp_path: Path) -> None:
    with killed(RedisCluster(tmp_path)) as cluster:
        run_distant(cluster.url)


def run_distant(url: str, machine: type[DistantTrees] = DistantTrees) -> None:
    few = settings(max_examples=4, stateful_step_count=30, deadline=None)
    run_state_machine_as_test(type("Trees", (machine,), {"url": url}), settings=few)
