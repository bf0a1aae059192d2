"""The records of a restored store's files. Pure: functions of a transaction."""

from typing import Final

from kvfs.admin.backup.selection import is_file
from kvfs.datastore.index import Sealed
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag, pack, unpack_inode
from kvfs.tree.copies import placements
from kvfs.tree.inodes import read_inodes

BATCH: Final = 1_000
"""Records that are read or written in one transaction."""


def settle(t: Transaction, here: list[Sealed], node: bytes, *, tier: bool) -> None:
    """Notes that these contents are here, on disk once the restore has ended. They count as not in
    the cold tier, which may have lost them since: what it has (`tier`) is garbage there."""
    for each, inode in zip(here, read_inodes(t, [each.ino for each in here]), strict=True):
        if inode is not None:
            inode.boot = 0
            if inode.flags & Flag.COLD:
                inode.flags &= ~Flag.COLD
                if tier:
                    t.put(keys.cold_object(each.ino, each.version, inode.checksum), b"")
            t.put(keys.inode(each.ino), pack(inode))
            t.delete(keys.unsealed(each.ino))
            if node:
                t.put_all(placements.of_holder(each.ino, each.version, node))


def regular_files(t: Transaction, after: int) -> list[int]:
    """Returns the next regular files after this inode number."""
    found: list[int] = []
    for key, value in t.scan(keys.inode(after) + b"\0", keys.after(keys.INODE)):
        if is_file(unpack_inode(value)):
            found.append(keys.unpack_u64(key, 1))
            if len(found) == BATCH:
                break
    return found
