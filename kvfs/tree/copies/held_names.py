"""Names of a namespace that is kept by its nodes (coherence `peer`): what a holder tells of one,
and what the node that asked takes over.

| state of a name here | keys | believed |
|---|---|---|
| nothing | none | - |
| taken over | entry, inode, its holders' placements | for a moment, then one is asked again |
| held | the same with this node's placement, and those of its siblings | as on a lone node |

Invariants
- A record that was taken over has the number, version and seal that it has at its holder, so that
  its data come as those of any file of a cluster. It counts no bytes until they are here.
- A name that this node holds, or is making, is never replaced by another node's.
- A directory here that lets more users pass than the holder's is no way to what the holder has.
- A path is that of the keys: the names of entries from the namespace's root on, joined by `/`.
"""

import stat
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from kvfs.base.errors import UNDECODABLE, Invalid
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.local_keys import peer_spaces
from kvfs.meta.records import Flag, Inode, namespace_of, namespace_root, pack, unpack_inode
from kvfs.tree.copies import peer_directories, placements, told_names
from kvfs.tree.inodes import (
    add_usage,
    drop_inode,
    get_xattr,
    list_xattrs,
    read_inode,
    stamp,
    with_times,
    write_inode,
)
from kvfs.tree.namespaces import allocate_inodes, is_peer

MOST_DIRECTORIES: Final = 64
"""Directories above a name: one further down is told to nobody."""
Get = Callable[[bytes], bytes | None]
"""Gives the value of a key."""


COLD: Final = 0
"""The number by which the cold tier is the holder of a file; no node has it."""
MOST_SIBLINGS: Final = 16
"""Other holders of a file that are recorded."""


class HeldName(msgspec.Struct, array_like=True):
    """A file or directory under a name, as its holder tells it."""

    directories: list[tuple[int, bytes]]
    """Number and packed record of each directory above it, from the root of the namespace down;
    last, of a directory, its own."""
    ino: int = 0
    """The number of the file; 0: it is a directory."""
    record: bytes = b""
    attributes: list[tuple[bytes, bytes]] = []
    """Its extended attributes."""
    renews_ns: int = 0
    """The removal of the name after which the file was written; 0: none is known."""
    siblings: list[int] = []
    """Other nodes that have the same sealed content."""


def namespaces_of_nodes(t: Transaction) -> list[int]:
    """Returns the namespaces that are kept by their nodes, by number."""
    return [keys.unpack_node(each) for each in sorted(peer_spaces(t))]


def path_of(get: Get, ino: int) -> bytes | None:
    """Returns the path of a directory or file in its namespace; None if it has no name any
    more."""
    parts: list[bytes] = []
    root = namespace_root(namespace_of(ino))
    while ino != root:
        value = get(keys.INODE + keys.pack_u64(ino))
        inode = None if value is None else unpack_inode(value)
        if inode is None or not inode.nlink or not inode.parent:
            return None
        parts.append(inode.name)
        ino = inode.parent
    return b"/".join(reversed(parts))


def is_held(t: Transaction, ino: int) -> bool:
    """Returns whether this node has the data of a file, by its own records."""
    return t.get(keys.placement(ino, t.node)) is not None


def directories_above(
    t: Transaction, namespace_id: int, path: bytes
) -> list[tuple[int, bytes]] | None:
    """Returns number and packed record of each directory above a path, from that below the
    namespace's root down; None if one of them is not there."""
    return peer_directories.all_along(t, namespace_id, path.rpartition(b"/")[0])


def is_taken_over(t: Transaction, ino: int, inode: Inode) -> bool:
    """Returns whether a file's record came from its holder, and its data did not."""
    is_file = stat.S_ISREG(inode.mode) and inode.flags & Flag.PUBLISHED
    return bool(is_file) and not is_held(t, ino)


def named(t: Transaction, namespace_id: int, path: bytes) -> int:
    """Returns the number of the file under a path; 0: there is none."""
    directories = directories_above(t, namespace_id, path)
    if directories is None:
        return 0
    parent = directories[-1][0] if directories else namespace_root(namespace_id)
    packed = t.get(keys.file_entry(parent, path.rpartition(b"/")[2]))
    return 0 if packed is None else keys.unpack_u64(packed)


def told(t: Transaction, namespace_id: int, path: bytes) -> HeldName | None:
    """Returns what this node tells of a path: a published file that it holds, or a directory with
    such a file below it."""
    if path.count(b"/") > MOST_DIRECTORIES:
        return None
    directories = directories_above(t, namespace_id, path)
    if directories is None:
        return None
    parent = directories[-1][0] if directories else namespace_root(namespace_id)
    name = path.rpartition(b"/")[2]
    value = t.get(keys.file_entry(parent, name))
    if value is None:
        return _told_directory(t, directories, parent, name)
    ino, record = keys.unpack_u64(value), t.get(keys.INODE + value)
    if record is None or not told_names.is_told(t, ino, unpack_inode(record)):
        return None
    attributes = [(name, get_xattr(t, ino, name)) for name in list_xattrs(t, ino)]
    return HeldName(directories, ino, record, attributes, siblings=_siblings(t, ino))


def take_over(
    t: Transaction, namespace_id: int, path: bytes, held: HeldName, holder: bytes
) -> int | None:
    """Makes what a holder told known here; returns the inode under the name then, which is this
    node's own where it has one. None: it cannot be taken over now, because an earlier record of it
    is still in use here. Raises Invalid if what was told makes no sense, or the namespace is not
    kept by its nodes any more: its keys would be everybody's."""
    if not is_peer(t, namespace_id):
        raise Invalid("the namespace is gone, or not kept by its nodes")
    *above, name = path.split(b"/")
    if max(map(len, (*above, name))) > told_names.MOST_NAME:
        raise Invalid(f"a name has at most {told_names.MOST_NAME} bytes")
    directories = [(ino, _checked(ino, namespace_id, record)) for ino, record in held.directories]
    names = above if held.ino else [*above, name]
    if len(directories) != len(names):
        raise Invalid("a node tells of other directories than were asked for")
    parent = namespace_root(namespace_id)
    for part, (ino, inode) in zip(names, directories, strict=True):
        parent = _take_directory(t, parent, part, ino, inode)
    if not held.ino:
        return parent
    inode = _checked(held.ino, namespace_id, held.record)
    holders = [holder]
    if inode.flags & Flag.SEALED:
        holders += [node for each in held.siblings[:MOST_SIBLINGS] if (node := _packed(each))]
    return _take_file(t, parent, name, held.ino, inode, held.attributes, holders)


def _siblings(t: Transaction, ino: int) -> list[int]:
    nodes = [keys.unpack_node(e.node) for e in placements.holders(t, ino) if e.node != t.node]
    return [node for node in nodes if node != COLD]


def _told_directory(
    t: Transaction, above: list[tuple[int, bytes]], parent: int, name: bytes
) -> HeldName | None:
    found = peer_directories.find(t, parent, name)
    if found is None or not told_names.tells_of_any(t, found[0]):
        return None
    ino, record = found
    return HeldName([*above, (ino, pack(with_times(t, ino, unpack_inode(record))))])


def _checked(ino: int, namespace_id: int, record: bytes) -> Inode:
    """Raises Invalid unless it is the record of a file or directory of this namespace."""
    try:
        inode = unpack_inode(record)
    except UNDECODABLE as error:
        raise Invalid(f"a node tells of a record that is none: {error}") from None
    if namespace_of(ino) != namespace_id or ino == namespace_root(namespace_id):
        raise Invalid("a node tells of a file of another namespace")
    if not inode.flags & Flag.PUBLISHED:
        raise Invalid("a node tells of a file that was never closed")
    return inode


def _packed(node: int) -> bytes | None:
    """Returns a node's number as keys have it; None: there can be none of this number."""
    return keys.pack_node(node) if 0 < node < 1 << 16 else None


def _take_directory(t: Transaction, parent: int, name: bytes, ino: int, inode: Inode) -> int:
    found = peer_directories.find(t, parent, name)
    if found is not None:
        _follow(t, *found, ino, inode)
        return found[0]
    if not stat.S_ISDIR(inode.mode):
        raise Invalid("a node tells of a directory that is none")
    if t.get(keys.inode(ino)) is not None:  # removed here, and in use still
        ino = allocate_inodes(t, namespace_of(ino), 1)
    inode.parent, inode.name, inode.nlink = parent, name, 2
    inode.flags = Flag.PUBLISHED | Flag.IMPLIED
    above = read_inode(t, parent)
    if parent != namespace_root(namespace_of(ino)):  # whose record all nodes share
        above.nlink += 1
        write_inode(t, parent, above)
    t.put(keys.directory_entry(parent, name), keys.pack_u64(ino))
    write_inode(t, ino, inode)
    add_usage(t, namespace_of(ino), 0, 1)
    stamp(t, parent, above, inode.mtime_ns)
    return ino


def _follow(t: Transaction, here: int, record: bytes, ino: int, told: Inode) -> None:
    """Follows a holder's change of the directory that this node took over from it. Raises Invalid
    if it is another one, through which more users would get to what the holder has."""
    inode = unpack_inode(record)
    if here == ino and told.ctime_ns > inode.ctime_ns:
        inode.mode, inode.uid, inode.gid = told.mode, told.uid, told.gid
        inode.ctime_ns = told.ctime_ns
        write_inode(t, here, inode)
    if not peer_directories.lets_no_more_pass(inode, told):
        raise Invalid("the directory here lets more users pass than the holder's")


def _take_file(
    t: Transaction,
    parent: int,
    name: bytes,
    ino: int,
    inode: Inode,
    attributes: Sequence[tuple[bytes, bytes]],
    holders: Sequence[bytes],
) -> int | None:
    entry = keys.file_entry(parent, name)
    value = t.get(entry)
    if value is not None:
        here = keys.unpack_u64(value)
        if not _gives_way(t, here):
            return here
        drop(t, here)
    if t.get(keys.inode(ino)) is not None:
        return None
    if not stat.S_ISREG(inode.mode):
        raise Invalid("a node tells of a file that is none")
    inode.parent, inode.name, inode.nlink = parent, name, 1
    inode.blocks = inode.boot = 0
    inode.flags &= Flag.PUBLISHED | Flag.SEALED
    t.put(entry, keys.pack_u64(ino))
    write_inode(t, ino, inode)
    for attribute, content in attributes:
        t.put(keys.xattr(ino, attribute), content)
    if not inode.flags & Flag.SEALED:
        t.put(keys.unsealed(ino), holders[0])
    for each in holders:
        if each != t.node:
            placements.hold_at(t, ino, inode.version, each)
    add_usage(t, namespace_of(ino), 0, 1)
    stamp(t, parent, read_inode(t, parent), inode.mtime_ns)
    return ino


def _gives_way(t: Transaction, ino: int) -> bool:
    """Returns whether a file here was taken over and has no data."""
    value = t.get(keys.inode(ino))
    if value is None or is_held(t, ino):
        return False
    return bool(unpack_inode(value).flags & Flag.PUBLISHED)


def drop(t: Transaction, ino: int) -> None:
    """Drops a record that was taken over, with its name; nothing if it is gone. Its data must not
    be here."""
    value = t.get(keys.inode(ino))
    if value is None:
        return
    inode = unpack_inode(value)
    if inode.nlink:
        t.delete(keys.file_entry(inode.parent, inode.name))
    for each in placements.holders(t, ino):
        placements.let_go(t, ino, each.node)
    drop_inode(t, ino, inode)
