"""A cluster for tests of its keepers: nodes that share metadata in memory and ask each other by
calling, on a clock of the test's. What a node holds of a file is its placement, nothing else."""

import contextlib
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

import trio

from kvfs.base.errors import KvfsError, NoSpace, Unavailable
from kvfs.datastore.index import Index, Sealed
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag, Inode, Namespace, namespace_of, namespace_root, unpack_namespace
from kvfs.node.tasks.copier import ADOPT, TAKE, Copies, LocalReadEngine
from kvfs.node.tasks.drainer import TakenBlocks
from kvfs.node.tasks.rebalancer import Evening
from kvfs.node.tasks.replica_keeper import Keeper
from kvfs.node.tasks.sync_acknowledger import Acknowledging
from kvfs.policy.cluster_snapshot import ClusterSnapshot, Host
from kvfs.policy.eviction import headroom
from kvfs.tree import lifecycle, namespaces, tree
from kvfs.tree.copies import placements, replica_counts
from kvfs.tree.inodes import read_inode
from tests.contract.memory_engine import MemoryEngine, MemoryTransaction

T = TypeVar("T")
GIB = 1 << 30
CAPACITY = 1000 * GIB


class Seat:
    """The engine as one node has it."""

    immediate = False
    reads_immediate = False

    def __init__(self, shared: MemoryEngine, node: int, gone: Callable[[set[bytes]], None]) -> None:
        """`gone` is told of placements that went."""
        self._shared = shared
        self.gone = gone
        self._node = keys.pack_node(node)

    def shard(self, namespace_id: int) -> int:  # noqa: ARG002
        return 0

    def is_local(self, namespace_id: int) -> bool:  # noqa: ARG002
        return False

    def _on(self, fn: Callable[[Transaction], T]) -> Callable[[Transaction], T]:
        def run(t: Transaction) -> T:
            t.node = self._node
            return fn(t)

        return run

    async def read(self, fn: Callable[[Transaction], T]) -> T:
        return await self._shared.read(self._on(fn))

    async def transact(self, fn: Callable[[Transaction], T]) -> T:
        gone: set[bytes] = set()

        def run(t: Transaction) -> T:
            result = self._on(fn)(t)
            writes = cast(MemoryTransaction, t).writes
            gone.clear()
            gone.update(key for key, value in writes.items() if key[:1] == b"p" and value is None)
            return result

        result = await self._shared.transact(run)
        self.gone(gone)
        return result

    def read_now(self, fn: Callable[[Transaction], T]) -> T:
        return self._shared.read_now(self._on(fn))

    def namespace(self, number: int) -> Namespace | None:
        value = self._shared.read_now(lambda t: t.get(keys.namespace(number)))
        return None if value is None else unpack_namespace(value)

    def transact_now(self, fn: Callable[[Transaction], T]) -> T:
        return self._shared.transact_now(self._on(fn))

    async def sync(self, namespace_id: int | None = None) -> None:  # noqa: ARG002
        await self._shared.sync()

    def close(self) -> None:
        pass


async def _caught_up(_namespace_id: int) -> None:
    await trio.lowlevel.checkpoint()


async def _no_blocks(
    _inos: Sequence[int], _afford: Callable[[int], Awaitable[None]]
) -> TakenBlocks:
    raise AssertionError("no namespace here is kept by its nodes")


def _look(t: Transaction, ino: int) -> tuple[Inode, list[int]]:
    inode = read_inode(t, ino)
    return inode, replica_counts.whole_holders(t, ino, inode.version)


class KeptNode:
    """One node with its keepers."""

    def __init__(self, cluster: "KeptCluster", number: int, zone: str) -> None:
        self.cluster = cluster
        self.host = Host(number, CAPACITY, CAPACITY, zone=zone)
        self.seat = Seat(cluster.shared, number, lambda keys: cluster.heard(number, keys))
        self.index = Index(MemoryEngine())
        self.copies = Copies(
            number,
            cast(LocalReadEngine, self.seat),
            cluster.snapshot,
            self,
            cluster.call,
            _caught_up,
        )
        self.keeper = Keeper(self.copies, 0, self._evict, _no_blocks, self._on_drained)
        self.evening = Evening(self.copies, self.index, 0)
        self.acknowledging = Acknowledging(self.copies)
        self.refuses: KvfsError | None = None
        self.is_stopped = False
        """Whether it lives, and answers nothing."""
        self.fetch_s = 0.1
        self.brought: list[int] = []
        self.evicted: list[int] = []
        self.disowned: list[int] = []
        self.in_use: set[int] = set()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for task in (self.copies.run, self.keeper.run, self.evening.run):
                nursery.start_soon(task)

    async def _on_drained(self) -> None:
        self.host = self.host._replace(state="drained")

    async def _evict(self, ino: int) -> bool:
        def fn(t: Transaction) -> bool:
            if namespaces.is_durable(t, ino) or len(placements.holders(t, ino)) > 1:
                return False
            lifecycle.evict(t, ino, 1)
            tree.reap(t, ino)
            return True

        gone = ino not in self.in_use and await self.seat.transact(fn)
        if gone:
            self.evicted.append(ino)
        return gone

    def has_room(self, size: int) -> None:
        """From now on, for so many bytes."""
        self.host = self.host._replace(free=headroom(CAPACITY) + size)

    # what a node's `Brings` is

    async def bring(self, ino: int) -> None:
        await trio.sleep(self.fetch_s)
        if self.refuses is not None:
            raise self.refuses
        inode, holders = await self.seat.read(lambda t: _look(t, ino))
        if not self.cluster.snapshot().alive(holders):
            raise Unavailable("nobody has it")
        self.brought.append(ino)
        if inode.nlink:
            await self.seat.transact(lambda t: placements.hold(t, ino, inode.version))
        self.has(ino, inode.size)

    def record_now(self) -> None:
        """It is, when `bring` returns."""

    async def let_go(self, ino: int) -> bool:
        def fn(t: Transaction) -> bool:
            if len(placements.holders(t, ino)) < 2:
                return False
            placements.let_go(t, ino, t.node)
            return True

        gone = await self.seat.transact(fn)
        if gone:
            self.host = self.host._replace(free=self.host.free + self.cluster.sizes[ino])
        return gone

    async def adopt(self, ino: int, version: int, giver: int) -> None:
        node = keys.pack_node(giver)
        await self.seat.transact(lambda t: placements.hand_over(t, ino, version, node))

    def disown(self, ino: int) -> None:
        self.disowned.append(ino)

    def has(self, ino: int, size: int) -> None:
        self.index.store([Sealed(ino, 0, b"", size // 512)])
        self.host = self.host._replace(free=self.host.free - size)


class KeptCluster:
    """Nodes 1 to `count`, in two zones by turns."""

    def __init__(self, count: int) -> None:
        self.shared = MemoryEngine()
        self.sizes: dict[int, int] = {}
        self.shared.transact_now(lambda t: namespaces.format(t, 1, 0, 0))
        self.nodes: dict[int, KeptNode] = {}
        for number in range(1, count + 1):
            self.nodes[number] = KeptNode(self, number, "ab"[number % 2])

    def __getitem__(self, number: int) -> KeptNode:
        return self.nodes[number]

    def snapshot(self) -> ClusterSnapshot:
        hosts = (node.host for node in self.nodes.values())
        return ClusterSnapshot(host for host in hosts if host.state != "removed")

    def heard(self, by: int, placements_gone: set[bytes]) -> None:
        """What the log tells the others of a commit."""
        inos = [keys.unpack_u64(key, 1) for key in sorted(placements_gone)]
        for number, node in self.nodes.items():
            if number != by and node.host.alive and inos:
                node.keeper.given_up(inos)

    async def call(self, number: int, method: str, params: Any, deadline_s: float) -> Any:
        await trio.sleep(0.001)
        node = self.nodes[number]
        if not node.host.alive:
            raise Unavailable(f"node {number} does not answer")
        with trio.move_on_after(deadline_s):
            if node.is_stopped:
                await trio.sleep_forever()
            if method == ADOPT:
                return await node.copies.adopt(None, params)
            assert method == TAKE
            return await node.copies.take(None, params)
        raise Unavailable(f"node {number} did not answer in time")

    def namespace(self, name: str, **policy: Any) -> int:
        return self[1].seat.transact_now(
            lambda t: namespaces.create(t, name.encode(), uid=0, gid=0, now=1, **policy)
        )

    def write(self, namespace_id: int, name: str, node: int = 1, size: int = GIB) -> int:
        """A sealed file, closed on a node."""

        def fn(t: Transaction) -> int:
            ino = namespaces.allocate_inodes(t, namespace_id, 1)
            inode = Inode(
                mode=stat.S_IFREG | 0o644,
                uid=0,
                gid=0,
                nlink=0,
                size=size,
                atime_ns=1,
                mtime_ns=1,
                ctime_ns=1,
                parent=0,
                name=b"",
                flags=Flag.PUBLISHED | Flag.SEALED,
            )
            tree.add(t, namespace_root(namespace_id), name.encode(), ino, inode)
            return ino

        ino = self[node].seat.transact_now(fn)
        assert namespace_of(ino) == namespace_id
        self.sizes[ino] = size
        self[node].has(ino, size)
        self[node].keeper.published(ino)
        return ino

    def rewrite(self, ino: int, version: int, node: int) -> None:
        """A node closes new content of a file, which it has alone."""
        size = self.sizes[ino]

        def fn(t: Transaction) -> None:
            lifecycle.publish(
                *(t, ino),
                size=size,
                blocks=size // 512,
                mtime_ns=version,
                ctime_ns=version,
                boot=0,
                version=version,
            )

        self[node].seat.transact_now(fn)

    def remove_name(self, namespace_id: int, name: str, node: int) -> None:
        """A program of a node removes a file that is open on another one."""
        self[node].seat.transact_now(
            lambda t: tree.unlink(t, namespace_root(namespace_id), name.encode(), 1, lambda _: True)
        )

    def holders(self, ino: int, version: int = 0) -> set[int]:
        return set(self.shared.read_now(lambda t: replica_counts.whole_holders(t, ino, version)))

    def living(self, ino: int) -> set[int]:
        """Its holders that are there."""
        return {host.number for host in self.snapshot().alive(self.holders(ino))}

    def lose(self, number: int) -> None:
        node = self.nodes[number]
        node.host = node.host._replace(alive=False)

    def regain(self, number: int) -> None:
        """What `lose` lost."""
        node = self.nodes[number]
        node.host = node.host._replace(alive=True)

    def drain(self, number: int) -> None:
        node = self.nodes[number]
        node.host = node.host._replace(state="draining")

    async def remove(self, number: int, by: int) -> None:
        """As `kvfs node remove --force` does it: what it had is cleared up by another node."""
        self.nodes[number].host = self.nodes[number].host._replace(alive=False, state="removed")
        node = keys.pack_node(number)
        for ino in placements.held_by(self.shared.read_now(lambda t: t), node, 0, 1 << 20):
            await self[by].seat.transact(lambda t, ino=ino: placements.let_go(t, ino, node))

    def full(self, number: int) -> None:
        self.nodes[number].refuses = NoSpace("the disk is full")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            for node in self.nodes.values():
                nursery.start_soon(node.run)
            await trio.sleep(1)  # each has looked around
            yield
            nursery.cancel_scope.cancel()


async def until(condition: Callable[[], bool], within_s: float) -> None:
    """On the test's clock."""
    with trio.fail_after(within_s):
        while not condition():
            await trio.sleep(0.1)
