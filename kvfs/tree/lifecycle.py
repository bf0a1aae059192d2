"""The life of a regular file's data: made, published, sealed, opened for writing again, evicted.

| state | flags | keys | the truth about size, blocks and mtime |
|---|---|---|---|
| made | none | `u` `w` | its data file |
| published | PUBLISHED | `u` | its data file; the record as of the last close |
| sealed | PUBLISHED, SEALED | none; of an earlier version `u` until it is synced | the record |
| orphan | any | also `o` | as before |

`Inode.boot` names the boot in which the data were written until they are synced, then it is 0 and
stays 0: a file that was synced once is never dropped after a power cut, whatever was written since.
So it does not say whether its present content is on disk; that is so once it is sealed and without
a `u` key (`is_settled`).
"""

import stat
from typing import Final, NamedTuple

from kvfs.base.errors import Conflict, Stale
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import ROOT_INODE, Flag, Inode
from kvfs.policy.miss_reasons import Lost
from kvfs.tree import name_escaping, namespaces
from kvfs.tree.copies import placements
from kvfs.tree.entries import find_entry, links, touch
from kvfs.tree.inode_lists import listed
from kvfs.tree.inodes import outdate_cold, read_inode, set_blocks, write_inode
from kvfs.tree.tree import find, replace

__all__ = [
    "Evicted",
    "Unsettled",
    "brought",
    "evict",
    "is_settled",
    "lose",
    "orphans",
    "publish",
    "reason_of",
    "reopen",
    "replace",
    "seal",
    "synced",
    "unpublished",
    "unsealed",
    "unsettled_source",
]


_LOST: Final[dict[Lost, int]] = {
    "evicted": Flag.EVICTED,
    "expired": Flag.EXPIRED,
    "unavailable": Flag.UNAVAILABLE,
    "damaged": Flag.DAMAGED,
}


class Evicted(NamedTuple):
    """A file whose names were all removed."""

    ino: int
    inode: Inode
    names: list[tuple[int, bytes]]
    """(parent, name as mounts show it, empty for a hidden one) of each, which mounts must
    forget."""
    reason: Lost

    @property
    def entries(self) -> list[bytes]:
        """The entries by which look-ups of these names are known (`NotFound.at`)."""
        return [keys.file_entry(*name) for name in self.names]


class Unsettled(NamedTuple):
    """A file whose present content may not be on disk."""

    ino: int
    inode: Inode


def publish(
    t: Transaction,
    ino: int,
    *,
    size: int,
    blocks: int,
    mtime_ns: int,
    ctime_ns: int,
    boot: int,
    atime_ns: int | None = None,
    version: int | None = None,
) -> Inode:
    """Records what a close (or fsync) of a written file acknowledges; returns the record.

    `boot`: 0 when the data are on disk, else the present boot's id. `atime_ns`: the data file's
    access time, where it is to be the record's. `version`: that of the data file, if it has a new
    one. Raises Stale, Conflict (the record has that version, or a later one).
    """
    inode = read_inode(t, ino)
    if inode.flags & Flag.COLD:
        outdate_cold(t, ino, inode)
    if version is not None:
        if inode.version >= version:
            raise Conflict("the file was published by somebody else meanwhile")
        inode.version = version
    inode.size, inode.mtime_ns = size, mtime_ns
    inode.ctime_ns = max(inode.ctime_ns, ctime_ns)
    if atime_ns is not None:
        inode.atime_ns = atime_ns
    set_blocks(t, ino, inode, blocks)
    if inode.boot or not inode.flags & Flag.PUBLISHED:
        inode.boot = boot
    made_here = False
    if not inode.flags & Flag.PUBLISHED:
        unpublished_key = keys.unpublished(ino)
        made_here = t.get(unpublished_key) == t.node
        t.delete(unpublished_key)
    if not made_here or version is not None:  # else the placement it was made with is the only one
        placements.hold_alone(t, ino, inode.version)
    inode.flags = (inode.flags | Flag.PUBLISHED) & ~(Flag.SEALED | Flag.RESERVED)
    inode.checksum = b""
    if not made_here:  # else it is listed since then
        t.put(keys.unsealed(ino), t.node)
    write_inode(t, ino, inode)
    return inode


def is_settled(t: Transaction, ino: int, inode: Inode) -> bool:
    """Returns whether all content of a file is known to be on disk: nobody has opened it for
    writing since it was sealed, and its data were synced after that."""
    return bool(inode.flags & Flag.SEALED) and t.get(keys.unsealed(ino)) is None


def unsettled_source(
    t: Transaction, old_parent: int, old_name: bytes, new_parent: int, new_name: bytes
) -> Unsettled | None:
    """Returns the file whose present content must be on disk before it is renamed over another one
    of a durable namespace, else a power cut takes both; None: nothing is at risk."""
    if ROOT_INODE in (old_parent, new_parent) or not namespaces.is_durable(t, new_parent):
        return None
    source, target = find(t, old_parent, old_name), find(t, new_parent, new_name)
    if source is None or target is None or source[0] == target[0]:
        return None
    if not stat.S_ISREG(source[1].mode) or is_settled(t, *source):
        return None
    return Unsettled(*source)


def synced(t: Transaction, ino: int) -> None:
    """Records that content published before is on disk by now. Raises Stale."""
    inode = read_inode(t, ino)
    if inode.boot:
        inode.boot = 0
        write_inode(t, ino, inode)


def reopen(t: Transaction, ino: int) -> Inode:
    """Opens for writing: a seal is withdrawn; returns the record. Raises Stale."""
    inode = read_inode(t, ino)
    if inode.flags & Flag.SEALED:
        outdate_cold(t, ino, inode)
        inode.flags &= ~Flag.SEALED
        inode.checksum = b""
        t.put(keys.unsealed(ino), t.node)
        write_inode(t, ino, inode)
    return inode


def seal(
    t: Transaction,
    ino: int,
    inode: Inode,
    *,
    version: int,
    size: int,
    blocks: int,
    mtime_ns: int,
    ctime_ns: int,
    checksum: bytes,
) -> bool:
    """Records the checksum of a data file that was quiet from before it was read until now, and
    whose data are on disk. `inode`: its present record, which this changes.

    False, and nothing written, when the record says otherwise: unpublished, another version, size
    or mtime (a data file changed through a mapping after its last close is published first).
    ctime does not count, since a chmod or a new link changes it alone; the later of both is
    kept.
    """
    if not inode.flags & Flag.PUBLISHED:
        return False
    if (inode.version, inode.size, inode.mtime_ns) != (version, size, mtime_ns):
        return False
    inode.ctime_ns = max(inode.ctime_ns, ctime_ns)
    set_blocks(t, ino, inode, blocks)
    inode.boot = 0
    inode.flags |= Flag.SEALED
    inode.checksum = checksum
    t.delete(keys.unsealed(ino))
    write_inode(t, ino, inode)
    return True


def evict(t: Transaction, ino: int, now: int, reason: Lost = "evicted") -> Evicted | None:
    """Removes every name of a file. It stays as an orphan until `tree.reap`, so that its data file
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
        shown += [(parent, each) for each in name_escaping.all_shown(t, parent, name) or [b""]]
        entry = find_entry(t, parent, name)
        if entry is not None and entry.ino == ino:
            t.delete(entry.key)
            touch(t, parent, read_inode(t, parent), now)
        t.delete(keys.backlink(ino, parent, name))
    inode.nlink, inode.parent, inode.ctime_ns = 0, 0, now
    t.put(keys.orphan(ino), b"")
    lose(t, ino, inode, reason)
    return Evicted(ino, inode, shown, reason)


def lose(t: Transaction, ino: int, inode: Inode, reason: Lost) -> None:
    """Writes the reason into the record of an orphan, from which other nodes learn why its names
    went."""
    inode.flags |= _LOST[reason]
    write_inode(t, ino, inode)


def reason_of(inode: Inode) -> Lost | None:
    """Returns the reason why the last name of an orphan went; None: it was removed."""
    lost = inode.flags & Flag.LOST
    return next((reason for reason, flag in _LOST.items() if flag & lost), None) if lost else None


def brought(t: Transaction, ino: int, version: int, blocks: int) -> bool:
    """Accounts for a data file that has come back, from the cold tier or another node; False if the
    file is another by now."""
    try:
        inode = read_inode(t, ino)
    except Stale:
        return False
    if inode.version != version or not inode.flags & Flag.PUBLISHED:
        return False
    if inode.blocks != blocks:
        set_blocks(t, ino, inode, blocks)
        write_inode(t, ino, inode)
    return True


def unsealed(t: Transaction, after_ino: int, limit: int) -> list[int]:
    """Returns up to `limit` inode numbers above `after_ino` of files of this node that are not both
    sealed and synced."""
    return listed(t, keys.unsealed(after_ino), b"v", limit, t.node)


def unpublished(t: Transaction, after_ino: int, limit: int) -> list[int]:
    """Returns the same for files that were never closed nor synced."""
    return listed(t, keys.unpublished(after_ino), b"x", limit, t.node)


def orphans(t: Transaction, after_ino: int, limit: int) -> list[int]:
    """Returns the same for inodes without a link, of all nodes."""
    return listed(t, keys.orphan(after_ino), b"p", limit)
