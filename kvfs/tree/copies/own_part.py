"""A node's own part of a namespace whose records were everybody's and are each node's own now.

| file | treatment |
|---|---|
| this node has all its data, or makes it | it is its own: placements of other content go |
| so has another node, and it is sealed | that one is a sibling (`siblings`) |
| this node has a part of its data | the part goes: whoever has the whole is asked again |
| another node has it, and others are told so | its record goes, unless the mount here knows it |
| another node has it, and nobody was told yet | its record stays, as one that was taken over |
| no name is left, or it was never closed | its record goes, unless this node has its data |

Directories, symbolic links and special files stay on every node.
"""

import stat
from collections.abc import Collection, Sequence
from itertools import islice
from typing import NamedTuple

from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag, Inode, Usage, namespace_root, unpack_inode
from kvfs.tree.copies import held_names, placements
from kvfs.tree.copies.held_names import MOST_SIBLINGS
from kvfs.tree.copies.placements import Holder
from kvfs.tree.inodes import BLOCK, add_usage, read_inodes, set_blocks, write_inode
from kvfs.tree.namespaces import usage


class ForeignFile(NamedTuple):
    """A file that this node does not hold."""

    ino: int
    path: bytes | None
    """Its path; None: it has no name, or was never closed."""


def files_after(t: Transaction, namespace_id: int, after: int, limit: int) -> list[int]:
    """Returns the next inodes of a namespace behind `after` (0: from the first on)."""
    start = keys.inode(max(after, namespace_root(namespace_id)) + 1)
    end = keys.after(keys.INODE + keys.pack_u16(namespace_id))
    return [keys.unpack_u64(key, 1) for key in islice(t.scan_keys(start, end), limit)]


def keep_own(t: Transaction, inos: Sequence[int]) -> None:
    """Makes those of these files that this node holds its own; other nodes that have the same
    sealed content are its siblings."""
    for ino, inode in zip(inos, read_inodes(t, inos), strict=True):
        if inode is None or not stat.S_ISREG(inode.mode):
            continue
        own, count = is_own(t, ino), 0
        for each in placements.holders(t, ino):
            if own and each.node != t.node and count < MOST_SIBLINGS and _is_equal(inode, each):
                count += 1
            elif (each.node == t.node) != own:
                placements.let_go(t, ino, each.node)
        if own and t.get(keys.unsealed(ino)) not in (None, t.node):
            t.put(keys.unsealed(ino), t.node)


def foreign(t: Transaction, inos: Sequence[int]) -> list[ForeignFile]:
    """Returns those of these files that this node does not hold."""
    found: list[ForeignFile] = []
    for ino, inode in zip(inos, read_inodes(t, inos), strict=True):
        if inode is None or not stat.S_ISREG(inode.mode) or is_own(t, ino):
            continue
        is_named = inode.nlink and inode.flags & Flag.PUBLISHED
        found.append(ForeignFile(ino, held_names.path_of(t.get, ino) if is_named else None))
    return found


def drop_foreign(t: Transaction, inos: Collection[int]) -> int:
    """Drops the records of those of these files that this node does not hold still; returns how
    many."""
    dropped = 0
    for each in foreign(t, list(inos)):
        held_names.drop(t, each.ino)
        dropped += 1
    return dropped


def take_for_copies(t: Transaction, inos: Sequence[int]) -> None:
    """Makes the records of files that this node does not hold those of names that were taken over:
    they count no bytes, and are believed for a moment."""
    for ino, inode in zip(inos, read_inodes(t, inos), strict=True):
        if inode is not None and inode.blocks and not is_own(t, ino):
            set_blocks(t, ino, inode, 0)
            inode.boot = 0
            write_inode(t, ino, inode)


def is_own(t: Transaction, ino: int) -> bool:
    """Returns whether this node has all data of a file, or makes it."""
    (holding,) = placements.holding(t, [ino], t.node)
    return holding is not None and not holding.blocks


def _is_equal(inode: Inode, holder: Holder) -> bool:
    """Returns whether a holder has all of a file's sealed content."""
    is_sealed = bool(inode.flags & Flag.SEALED)
    return is_sealed and holder.whole and holder.holding.version == inode.version


def usage_error(t: Transaction, namespace_id: int) -> Usage:
    """Returns what has to be added to the recorded usage to be that of the records. It reads them
    all: not for the event loop."""
    size = count = 0
    prefix = keys.INODE + keys.pack_u16(namespace_id)
    root = keys.inode(namespace_root(namespace_id))
    for key, value in t.scan(prefix, keys.after(prefix)):
        if key != root:
            size += unpack_inode(value).blocks * BLOCK
            count += 1
    recorded = usage(t, namespace_id)
    return Usage(bytes=size - recorded.bytes, inodes=count - recorded.inodes)


def correct_usage(t: Transaction, namespace_id: int, error: Usage) -> None:
    """Adds what `usage_error` found."""
    add_usage(t, namespace_id, error.bytes, error.inodes)
