"""Records rebuilt from the descriptions of data files: functions of a transaction.

Facts that a data file cannot tell are made up: directories belong to the caller, 0755; a namespace
has its kind, no other policy. Symbolic links, device nodes, empty directories, users and buckets'
settings have no data file, and are lost.

Invariants
- A file keeps its inode number, so that a data file is found under its name.
- If several files were under one name, the one described last has it; durable ones of the others
  get names of their own.
- Whatever the order, and as often as it is done: the same result.
"""

import stat
from typing import Final, NamedTuple

from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import (
    ROOT_INODE,
    Flag,
    Inode,
    Namespace,
    Usage,
    namespace_of,
    namespace_root,
    pack,
    unpack_inode,
)
from kvfs.tree import lifecycle, namespaces
from kvfs.tree.copies import placements
from kvfs.tree.entries import links, lose_link
from kvfs.tree.inodes import BLOCK, add_usage, drop_inode, read_inode, write_inode

_GAP: Final = 1 << 32
"""Inode numbers left free above the known ones, for files whose data lie on other nodes."""


class RebuiltFile(NamedTuple):
    """A file as its data file describes it."""

    ino: int
    version: int
    inode: Inode
    """The record to be completed: names and links. Its ctime tells how late it was described."""
    paths: list[bytes]
    """Paths from the root of the mount; none: not known."""
    xattrs: dict[bytes, bytes]


class DirectoryOwner(NamedTuple):
    """The owner of directories that are made up, and the time of their making."""

    uid: int
    gid: int
    now: int


def make_namespace(t: Transaction, ino: int, name: bytes, kind: str, owner: DirectoryOwner) -> None:
    """Makes the namespace of this inode number, if missing. A name that another one has gets the id
    behind it."""
    number = namespace_of(ino)
    if t.get(keys.namespace(number)) is not None:
        return
    if t.get(keys.directory_entry(ROOT_INODE, name)) is not None:
        name += b"-%d" % number
    record = Namespace(name=name, kind=kind, created_ns=owner.now)
    top = namespace_root(number)
    t.put(keys.usage(number), pack(Usage()))
    t.put(keys.counter(number), keys.pack_u64(top + 1))
    write_inode(t, top, _directory(ROOT_INODE, name, owner))
    namespaces.adopt(t, number, record, owner.now)


def pass_by(t: Transaction, greatest: dict[int, int]) -> None:
    """Reserves the numbers in use, of which the greatest are given by namespace id, so that none is
    given out again."""
    for number, ino in greatest.items():
        value = t.get(keys.counter(number))
        if value is not None and keys.unpack_u64(value) <= ino:
            t.put(keys.counter(number), keys.pack_u64(ino + _GAP))


def add(t: Transaction, found: RebuiltFile, owner: DirectoryOwner) -> bool:
    """Puts the file under its names, or, if they are all another's, under a name of its own
    (`lost+found-<inode number>`), or records that this node has a copy of it.

    False, and nothing is written: the existing file is of a later description, or the file is a
    cache file whose names are all those of later ones.
    """
    value = t.get(keys.inode(found.ino))
    if value is not None:
        there = unpack_inode(value)
        has_name = there.flags & Flag.PUBLISHED and there.nlink
        if there.version == found.version:
            is_it = there.size == found.inode.size
            if is_it or (has_name and _is_being_written(t, found, there)):
                placements.hold(t, found.ino, found.version)
                return True
            if has_name:
                return False
        if has_name and there.version < found.version and not found.paths:
            _publish(t, found)
            return True
        if (there.version, there.ctime_ns) >= (found.version, found.inode.ctime_ns):
            return False
        _forget(t, found.ino, there)
    top = namespace_root(namespace_of(found.ino))
    names = []
    for path in found.paths:
        *parts, name = path.removeprefix(b"/").split(b"/")[1:]
        parent = _walk(t, top, parts, owner)
        if _take(t, parent, name, found):
            names.append((parent, name))
    if not names and (not found.paths or namespaces.is_durable(t, found.ino)):
        names = [(top, _lost(t, found.ino))]
    if names:
        _put(t, found, names)
    return bool(names)


def _is_being_written(t: Transaction, found: RebuiltFile, there: Inode) -> bool:
    """Returns whether this node was writing the content that a record has: the node's start finds
    what came of it. A seal is withdrawn."""
    if there.flags & Flag.SEALED and found.paths:  # it was sealed here, and written since
        lifecycle.reopen(t, found.ino)
    return t.get(keys.unsealed(found.ino)) == t.node


def _publish(t: Transaction, found: RebuiltFile) -> None:
    """Gives a record the content that was published after it, or about to be. Its names stay."""
    inode = found.inode
    lifecycle.publish(
        t,
        found.ino,
        size=inode.size,
        blocks=inode.blocks,
        mtime_ns=inode.mtime_ns,
        ctime_ns=inode.ctime_ns,
        boot=inode.boot,
        version=found.version,
    )


def _walk(t: Transaction, parent: int, parts: list[bytes], owner: DirectoryOwner) -> int:
    """Returns the directory at the end of these names; missing ones are made."""
    for name in parts:
        key = keys.directory_entry(parent, name)
        value = t.get(key)
        if value is not None:
            parent = keys.unpack_u64(value)
            continue
        number = namespace_of(parent)
        ino = namespaces.allocate_inodes(t, number, 1)
        above = read_inode(t, parent)
        above.nlink += 1
        write_inode(t, parent, above)
        write_inode(t, ino, _directory(parent, name, owner))
        add_usage(t, number, 0, 1)
        t.put(key, keys.pack_u64(ino))
        parent = ino
    return parent


def _take(t: Transaction, parent: int, name: bytes, found: RebuiltFile) -> bool:
    """Returns whether the name is this file's now: it was free, or of one that was described
    earlier."""
    key = keys.file_entry(parent, name)
    value = t.get(key)
    if value is not None:
        other = keys.unpack_u64(value)
        inode = read_inode(t, other)
        if (inode.ctime_ns, other) >= (found.inode.ctime_ns, found.ino):
            return False
        _displace(t, other, inode, (parent, name))
    t.put(key, keys.pack_u64(found.ino))
    return True


def _displace(t: Transaction, ino: int, inode: Inode, link: tuple[int, bytes]) -> None:
    """Takes a name from a file. Perhaps the other file replaced this one, perhaps this one was
    renamed since it was described: a durable one stays."""
    lose_link(t, ino, inode, link, inode.ctime_ns, lambda _: True)
    if not inode.nlink and namespaces.is_durable(t, ino):
        t.delete(keys.orphan(ino))
        inode.nlink, inode.parent = 1, namespace_root(namespace_of(ino))
        inode.name = _lost(t, ino)
        write_inode(t, ino, inode)


def _lost(t: Transaction, ino: int) -> bytes:
    """Puts a file under a name at the top of its namespace, as `kvfs fsck` does, and returns the
    name."""
    name = b"lost+found-%x" % ino
    t.put(keys.file_entry(namespace_root(namespace_of(ino)), name), keys.pack_u64(ino))
    return name


def _put(t: Transaction, found: RebuiltFile, names: list[tuple[int, bytes]]) -> None:
    inode = found.inode
    inode.nlink = len(names)
    inode.parent, inode.name = names[0]
    if len(names) > 1:
        for parent, name in names:
            t.put(keys.backlink(found.ino, parent, name), b"")
    if not inode.flags & Flag.SEALED:
        t.put(keys.unsealed(found.ino), t.node)
    for name, value in found.xattrs.items():
        t.put(keys.xattr(found.ino, name), value)
    write_inode(t, found.ino, inode)
    add_usage(t, namespace_of(found.ino), BLOCK * inode.blocks, 1)
    placements.hold(t, found.ino, found.version)


def _forget(t: Transaction, ino: int, inode: Inode) -> None:
    """Drops a record that an older data file made."""
    for parent, name in links(t, ino, inode):
        t.delete(keys.file_entry(parent, name))
        t.delete(keys.backlink(ino, parent, name))
    drop_inode(t, ino, inode)


def _directory(parent: int, name: bytes, owner: DirectoryOwner) -> Inode:
    return Inode(
        mode=stat.S_IFDIR | 0o755,
        uid=owner.uid,
        gid=owner.gid,
        nlink=2,
        atime_ns=owner.now,
        mtime_ns=owner.now,
        ctime_ns=owner.now,
        parent=parent,
        name=name,
        flags=Flag.PUBLISHED,
    )
