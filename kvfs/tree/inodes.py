"""Inode records and what belongs to them alone: attributes and extended attributes.

This module knows no names. Times are nanoseconds since the epoch. The record holds the truth about
an inode except the size, blocks and mtime of a regular file that is not sealed (see
`records.Flag`).
"""

import stat
import struct
from collections.abc import Sequence
from typing import Final

import msgspec

from kvfs.base.errors import Exists, Invalid, NoAttribute, NoSpace, Stale, TooLarge
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import (
    NAMESPACE_SHIFT,
    ROOT_INODE,
    Flag,
    Inode,
    Usage,
    namespace_of,
    pack,
    unpack_inode,
    unpack_usage,
)
from kvfs.tree import etags

XATTR_CREATE: Final = 1
XATTR_REPLACE: Final = 2
MAX_XATTR_NAME: Final = 255
MAX_XATTR_VALUE: Final = 65_536
MAX_XATTRS: Final = 65_536
"""Bytes of all attributes of one inode, names and values. Their space is in no usage, so it is
bounded by the number of files; and the names fit into one list (listxattr)."""
_unpack_times: Final = struct.Struct(">QQ").unpack
"""Unpacks the times beside a directory's record: mtime and ctime."""
BLOCK: Final = 512
"""The unit of `Inode.blocks`, in bytes."""


class AttributeChanges(msgspec.Struct, kw_only=True):
    """The changes for `set_attributes`; None leaves a field as it is."""

    mode: int | None = None
    """Permission bits; the file's type stays."""
    uid: int | None = None
    gid: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None
    size: int | None = None
    blocks: int | None = None


def read_inode(t: Transaction, ino: int) -> Inode:
    """Returns the record. Raises Stale if there is none."""
    value = t.get(keys.INODE + keys.pack_u64(ino))
    if value is None:
        raise Stale("the file or directory is gone")
    inode = unpack_inode(value)
    return with_times(t, ino, inode) if t.node and stat.S_ISDIR(inode.mode) else inode


def read_inodes(t: Transaction, inos: Sequence[int]) -> list[Inode | None]:
    """Returns the records in the order of `inos`, None where there is none; one round trip."""
    values = t.get_many([keys.INODE + keys.pack_u64(ino) for ino in inos])
    found = [None if value is None else unpack_inode(value) for value in values]
    if t.node:
        for ino, inode in zip(inos, found, strict=True):
            if inode is not None and stat.S_ISDIR(inode.mode):
                with_times(t, ino, inode)
    return found


def with_times(t: Transaction, ino: int, inode: Inode) -> Inode:
    """Returns the record, with the times that a directory of a cluster has beside it. Changes
    `inode`."""
    if t.node and stat.S_ISDIR(inode.mode):
        later_times(inode, t.get(keys.times(ino)))
    return inode


def later_times(inode: Inode, beside: bytes | None) -> None:
    """Changes a directory's record to the times that stand beside it, if they are later."""
    if beside is not None:
        mtime_ns, ctime_ns = _unpack_times(beside)
        inode.mtime_ns = max(inode.mtime_ns, mtime_ns)
        inode.ctime_ns = max(inode.ctime_ns, ctime_ns)


def stamp(t: Transaction, ino: int, inode: Inode, now: int) -> None:
    """Records that the names in a directory changed, and nothing else of its record. In a cluster
    changes of names in one directory do not contend for its record."""
    if t.node:
        t.merge(keys.times(ino), keys.pack_u64(now) * 2)
    else:
        inode.mtime_ns = inode.ctime_ns = now
        t.put(keys.INODE + keys.pack_u64(ino), pack(inode))


def write_inode(t: Transaction, ino: int, inode: Inode) -> None:
    """Inserts or replaces the record. Usage stays: see `set_blocks` for a change of blocks."""
    t.put(keys.INODE + keys.pack_u64(ino), pack(inode))


def is_directory(inode: Inode) -> bool:
    return stat.S_ISDIR(inode.mode)


def set_blocks(t: Transaction, ino: int, inode: Inode, blocks: int) -> None:
    """Sets `inode.blocks` and accounts for the change; the caller writes the record."""
    if blocks != inode.blocks:
        add_usage(t, ino >> NAMESPACE_SHIFT, BLOCK * (blocks - inode.blocks), 0)
        inode.blocks = blocks


def add_usage(t: Transaction, namespace_id: int, size_bytes: int, inodes: int) -> None:
    """Accounts for additions (or, negative, removals); for a namespace that is gone, nothing."""
    key = keys.USAGE + keys.pack_u16(namespace_id)
    if t.node:
        t.merge(key, pack(Usage(bytes=size_bytes, inodes=inodes)))
        return
    value = t.get(key)  # nobody else changes it meanwhile
    if value is not None:
        usage = unpack_usage(value)
        usage.bytes += size_bytes
        usage.inodes += inodes
        t.put(key, pack(usage))


def set_attributes(t: Transaction, ino: int, changes: AttributeChanges, now: int) -> Inode:
    """Applies `changes`; ctime becomes `now`. Returns the new record. Raises Stale."""
    inode = read_inode(t, ino)
    if changes.mtime_ns is not None and changes.size is None and inode.flags & Flag.SEALED:
        etags.follow(t, ino, inode, changes.mtime_ns)
    change_attributes(inode, changes, now)
    if changes.blocks is not None:
        set_blocks(t, ino, inode, changes.blocks)
    if t.node and is_directory(inode):  # the times that were set, also where they are earlier
        t.delete(keys.times(ino))
    write_inode(t, ino, inode)
    return inode


def change_attributes(inode: Inode, changes: AttributeChanges, now: int) -> None:
    """Applies `changes`, but for the blocks, to a record; ctime becomes `now`."""
    if changes.mode is not None:
        inode.mode = stat.S_IFMT(inode.mode) | stat.S_IMODE(changes.mode)
    if changes.uid is not None:
        inode.uid = changes.uid
    if changes.gid is not None:
        inode.gid = changes.gid
    if changes.atime_ns is not None:
        inode.atime_ns = changes.atime_ns
    if changes.mtime_ns is not None:
        inode.mtime_ns = changes.mtime_ns
    if changes.size is not None:
        inode.size = changes.size
    inode.ctime_ns = now


def without_set_ids(mode: int) -> int:
    """Returns the mode after a write, truncation or change of owner: no set-user-id bit, and no
    set-group-id bit where the group may execute (without that it once meant mandatory locking, and
    stays)."""
    if stat.S_ISDIR(mode):
        return mode
    mode &= ~stat.S_ISUID
    return mode & ~stat.S_ISGID if mode & stat.S_IXGRP else mode


def get_xattr(t: Transaction, ino: int, name: bytes) -> bytes:
    """Returns the value. Raises NoAttribute, TooLarge (the name)."""
    value = t.get(_xattr_key(ino, name))
    if value is None:
        raise NoAttribute(f"there is no attribute {_shown(name)}")
    return value


def set_xattr(t: Transaction, ino: int, name: bytes, value: bytes, flags: int, now: int) -> None:
    """Inserts or replaces an attribute of up to 64 KiB.

    `flags`: XATTR_CREATE (Exists if it is there), XATTR_REPLACE (NoAttribute if it is not). Raises
    Invalid, TooLarge, NoSpace (all attributes would be longer than MAX_XATTRS), Stale.
    """
    if flags & ~(XATTR_CREATE | XATTR_REPLACE):
        raise Invalid(f"unknown flags {flags:#x} for an attribute")
    if len(value) > MAX_XATTR_VALUE:
        raise TooLarge(f"an attribute has at most {MAX_XATTR_VALUE} bytes, not {len(value)}")
    key = _xattr_key(ino, name)
    old = t.get(key)
    present = old is not None
    if present and flags & XATTR_CREATE:
        raise Exists(f"the attribute {_shown(name)} is there already")
    if not present and flags & XATTR_REPLACE:
        raise NoAttribute(f"there is no attribute {_shown(name)}")
    more = len(value) - len(old) if old is not None else len(name) + 1 + len(value)
    if more > 0 and _exceeds(t, ino, MAX_XATTRS - more):
        raise NoSpace(f"all attributes of a file have at most {MAX_XATTRS} bytes")
    _changed(t, ino, now)
    t.put(key, value)


def list_xattrs(t: Transaction, ino: int) -> list[bytes]:
    """Returns the names of all attributes, sorted."""
    prefix = keys.xattrs(ino)
    return [key[len(prefix) :] for key in t.scan_keys(prefix, keys.after(prefix))]


def xattrs_within(t: Transaction, ino: int, limit: int) -> dict[bytes, bytes]:
    """Returns all attributes; empty if they have more bytes than that."""
    prefix, found, total = keys.xattrs(ino), {}, 0
    for key, value in t.scan(prefix, keys.after(prefix)):
        found[key[len(prefix) :]] = value
        total += len(key) - len(prefix) + 1 + len(value)
        if total > limit:
            return {}
    return found


def _exceeds(t: Transaction, ino: int, limit: int) -> bool:
    """Returns whether the attributes have more bytes than that; it reads no more than it has to."""
    prefix, total = keys.xattrs(ino), 0
    for key, value in t.scan(prefix, keys.after(prefix)):
        total += len(key) - len(prefix) + 1 + len(value)
        if total > limit:
            return True
    return total > limit


def remove_xattr(t: Transaction, ino: int, name: bytes, now: int) -> None:
    """Raises NoAttribute, Stale."""
    if not t.delete(_xattr_key(ino, name)):
        raise NoAttribute(f"there is no attribute {_shown(name)}")
    _changed(t, ino, now)


def drop_inode(t: Transaction, ino: int, inode: Inode) -> None:
    """Removes the record and everything that hangs on it, and accounts for it. No entry may lead to
    it.

    In a cluster a record of a file with data is committed as an orphan first: other nodes unlink
    their data files only of an orphan, and keep those of a record that had a name and vanished."""
    for name in list_xattrs(t, ino):
        t.delete(keys.xattr(ino, name))
    for key in (keys.inode(ino), keys.unsealed(ino), keys.unpublished(ino), keys.orphan(ino)):
        t.delete(key)
    outdate_cold(t, ino, inode)
    if t.node:
        _drop_of_cluster(t, ino)
    namespace_id = namespace_of(ino)
    if ino & (1 << 48) - 1 != ROOT_INODE:  # a namespace's own directory is not counted
        add_usage(t, namespace_id, -BLOCK * inode.blocks, -1)


def outdate_cold(t: Transaction, ino: int, inode: Inode) -> None:
    """Marks the cold tier's object as garbage (`tree.copies.cold_copies`); to be called before the
    version or checksum of a record changes, or it goes. The caller writes the record."""
    if inode.flags & Flag.COLD:
        inode.flags &= ~Flag.COLD
        t.put(keys.cold_object(ino, inode.version, inode.checksum), b"")


def _drop_of_cluster(t: Transaction, ino: int) -> None:
    leases = (keys.locks(ino, True), keys.locks(ino, False), keys.append_lease(ino))
    for key in (keys.times(ino), *leases):
        t.delete(key)
    prefix = keys.placements(ino)
    for key in [key for key, _ in t.scan(prefix, keys.after(prefix))]:
        t.delete(key)
        t.delete(keys.held(key[len(prefix) :], ino))


def _xattr_key(ino: int, name: bytes) -> bytes:
    if not 0 < len(name) <= MAX_XATTR_NAME:
        raise TooLarge(f"an attribute's name has 1 to {MAX_XATTR_NAME} bytes, not {len(name)}")
    return keys.xattr(ino, name)


def _shown(name: bytes) -> str:
    return name.decode(errors="backslashreplace")


def _changed(t: Transaction, ino: int, now: int) -> None:
    inode = read_inode(t, ino)
    inode.ctime_ns = now
    write_inode(t, ino, inode)
