"""Nodes that share an engine, as far as their metadata go: what a mount does, without one."""

import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvfs.base.clock import now
from kvfs.base.errors import NotFound
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag, Inode, namespace_of, namespace_root
from kvfs.tree import inodes, lifecycle, namespaces, tree
from kvfs.tree.private_files import is_late, settle
from tests.contract.mirrors import Mirror

NOW = 1_000
TOP = namespace_root(1)


class Host:
    """A node with its mirror, as the mount uses it."""

    def __init__(self, path: Path, url: str, node: int) -> None:
        self.clock = now
        """Seconds since its boot."""
        self.dead = set[int]()
        """Nodes whose lease has ended."""
        self._new: Callable[[], Mirror] = lambda: Mirror(
            *(path, url),
            node=node,
            settle=self._settle,
            is_alive=lambda other: other not in self.dead,
        )
        self.mirror = self._new()
        self._numbers: dict[int, Iterator[int]] = {}
        """Of each namespace."""

    def _settle(self, t: Transaction, ino: int, closed_at: float) -> None:
        settle(t, ino, NOW, yields=is_late(closed_at, self.clock()))

    def restart(self) -> None:
        self.mirror.close()
        self.start()

    def start(self) -> None:
        self.mirror = self._new()

    @property
    def trips(self) -> int:
        return self.mirror.engine.round_trips

    def write(self, fn: Callable[[Transaction], Any], **options: Any) -> Any:
        return self.mirror.call(lambda: self.mirror.engine.transact(fn, **options))

    def number(self, namespace: int) -> int:
        found: int | None = next(self._numbers.get(namespace, iter(())), None)
        if found is None:
            first = self.write(lambda t: namespaces.allocate_inodes(t, namespace, 64))
            self._numbers[namespace] = iter(range(first + 1, first + 64))
            return int(first)
        return found

    def create(self, parent: int, name: bytes, *, exclusive: bool = False) -> int:
        ino = self.number(namespace_of(parent))
        inode = Inode(
            mode=stat.S_IFREG | 0o644,
            uid=0,
            gid=0,
            nlink=0,
            atime_ns=NOW,
            mtime_ns=NOW,
            ctime_ns=NOW + ino % 1000,
            parent=0,
            name=b"",
            boot=7,
            flags=Flag.RESERVED if exclusive else 0,
        )
        private = 0 if exclusive else ino
        return int(self.write(lambda t: tree.add(t, parent, name, ino, inode), private=private))

    def mkdir(self, parent: int, name: bytes) -> int:
        ino = self.number(namespace_of(parent)) if namespace_of(parent) else 0
        inode = Inode(
            mode=stat.S_IFDIR | 0o755,
            uid=0,
            gid=0,
            nlink=0,
            atime_ns=NOW,
            mtime_ns=NOW,
            ctime_ns=NOW,
            parent=0,
            name=b"",
        )
        return int(self.write(lambda t: tree.add(t, parent, name, ino, inode)))

    def close_file(self, ino: int, *, behind: bool = False) -> None:
        def fn(t: Transaction) -> None:
            lifecycle.publish(t, ino, size=10, blocks=8, mtime_ns=NOW, ctime_ns=NOW, boot=7)

        self.write(fn, private=ino if behind else 0, behind=behind)

    def rmdir(self, parent: int, name: bytes) -> None:
        self.write(lambda t: tree.rmdir(t, parent, name, NOW, lambda _: False))

    def unlink(self, parent: int, name: bytes) -> tree.Removed:
        removed: tree.Removed = self.write(
            lambda t: tree.unlink(t, parent, name, NOW, lambda _: False)
        )
        return removed

    def find(self, parent: int, name: bytes) -> int | None:
        def fn(t: Transaction) -> int | None:
            try:
                return tree.lookup(t, parent, name)[0]
            except NotFound:
                return None

        return self.mirror.read_now(fn)

    def inode(self, ino: int) -> Inode:
        return self.mirror.read_now(lambda t: inodes.read_inode(t, ino))

    def settle(self) -> None:
        """Everything that is to be known is."""
        self.mirror.call(self.mirror.engine.sync)
        self.mirror.catch_up()


def usage(host: Host) -> tuple[int, int]:
    found = host.mirror.read_now(lambda t: namespaces.usage(t, 1))
    return found.bytes, found.inodes
