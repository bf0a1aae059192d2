"""Inode numbers that a process has reserved for files it is about to make.

A data file may have the name of a reserved number before there is a record; so the remains of a
killed process are found by the list of reserved numbers. A process that gives such a file its
record takes the number off the list in the same transaction, and does not if it is no longer on
it.
"""

import stat

from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Inode, namespace_of
from kvfs.tree import namespaces
from kvfs.tree.copies import placements
from kvfs.tree.inode_lists import listed
from kvfs.tree.inodes import add_usage, write_inode


def reserve(t: Transaction, namespace_id: int, count: int) -> int:
    """Reserves so many numbers; returns the first of them. Raises NotFound, NoSpace."""
    first = namespaces.allocate_inodes(t, namespace_id, count)
    for ino in range(first, first + count):
        t.put(keys.reserved(ino), t.node)
    return first


def release(t: Transaction, inos: list[int]) -> None:
    """Releases numbers that are not used, and have no data file."""
    for ino in inos:
        t.delete(keys.reserved(ino))


def reserved(t: Transaction, after_ino: int, limit: int) -> list[int]:
    """Returns up to `limit` numbers above `after_ino` that this node has reserved."""
    return listed(t, keys.reserved(after_ino), b"s", limit, t.node)


def abandon(t: Transaction, inos: list[int], now: int) -> None:
    """Makes orphans of reserved numbers, to be dropped with the data files they may have."""
    for ino in inos:
        if not t.delete(keys.reserved(ino)):
            continue
        inode = Inode(
            mode=stat.S_IFREG,
            uid=0,
            gid=0,
            nlink=0,
            atime_ns=now,
            mtime_ns=now,
            ctime_ns=now,
            parent=0,
            name=b"",
        )
        t.put(keys.orphan(ino), b"")
        t.put(keys.unsealed(ino), t.node)
        t.put(keys.unpublished(ino), t.node)
        placements.hold(t, ino, inode.version)
        write_inode(t, ino, inode)
        add_usage(t, namespace_of(ino), 0, 1)
