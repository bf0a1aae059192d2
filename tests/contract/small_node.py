"""A node without a mount: engine, data files, index and keepers on a real directory, as the tests
drive them."""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvfs.base.clock import file_time_ns
from kvfs.base.units import Capacity, parse_capacity
from kvfs.datastore.files import DataFiles
from kvfs.datastore.index import NAME, Index
from kvfs.datastore.layout import create_store
from kvfs.datastore.leases.taker import LeaseTaker
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.records import Inode, namespace_root
from kvfs.node.tasks.eviction.evictor import Evictor
from kvfs.node.tasks.sealer import Sealer
from kvfs.tree import lifecycle, namespaces, tree
from kvfs.vfs.inode_holders import Holders
from kvfs.vfs.quarantine import Quarantine
from kvfs.vfs.space_accounting import Accounting, Census

BOOT = 12345


def new_inode(*, boot: int = 0) -> Inode:
    """The record of a file that was made just now and has no name yet."""
    now = file_time_ns()
    return Inode(
        mode=0o100644,
        uid=0,
        gid=0,
        nlink=0,
        atime_ns=now,
        mtime_ns=now,
        ctime_ns=now,
        parent=0,
        name=b"",
        boot=boot,
    )


class SmallNode:
    """The parts that keep files, and the few steps by which a mount would use them."""

    def __init__(self, root: Path, limit: Capacity, boot: int) -> None:
        self.store = create_store(root)
        self.engine = EmbeddedEngine(self.store.meta, boot=boot)
        self.files = DataFiles(self.store.data)
        self.index = Index(self.engine.database(NAME))
        self.holders = Holders()
        self.leases = LeaseTaker.of_node(self.store.run)
        self.announced: list[tuple[int, bytes]] = []
        self.quarantine = Quarantine(self.files, self.index)
        self.sealer = Sealer(self.engine, self.files, self.index, self._writing)
        self.accounting = Accounting(
            self.files.root,
            limit,
            self.holders.writers,
            quarantined=lambda: self.quarantine.used.beside,
            sealing=lambda: self.sealer.open_in,
        )
        self.evictor = Evictor(
            self.engine,
            self.files,
            self.index,
            self.holders,
            self.accounting,
            self.leases,
            self._on_removed,
            lambda _evicted: None,
        )
        self.engine.transact_now(lambda t: namespaces.format(t, time.time_ns(), 0, 0))
        self._ranges: dict[int, int] = {}

    async def _on_removed(self, evicted: Sequence[lifecycle.Evicted]) -> None:
        self.announced += [name for each in evicted for name in each.names]

    def _writing(self, ino: int) -> bool:
        return any(ino == each for each, _ in self.holders.writers())

    def namespace(self, name: str, kind: str = "cache", capacity: int = 0) -> int:
        return self.engine.transact_now(
            lambda t: namespaces.create(
                t,
                name.encode(),
                kind=kind,
                capacity=capacity,
                uid=0,
                gid=0,
                now=time.time_ns(),
            )
        )

    def make(self, namespace_id: int, name: str) -> tuple[int, int]:
        """An open new file: (inode, descriptor)."""
        ino = self.engine.transact_now(lambda t: namespaces.allocate_inodes(t, namespace_id, 1))
        inode = new_inode(boot=BOOT)
        parent = namespace_root(namespace_id)
        self.engine.transact_unseen(lambda t: tree.add(t, parent, name.encode(), ino, inode))
        fd = self.files.create(ino, 0)
        self.holders.opened(ino)
        self.holders.writing(ino, fd)
        return ino, fd

    def publish(self, ino: int, fd: int, boot: int = BOOT) -> None:
        stat = os.fstat(fd)
        self.engine.transact_now(
            lambda t: lifecycle.publish(
                t,
                ino,
                size=stat.st_size,
                blocks=stat.st_blocks,
                mtime_ns=stat.st_mtime_ns,
                ctime_ns=stat.st_ctime_ns,
                boot=boot,
            )
        )

    def close(self, ino: int, fd: int) -> None:
        """What FLUSH and RELEASE do."""
        self.publish(ino, fd)
        self.holders.not_writing(ino)
        self.holders.released(ino)
        os.close(fd)

    def write(self, namespace_id: int, name: str, content: bytes) -> int:
        """A whole file, published; its inode number."""
        ino, fd = self.make(namespace_id, name)
        os.write(fd, content)
        self.close(ino, fd)
        self.index.add(ino, 0)
        return ino

    def reserve(self, ino: int, size: int) -> None:
        """Have the record take so much space, as a client does before it writes."""
        now = time.time_ns()
        self.engine.transact_now(
            lambda t: lifecycle.publish(
                t, ino, size=size, blocks=size // 512, mtime_ns=now, ctime_ns=now, boot=BOOT
            )
        )

    def record(self, ino: int) -> Inode | None:
        return self.engine.read_now(lambda t: tree.read_inodes(t, [ino])[0])

    def names(self, namespace_id: int) -> set[str]:
        root = namespace_root(namespace_id)
        children = self.engine.read_now(lambda t: tree.list_children(t, root, b"", 1 << 20))
        return {child.name.decode() for child in children}

    def census(self) -> Census:
        return self.engine.read_now(self.accounting.census)

    def used(self, namespace_id: int) -> int:
        return self.census().namespaces[namespace_id].space.used

    def stop(self) -> None:
        self.index.flush()
        self.leases.close()
        self.files.close()
        self.engine.close()


@contextlib.contextmanager
def small_node(root: Path, limit: str = "90%", boot: int = BOOT) -> Iterator[SmallNode]:
    """`boot`: the id of the boot that the node believes to run in."""
    node = SmallNode(root, parse_capacity(limit), boot)
    try:
        yield node
    finally:
        node.stop()
