"""The life of a regular file's data: made, published, sealed, opened for writing again, evicted.

| state | flags | keys | the truth about size, blocks and mtime |
|---|---|---|---|
| made | none | `u` `w` | its data file |
| published | PUBLISHED | `u` | its data file; the record as of the last close |
| sealed | PUBLISHED, SEALED | `u` until its data are synced | the record |
| orphan | any | also `o` | as before |

`Inode.boot` names the boot in which the data were written until they are synced, then it is 0 and
stays 0: a file that was synced once is never dropped after a power cut, whatever was written since.
"""

from typing import NamedTuple

from kvfs.errors import Stale
from kvfs.meta import keys
from kvfs.meta.interface import Transaction
from kvfs.meta.records import Flag, Inode
from kvfs.namespace import odd
from kvfs.namespace.entries import find_entry, links, touch
from kvfs.namespace.inodes import read_inode, set_blocks, write_inode
from kvfs.namespace.tree import replace

__all__ = [
    "Evicted",
    "evict",
    "listed",
    "orphans",
    "publish",
    "reopen",
    "replace",
    "seal",
    "unpublished",
    "unsealed",
]


class Evicted(NamedTuple):
    """A file whose names were all removed."""

    ino: int
    inode: Inode
    names: list[tuple[int, bytes]]
    """(parent, name as mounts show it, empty for a hidden one) of each: what they must forget."""


def publish(
    t: Transaction,
    ino: int,
    *,
    size: int,
    blocks: int,
    mtime_ns: int,
    ctime_ns: int,
    boot: int,
    seal: bytes | None = None,
) -> Inode:
    """Record what a close (or fsync) of a written file acknowledges; returns the record.

    `boot`: 0 when the data are on disk, else the present boot's id. `seal`: the checksum, where it
    is known already and nobody can write the data file any more. Raises Stale.
    """
    inode = read_inode(t, ino)
    inode.size, inode.mtime_ns = size, mtime_ns
    inode.ctime_ns = max(inode.ctime_ns, ctime_ns)
    set_blocks(t, ino, inode, blocks)
    if inode.boot or not inode.flags & Flag.PUBLISHED:
        inode.boot = boot
    if not inode.flags & Flag.PUBLISHED:
        t.delete(keys.unpublished(ino))
    inode.flags = (inode.flags | Flag.PUBLISHED) & ~Flag.SEALED
    inode.checksum = b""
    if seal is None:
        t.put(keys.unsealed(ino), b"")
    else:
        _set_seal(t, ino, inode, seal)
    write_inode(t, ino, inode)
    return inode


def reopen(t: Transaction, ino: int) -> Inode:
    """Open for writing: what was sealed is so no more; returns the record. Raises Stale."""
    inode = read_inode(t, ino)
    if inode.flags & Flag.SEALED:
        inode.flags &= ~Flag.SEALED
        inode.checksum = b""
        t.put(keys.unsealed(ino), b"")
        write_inode(t, ino, inode)
    return inode


def seal(
    t: Transaction,
    ino: int,
    *,
    version: int,
    size: int,
    blocks: int,
    mtime_ns: int,
    ctime_ns: int,
    checksum: bytes,
    synced: bool,
) -> bool:
    """Record the checksum of a data file that was quiet from before it was read until now.

    False, and nothing written, when the record says otherwise: gone, unpublished, another version,
    size or mtime (a data file changed through a mapping after its last close is published first).
    ctime does not count, since a chmod or a new link changes it alone; the later of both is kept.
    """
    try:
        inode = read_inode(t, ino)
    except Stale:
        return False
    if not inode.flags & Flag.PUBLISHED:
        return False
    if (inode.version, inode.size, inode.mtime_ns) != (version, size, mtime_ns):
        return False
    inode.ctime_ns = max(inode.ctime_ns, ctime_ns)
    set_blocks(t, ino, inode, blocks)
    if synced:
        inode.boot = 0
    _set_seal(t, ino, inode, checksum)
    write_inode(t, ino, inode)
    return True


def evict(t: Transaction, ino: int, now: int) -> Evicted | None:
    """Remove every name of a file. It stays as an orphan until `tree.reap`, so that its data file
    can go in between; None when it is gone or an orphan already."""
    try:
        inode = read_inode(t, ino)
    except Stale:
        return None
    names = links(t, ino, inode)
    if not names:
        return None
    shown: list[tuple[int, bytes]] = []
    for parent, name in names:
        shown += [(parent, each) for each in odd.all_shown(t, parent, name) or [b""]]
        entry = find_entry(t, parent, name)
        if entry is not None and entry.ino == ino:
            t.delete(entry.key)
            touch(t, parent, read_inode(t, parent), now)
        t.delete(keys.backlink(ino, parent, name))
    inode.nlink, inode.parent, inode.ctime_ns = 0, 0, now
    t.put(keys.orphan(ino), b"")
    write_inode(t, ino, inode)
    return Evicted(ino, inode, shown)


def unsealed(t: Transaction, after_ino: int, limit: int) -> list[int]:
    """Up to `limit` inode numbers above `after_ino` of files that are not both sealed and
    synced."""
    return listed(t, keys.unsealed(after_ino), b"v", limit)


def unpublished(t: Transaction, after_ino: int, limit: int) -> list[int]:
    """Likewise, of files that were never closed nor synced."""
    return listed(t, keys.unpublished(after_ino), b"x", limit)


def orphans(t: Transaction, after_ino: int, limit: int) -> list[int]:
    """Likewise, of inodes without a link."""
    return listed(t, keys.orphan(after_ino), b"p", limit)


def _set_seal(t: Transaction, ino: int, inode: Inode, checksum: bytes) -> None:
    inode.flags |= Flag.SEALED
    inode.checksum = checksum
    if inode.boot:
        t.put(keys.unsealed(ino), b"")
    else:
        t.delete(keys.unsealed(ino))


def listed(t: Transaction, after: bytes, end: bytes, limit: int) -> list[int]:
    """Up to `limit` inode numbers that stand behind a letter in the keys after `after`."""
    found: list[int] = []
    for key, _ in t.scan(after + b"\0", end):
        found.append(keys.unpack_u64(key, 1))
        if len(found) >= limit:
            break
    return found
