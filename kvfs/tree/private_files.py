"""New files that only the node which made them knows of, when others are to know them.

Others may have used the name meanwhile: they could not see it. Of two files of one name, the one
that becomes known last counts as closed last, unless its host was cut off in between: then it may
be older, and gives way. No two hosts' clocks are compared. A directory takes a name from nobody: if
it might, the files that others made are known first.

An unpublished file keeps its name from nobody, unless it is reserved: another file of that name may
take the entry. It keeps its record, as if it were private, and its close settles its name.
"""

from enum import Enum
from typing import Final

from kvfs.meta import delegations, keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag, Inode, namespace_of, unpack_inode, unpack_namespace
from kvfs.tree.entries import find_entry, lose_link
from kvfs.tree.inodes import is_directory, read_inode, write_inode

_LATE_S: Final = 2.0
"""As long as a cache may lag behind."""


class NameState(Enum):
    """The state of the name of a file that is to become known."""

    OWN = "own"
    """It leads to the file."""
    TAKEN = "taken"
    """It leads to another file now."""
    GONE = "gone"
    """Its directory was removed, or it is a directory's now."""


def is_late(closed_at: float, now: float) -> bool:
    """Returns whether a file that was closed then is made known only now because its host was cut
    off. By this host's clock of seconds since its boot; 0: it is closed by the act that makes it
    known. A time from another boot is late."""
    return bool(closed_at) and not 0.0 <= now - closed_at <= _LATE_S


def settle(
    t: Transaction, ino: int, now: int, *, yields: bool = False, record: Inode | None = None
) -> NameState:
    """Settles the name of an inode before it is known to others: the file has its name, in place of
    a file of another host that took it meanwhile, as the one that was closed last. If its directory
    is gone, the name is a directory's now, or another file's and this one `yields`, it is as if
    removed. `record`: its own, read or written just now; None: it was not."""
    value = t.get(keys.inode(ino)) if record is None else None
    inode = record if value is None else unpack_inode(value)
    if inode is None or not inode.nlink or is_directory(inode):
        return NameState.OWN
    key = keys.file_entry(inode.parent, inode.name)
    parent = t.get(keys.inode(inode.parent))
    leads_to = t.get(key)
    place = NameState.GONE
    if parent is not None and unpack_inode(parent).nlink:
        if leads_to == keys.pack_u64(ino):
            return NameState.OWN
        entry = find_entry(t, inode.parent, inode.name)
        if entry is None or (not entry.directory and _gives_way(t, entry.ino)):
            t.put(key, keys.pack_u64(ino))
            return NameState.OWN
        if not (entry.directory or yields):
            other = read_inode(t, entry.ino)
            lose_link(t, entry.ino, other, (inode.parent, inode.name), now, lambda _: True)
            t.put(key, keys.pack_u64(ino))
            return NameState.OWN
        place = NameState.GONE if entry.directory else NameState.TAKEN
    elif leads_to == keys.pack_u64(ino):
        t.delete(key)
    inode.nlink, inode.parent, inode.ctime_ns = 0, 0, now
    t.put(keys.orphan(ino), b"")
    write_inode(t, ino, inode)
    return place


def check_unseen(t: Transaction, parent: int) -> None:
    """Checks a free name before a directory takes it: if others may hear of a file after its close,
    one of that name may be closed already, and cannot take the name from a directory. Raises
    `delegations.Delegated`."""
    if not t.node:
        return
    namespace_id = namespace_of(parent)
    value = t.get(keys.namespace(namespace_id))
    if value is not None and unpack_namespace(value).may_lag:
        delegations.check_none(t, namespace_id)


def is_given_way(t: Transaction, parent: int, name: bytes) -> bool:
    """Returns whether a name belongs to a file of another node which gives way to one made here."""
    packed = t.get(keys.file_entry(parent, name))
    if packed is None:
        return False
    return _gives_way(t, keys.unpack_u64(packed))


def make_way(t: Transaction, parent: int, name: bytes) -> None:
    """Frees a name whose file gives way."""
    if is_given_way(t, parent, name):
        t.delete(keys.file_entry(parent, name))


def _gives_way(t: Transaction, ino: int) -> bool:
    if read_inode(t, ino).flags & (Flag.PUBLISHED | Flag.RESERVED):
        return False
    return t.get(keys.unpublished(ino)) not in (None, t.node)
