"""A node's own records of a namespace that ends being `peer` (`kvfs.tree.copies.peer_end`): what it
tells the engine of them, and what becomes of them there. Functions of a transaction: `own_records`
reads the node's own, which nobody changes meanwhile, all others what the engine has.

Of one number the record counts that was changed last (`_rank`), whole; of one name the file that
was written last (`_beats`). So it does not matter which node tells first, nor how often.

| the node has | the engine has | what follows there |
|---|---|---|
| a file | nothing of its number | the file, without its name; the node holds it |
| the same | its number, changed earlier | the node's record, and no holder with other content |
| the same | its number, changed later, with the same sealed content | one more holder |
| the same | the same with other content | nothing: the node does not hold it |
| a file without a name, or that was removed elsewhere | nothing of its number | an orphan |
| a directory | none of that path | the directory |
| the same | one of that path | that one: of two numbers, what lets no more users pass |
| a file whose record has come, when all have | no file of its name | the name leads to it |
| the same | another file of its name | `_beats` decides; the other one is an orphan |
"""

import stat
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag, Inode, namespace_of, namespace_root, pack, unpack_inode
from kvfs.tree.copies import held_names, own_part, peer_directories, placements
from kvfs.tree.entries import lose_link
from kvfs.tree.inodes import (
    BLOCK,
    add_usage,
    drop_inode,
    get_xattr,
    is_directory,
    list_xattrs,
    read_inode,
    read_inodes,
    set_blocks,
    stamp,
    with_times,
    write_inode,
)

Attributes = Sequence[tuple[bytes, bytes]]


class OwnRecord(NamedTuple):
    """A record of this node, with what hangs on it."""

    ino: int
    packed: bytes
    path: bytes | None
    """Its path; None: it has no name."""
    attributes: Attributes
    unsealed: bytes | None
    """The node that writes the file; None: it is sealed."""
    is_directory: bool

    @property
    def size(self) -> int:
        """About how many bytes it takes to tell of it."""
        return 256 + len(self.packed) + sum(len(name) + len(v) for name, v in self.attributes)


class NameMet(Enum):
    """The other file that a name had which was told."""

    NONE = "none"
    SAME = "same"
    """It has the same content."""
    OTHER = "other"
    """It has other content."""


# ---- what the node has


def own_records(t: Transaction, inos: Sequence[int]) -> list[OwnRecord]:
    """Returns those of these inodes of which the engine is to know."""
    found: list[OwnRecord] = []
    for ino, inode in zip(inos, read_inodes(t, inos), strict=True):
        if inode is not None and _is_told(t, ino, inode):
            path = held_names.path_of(t.get, ino) if inode.nlink else None
            found.append(_record(t, ino, inode, path))
    return found


def above(t: Transaction, namespace_id: int, paths: Iterable[bytes]) -> dict[bytes, OwnRecord]:
    """Returns the directories of these paths, and all those above them, by path."""
    found: dict[bytes, OwnRecord] = {}
    for path in paths:
        directories = peer_directories.along(t, namespace_id, path.rpartition(b"/")[0])
        parts = path.split(b"/")
        for depth, (ino, packed) in enumerate(directories, start=1):
            name = b"/".join(parts[:depth])
            if name not in found:
                inode = with_times(t, ino, unpack_inode(packed))
                found[name] = _record(t, ino, inode, name)
    return found


def lost_content(
    engines: Transaction, t: Transaction, inos: Sequence[int]
) -> list[tuple[int, int]]:
    """Returns number and version of those of these files whose data here are of a version that the
    engine has with other content, or does not have yet."""
    lost: list[tuple[int, int]] = []
    for ino, own in zip(inos, read_inodes(t, inos), strict=True):
        packed = engines.get(keys.inode(ino))
        if own is None or packed is None or not stat.S_ISREG(own.mode):
            continue
        is_held = engines.get(keys.placement(ino, t.node)) is not None
        if own_part.is_own(t, ino) and not is_held and own.version >= unpack_inode(packed).version:
            lost.append((ino, own.version))
    return lost


def _is_told(t: Transaction, ino: int, inode: Inode) -> bool:
    if stat.S_ISREG(inode.mode):
        return own_part.is_own(t, ino)
    return bool(inode.nlink) and not inode.flags & Flag.IMPLIED


def _record(t: Transaction, ino: int, inode: Inode, path: bytes | None) -> OwnRecord:
    attributes = [(name, get_xattr(t, ino, name)) for name in list_xattrs(t, ino)]
    unsealed = t.get(keys.unsealed(ino))
    return OwnRecord(ino, pack(inode), path, attributes, unsealed, is_directory(inode))


# ---- what the engine has: directories


def tell_directories(
    t: Transaction, namespace_id: int, directories: Mapping[bytes, OwnRecord]
) -> dict[bytes, int]:
    """Has the engine know these directories, by path, with those above them; returns their numbers
    there."""
    found = {b"": namespace_root(namespace_id)}
    for path in sorted(directories, key=lambda path: path.count(b"/")):
        own, (before, _, _) = directories[path], path.rpartition(b"/")
        inode, parent = unpack_inode(own.packed), found[before]
        there = peer_directories.find(t, parent, inode.name)
        if there is None:
            found[path] = _add_directory(t, parent, own, inode)
        else:
            found[path] = there[0]
            _unite(t, there[0], own, inode)
    return found


def _add_directory(t: Transaction, parent: int, own: OwnRecord, inode: Inode) -> int:
    inode.parent, inode.nlink = parent, 2
    top = unpack_inode(t.get(keys.inode(parent)) or b"")
    top.nlink += 1
    write_inode(t, parent, top)
    t.put(keys.directory_entry(parent, inode.name), keys.pack_u64(own.ino))
    for name, value in own.attributes:
        t.put(keys.xattr(own.ino, name), value)
    write_inode(t, own.ino, inode)
    add_usage(t, namespace_of(own.ino), 0, 1)
    return own.ino


def _unite(t: Transaction, ino: int, own: OwnRecord, inode: Inode) -> None:
    """Makes a directory of the engine one with this node's of the same path."""
    there = read_inode(t, ino)
    is_later = (inode.ctime_ns, own.ino) > (there.ctime_ns, ino)
    mode, flags = there.mode, there.flags
    if own.ino != ino:
        both = there.mode & (inode.mode | ~0o077)
        if there.gid != inode.gid:
            both &= ~0o070 | (both & 0o007) << 3
        mode = (inode.mode if is_later else there.mode) & (~0o077 | both)
    elif is_later:
        mode = inode.mode
    if not inode.flags & Flag.IMPLIED:
        flags &= ~Flag.IMPLIED
    before = there.mode, there.flags, there.uid, there.gid
    if is_later:
        there.uid, there.gid = inode.uid, inode.gid
        if own.ino == ino:
            _drop_other_attributes(t, own)
    for name, value in own.attributes:
        if is_later or (own.ino != ino and t.get(keys.xattr(ino, name)) is None):
            t.put(keys.xattr(ino, name), value)
    there.mode, there.flags = mode, flags
    if before != (mode, flags, there.uid, there.gid):
        write_inode(t, ino, there)
    if max(inode.mtime_ns, inode.ctime_ns) > min(there.mtime_ns, there.ctime_ns):
        stamp(t, ino, there, max(inode.mtime_ns, inode.ctime_ns))


# ---- what the engine has: files


def tell(t: Transaction, own: OwnRecord, numbers: Mapping[bytes, int], *, is_removed: bool) -> None:
    """Has the engine know the record of a file, and this node as a holder, without its name.
    `numbers`: those of directories there, by path. `is_removed`: its name was removed on another
    node."""
    inode, packed = unpack_inode(own.packed), t.get(keys.inode(own.ino))
    if own.path is None or is_removed:
        inode.nlink = inode.parent = 0
    else:
        inode.nlink, inode.parent = 1, numbers[own.path.rpartition(b"/")[0]]
    if packed is None:
        if inode.nlink or stat.S_ISREG(inode.mode):
            add_usage(t, namespace_of(own.ino), BLOCK * inode.blocks, 1)
            _add(t, own, inode)
        return
    there = unpack_inode(packed)
    unsealed = t.get(keys.unsealed(own.ino))
    is_later = _rank(inode, _is_written(t, own.ino, own.unsealed, t.node)) > _rank(
        there, _is_written(t, own.ino, unsealed, unsealed)
    )
    if is_later:
        if stat.S_ISREG(inode.mode) and not _is_same(inode, there):
            for each in placements.holders(t, own.ino):
                placements.let_go(t, own.ino, each.node)
        blocks, inode.blocks = inode.blocks, there.blocks
        set_blocks(t, own.ino, inode, blocks)
        _replace(t, own, inode)
    elif stat.S_ISREG(inode.mode) and _is_same(inode, there):
        placements.hold(t, own.ino, there.version)


def tell_name(t: Transaction, own: OwnRecord, now: int) -> NameMet:
    """Gives a file its name in the engine, which has all records of all nodes, or makes it an
    orphan."""
    packed = t.get(keys.inode(own.ino))
    inode = None if packed is None else unpack_inode(packed)
    if inode is None or not inode.nlink:
        return NameMet.NONE
    writer = t.get(keys.unsealed(own.ino))
    if writer is not None and t.get(keys.placement(own.ino, writer)) is None:
        (first, *_) = placements.holders(t, own.ino)
        t.put(keys.unsealed(own.ino), first.node)
    key = keys.file_entry(inode.parent, inode.name)
    value = t.get(key)
    if value == keys.pack_u64(own.ino):
        return NameMet.NONE
    if value is None:
        t.put(key, keys.pack_u64(own.ino))
        return NameMet.NONE
    other = keys.unpack_u64(value)
    there = read_inode(t, other)
    met = NameMet.SAME if _is_same(inode, there) else NameMet.OTHER
    if _beats((inode, own.ino), (there, other)):
        _orphan(t, other, there, now)
        t.put(key, keys.pack_u64(own.ino))
    else:
        _orphan(t, own.ino, inode, now)
    return met


def _rank(inode: Inode, is_written: bool) -> tuple[int, ...]:
    """Orders the records that nodes have of one number: the greatest counts. Content that replaced
    other content has a later version, whatever the clocks say. Whoever breaks a seal to write
    changes no time, so it comes before a seal of the same times."""
    is_sealed = bool(inode.flags & Flag.SEALED)
    return (
        *(bool(inode.nlink), inode.version, inode.ctime_ns, inode.mtime_ns, is_written, is_sealed),
        *(inode.size, int.from_bytes(inode.checksum)),
    )


def _beats(one: tuple[Inode, int], other: tuple[Inode, int]) -> bool:
    """Returns whether a file gets a name that another one has: if it is still being made, or was
    written later."""

    def order(inode: Inode, ino: int) -> tuple[int, ...]:
        return not inode.flags & Flag.PUBLISHED, inode.mtime_ns, inode.ctime_ns, ino

    return order(*one) > order(*other)


def _is_same(one: Inode, other: Inode) -> bool:
    """Returns whether two records are of the same sealed content."""
    both = one.flags & other.flags & Flag.SEALED
    seals = [(each.size, each.checksum, each.version) for each in (one, other)]
    return bool(both) and seals[0] == seals[1]


def _is_written(t: Transaction, ino: int, unsealed: bytes | None, node: bytes | None) -> bool:
    """Returns whether the node that has told of a file is the one that writes it."""
    if unsealed is None or node != unsealed:
        return False
    return node == t.node or t.get(keys.placement(ino, unsealed)) is not None


def _replace(t: Transaction, own: OwnRecord, inode: Inode) -> None:
    """Writes a record with what hangs on it, in place of what the engine has."""
    _drop_other_attributes(t, own)
    for key in (keys.unsealed(own.ino), keys.unpublished(own.ino), keys.orphan(own.ino)):
        t.delete(key)
    _add(t, own, inode)


def _add(t: Transaction, own: OwnRecord, inode: Inode) -> None:
    """Writes a record with what hangs on it."""
    for name, value in own.attributes:
        t.put(keys.xattr(own.ino, name), value)
    if stat.S_ISREG(inode.mode):
        placements.hold(t, own.ino, inode.version)
        if not inode.flags & Flag.PUBLISHED:
            t.put(keys.unpublished(own.ino), t.node)
    if own.unsealed is not None:
        t.put(keys.unsealed(own.ino), own.unsealed)
    if not inode.nlink:
        t.put(keys.orphan(own.ino), b"")
    write_inode(t, own.ino, inode)


def _drop_other_attributes(t: Transaction, own: OwnRecord) -> None:
    """Drops the attributes that a record does not have."""
    kept = dict(own.attributes)
    for name in list_xattrs(t, own.ino):
        if name not in kept:
            t.delete(keys.xattr(own.ino, name))


def _orphan(t: Transaction, ino: int, inode: Inode, now: int) -> None:
    """Takes its name from a file that loses it to another one; the caller changes the entry."""
    if stat.S_ISREG(inode.mode):
        lose_link(t, ino, inode, (inode.parent, inode.name), now, lambda _ino: True)
    else:
        drop_inode(t, ino, inode)
