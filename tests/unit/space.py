"""An engine in memory with one namespace, for the tests of what is done to names."""

import stat
from collections.abc import Callable
from typing import TypeVar

from kvfs.meta.engine import Transaction
from kvfs.meta.records import Inode, namespace_root
from kvfs.tree import namespaces, tree
from tests.contract.memory_engine import MemoryEngine

T = TypeVar("T")
BOOT = 7


def new_inode(kind: int = stat.S_IFREG, mode: int = 0o644, now: int = 10, gid: int = 0) -> Inode:
    return Inode(
        mode=kind | mode,
        uid=0,
        gid=gid,
        nlink=0,
        atime_ns=now,
        mtime_ns=now,
        ctime_ns=now,
        parent=0,
        name=b"",
        boot=BOOT if kind == stat.S_IFREG else 0,
    )


class Space:
    """A namespace `cache`; `held` are the inodes that somebody still uses."""

    def __init__(self) -> None:
        self.engine = MemoryEngine()
        self.held: set[int] = set()
        self.do(lambda t: namespaces.format(t, 1, 0, 0))
        self.id = self.do(
            lambda t: namespaces.create(t, b"cache", kind="cache", uid=0, gid=0, now=2)
        )
        self.root = namespace_root(self.id)

    def do(self, fn: Callable[[Transaction], T]) -> T:
        return self.engine.transact_now(fn)

    def keep(self, ino: int) -> bool:
        return ino in self.held

    def add(
        self, parent: int, name: bytes, kind: int = stat.S_IFREG, mode: int = 0o644, now: int = 10
    ) -> int:
        ino = self.do(lambda t: namespaces.allocate_inodes(t, self.id, 1))
        return self.do(lambda t: tree.add(t, parent, name, ino, new_inode(kind, mode, now)))

    def directory(self, parent: int, name: bytes, now: int = 10) -> int:
        return self.add(parent, name, stat.S_IFDIR, 0o755, now)

    def inode(self, ino: int) -> Inode:
        return self.do(lambda t: tree.read_inode(t, ino))

    def lookup(self, parent: int, name: bytes) -> int:
        return self.do(lambda t: tree.lookup(t, parent, name))[0]

    def names(self, parent: int) -> list[bytes]:
        return [child.name for child in self.do(lambda t: tree.list_children(t, parent, b"", 99))]

    def rename(
        self, old: int, name: bytes, new: int, to: bytes, flags: int = 0, now: int = 50
    ) -> tree.Removed | None:
        return self.do(
            lambda t: tree.rename(t, old, name, new, to, flags=flags, now=now, keep=self.keep)
        )
