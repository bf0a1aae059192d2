"""Nodes that share an engine and bring each other's data files: in one event loop, no mounts."""

import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import trio

from kvfs.base.units import parse_capacity
from kvfs.cluster.peer_protocol import PeerAddress
from kvfs.datastore.checksum import checksum
from kvfs.datastore.index import Sealed
from kvfs.datastore.leases.taker import LeaseTaker
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Inode, namespace_root
from kvfs.node.tasks.eviction.evictor import Evicted, Evictor
from kvfs.node.tasks.eviction.surplus_replicas import Spare
from kvfs.transfer.origins import Cold, FileOrigins
from kvfs.transfer.transfers import Transfers
from kvfs.tree import lifecycle, namespaces, tree
from kvfs.tree.copies import placements
from kvfs.tree.inodes import read_inode
from kvfs.vfs.inode_holders import Holders
from kvfs.vfs.space_accounting import STORE, Accounting, NodeSpace
from kvfs.vfs.volume import Volume
from tests.cluster.waiting import until
from tests.contract.memory_engine import MemoryEngine
from tests.contract.peers import Peer, peers
from tests.contract.small_node import new_inode

T = TypeVar("T")


class Shared(MemoryEngine):
    """The engine as one of several nodes has it."""

    def __init__(self, common: MemoryEngine, node: int) -> None:
        self._common = common
        self._node = keys.pack_node(node)
        self.commits = trio.Event()
        """Until it is set no commit that is waited for gets through."""
        self.commits.set()

    def _as_node(self, fn: Callable[[Transaction], T]) -> Callable[[Transaction], T]:
        def run(t: Transaction) -> T:
            t.node = self._node
            return fn(t)

        return run

    def read_now(self, fn: Callable[[Transaction], T]) -> T:
        return self._common.read_now(self._as_node(fn))

    def transact_now(self, fn: Callable[[Transaction], T]) -> T:
        return self._common.transact_now(self._as_node(fn))

    async def read(self, fn: Callable[[Transaction], T]) -> T:
        return await self._common.read(self._as_node(fn))

    async def transact(
        self, fn: Callable[[Transaction], T], *, private: int = 0, behind: bool = False
    ) -> T:
        await self.commits.wait()
        return await self._common.transact(self._as_node(fn), private=private, behind=behind)


class Host:
    """A node with what it has of others' files."""

    def __init__(self, peer: Peer, engine: MemoryEngine, site: "Site") -> None:
        self.peer = peer
        self.engine = Shared(engine, peer.address.node)
        self.files = peer.files
        self.holders = Holders()
        run = Path(f"{peer.files.root}.run")
        run.mkdir()
        self.leases = LeaseTaker.of_node(run)
        self.volume = Volume(self.engine, peer.files, peer.index, self.holders, lambda _lost: None)
        self.room: list[int] = []
        self.is_bounded = False
        accounting = Accounting(
            peer.files.root,
            parse_capacity("40MiB"),
            self.holders.writers,
            local=lambda: NodeSpace(
                peer.index.used_bytes(), self.transfers.coming_bytes, self.transfers.settles
            ),
        )
        self.evictor = Evictor(
            self.engine,
            peer.files,
            peer.index,
            self.holders,
            accounting,
            self.leases,
            self._forget,
            lambda _evicted: None,
            spare=Spare(lambda node: node not in site.dead),
        )
        self.scope = trio.CancelScope()
        self.cold: Cold | None = None
        """Of this node, once it is set."""
        peer.address_of = site.address
        origins = FileOrigins(
            *(self.engine, self.volume),
            peers=peer.fetches,
            look_again=site.look_again,
            cold=self._from_cold,
        )
        self.transfers = Transfers(
            *(self.engine, peer.files, peer.index, self.volume), self._make_room, origins
        )

    async def _from_cold(self, ino: int, inode: Inode, fd: int) -> bytes | None:
        return None if self.cold is None else await self.cold(ino, inode, fd)

    async def run(self) -> None:
        """Brings what is asked for, until `scope` is cancelled."""
        with self.scope:
            await self.transfers.run()

    async def _make_room(self, size: int) -> None:
        self.room.append(size)
        if self.is_bounded:
            await self.evictor.room_for(STORE, size)

    async def _forget(self, evicted: Evicted) -> None:
        """No kernel knows anything."""

    def put(self, data: bytes, *, space: int, sealed: bool = True) -> int:
        """A file that was written here and closed."""

        def make(t: Transaction) -> int:
            ino = namespaces.allocate_inodes(t, space, 1)
            tree.add(t, namespace_root(space), b"f%d" % ino, ino, new_inode())
            return ino

        ino = self.engine.transact_now(make)
        fd = self.files.create(ino, 0)
        os.write(fd, data)
        st = os.fstat(fd)
        found = checksum(fd, len(data))
        os.close(fd)
        assert found is not None
        if sealed:
            self.peer.index.store([Sealed(ino, 0, found.chunks, st.st_blocks)])
        seal = found.combined if sealed else None
        self.engine.transact_now(lambda t: publish(t, ino, st, seal=seal))
        return ino

    def write_in_place(self, ino: int, version: int, data: bytes) -> os.stat_result:
        """The data file of a version gets this content, and is closed; what it is now."""
        fd = self.files.open(ino, version, os.O_WRONLY | os.O_TRUNC)
        os.write(fd, data)
        st = os.fstat(fd)
        os.close(fd)
        return st

    def read(self, ino: int) -> bytes:
        """Of the data file that is here."""
        fd = self.files.open(ino, self.inode(ino).version, os.O_RDONLY)
        try:
            return os.pread(fd, os.fstat(fd).st_size, 0)
        finally:
            os.close(fd)

    def inode(self, ino: int) -> Inode:
        return self.engine.read_now(lambda t: read_inode(t, ino))

    def has(self, ino: int) -> bool:
        try:
            self.files.stat(ino, self.inode(ino).version)
        except FileNotFoundError:
            return False
        return True


class Site:
    """Nodes on one engine."""

    def __init__(self, nodes: list[Peer]) -> None:
        self.engine = MemoryEngine()
        self.dead: set[int] = set()
        self.engine.transact_now(lambda t: namespaces.format(t, 1, 0, 0))
        self.cache = self._namespace(b"cache", "cache")
        self.durable = self._namespace(b"models", "durable")
        self.at = {each.address.node: each.address for each in nodes}
        self.news: list[int] = []
        """Of the dead, those who are found to live when it is looked again."""
        self.hosts = [Host(each, self.engine, self) for each in nodes]

    def _namespace(self, name: bytes, kind: str) -> int:
        return self.engine.transact_now(
            lambda t: namespaces.create(t, name, kind=kind, uid=0, gid=0, now=1)
        )

    def address(self, node: int) -> PeerAddress | None:
        return None if node in self.dead else self.at[node]

    async def look_again(self, nodes: Sequence[int]) -> bool:
        """Whether one of these lives after all."""
        found = self.dead & set(self.news) & set(nodes)
        self.dead -= found
        return bool(found)

    def holders(self, ino: int) -> list[int]:
        found = self.engine.read_now(lambda t: placements.holders(t, ino))
        return [keys.unpack_node(each.node) for each in found]

    async def held_by(self, ino: int, nodes: list[int]) -> None:
        """Returns when these have a copy, and no others."""
        await until(lambda: self.holders(ino) == nodes, f"{nodes} alone have inode {ino:x}")


def on_nodes(
    root: Path,
    count: int,
    test: Callable[[Site], Awaitable[None]],
    interpreter: Path | None = None,
) -> None:
    """`interpreter`: as `peers` has it."""

    async def main() -> None:
        async with peers(root, count, interpreter) as made:
            site = Site(made)
            async with trio.open_nursery() as nursery:
                for host in site.hosts:
                    nursery.start_soon(host.run)
                    nursery.start_soon(host.volume.run)
                await trio.testing.wait_all_tasks_blocked()
                await test(site)
                nursery.cancel_scope.cancel()

    trio.run(main)


def publish(
    t: Transaction,
    ino: int,
    st: os.stat_result,
    *,
    version: int | None = None,
    seal: bytes | None = None,
) -> None:
    """Record that a data file was closed as it is, and with `seal` that it was sealed since."""
    closed = lifecycle.publish(
        t,
        ino,
        size=st.st_size,
        blocks=st.st_blocks,
        mtime_ns=st.st_mtime_ns,
        ctime_ns=st.st_ctime_ns,
        boot=0,
        version=version,
    )
    if seal is not None:
        assert lifecycle.seal(
            t,
            ino,
            closed,
            version=closed.version,
            size=st.st_size,
            blocks=st.st_blocks,
            mtime_ns=st.st_mtime_ns,
            ctime_ns=st.st_ctime_ns,
            checksum=seal,
        )
