"""Commits made beyond this loop, by other nodes or other processes of this one, as changes for
mounts.

A commit is told key by key. A name matters only if a kernel may know it: in a directory that it
knows; an inode, if the kernel holds it. Pure.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Inode, unpack_inode
from kvfs.policy.miss_reasons import Lost
from kvfs.tree import lifecycle, name_escaping
from kvfs.tree.changes import Change

_ENTRY: Final = keys.ENTRY[0]
_INODE: Final = keys.INODE[0]
_NAME: Final = 9
"""The offset of the name in the key of an entry."""


class WrittenKey(NamedTuple):
    """A key that was changed."""

    key: bytes
    old: bytes | None
    new: bytes | None


_HEARD: Final = frozenset({_ENTRY, keys.LOCKS[0], keys.NODES[0], keys.NODE_USAGE[0], keys.HOMES[0]})
_PLACEMENT: Final = keys.PLACEMENT[0]


def audible(applied: Iterable[tuple[bytes, bytes | None, bytes | None]]) -> list[WrittenKey]:
    """Returns those of the keys that others changed (with their values before and now) that can
    matter to anybody here: a new inode does not, but by its name, nor a new copy of its data."""
    return [
        WrittenKey(key, old, new)
        for key, old, new in applied
        if (kind := key[0]) in _HEARD
        or (kind == _INODE and old is not None)
        or (kind == _PLACEMENT and new is None)
    ]


class Heard(NamedTuple):
    """The consequences for mounts."""

    changes: list[Change]
    contents: list[int]
    """Inodes whose data were replaced."""


def heard(
    t: Transaction,
    written: Iterable[WrittenKey],
    knows: Callable[[int], bool],
    holds: Callable[[int], bool],
) -> Heard:
    """Returns the consequences of the written keys. `knows`: whether a kernel may know this
    directory; `holds`: whether it may know this inode."""
    found = Heard([], [])
    for key, old, new in written:
        if key[0] == _ENTRY:
            parent = keys.unpack_u64(key, 1)
            if old != new and knows(parent):
                before = 0 if old is None else keys.unpack_u64(old)
                ino = before if holds(before) else 0
                names = name_escaping.all_shown(t, parent, key[_NAME:])
                found.changes.extend(Change(parent, name, ino) for name in names)
        elif key[0] == _INODE:
            ino = keys.unpack_u64(key, 1)
            if holds(ino):
                _inode(ino, old, new, found)
    return found


def lost(t: Transaction, written: Sequence[WrittenKey]) -> list[tuple[bytes, Lost]]:
    """Returns the names that went for a reason: entries as a mount is asked for them
    (`NotFound.at`)."""
    removed = [
        (each.key, each.old)
        for each in written
        if each.key[0] == _ENTRY and each.new is None and each.old is not None
    ]
    if not removed:
        return []
    records = {each.key[1:]: each.new for each in written if each.key[0] == _INODE}
    found: list[tuple[bytes, Lost]] = []
    for key, ino in removed:
        record = records.get(ino)
        reason = None if record is None else lifecycle.reason_of(unpack_inode(record))
        if reason is not None:
            parent = keys.unpack_u64(key, 1)
            names = name_escaping.all_shown(t, parent, key[_NAME:])
            found += [(keys.file_entry(parent, name), reason) for name in names]
    return found


def _inode(ino: int, old: bytes | None, new: bytes | None, found: Heard) -> None:
    after = None if new is None else unpack_inode(new)
    before = None if old is None else unpack_inode(old)
    if before is None or after is None or _content(before) != _content(after):
        found.contents.append(ino)
        found.changes.append(Change(ino, b"", ino))
    else:
        found.changes.append(Change(0, b"", ino))


def _content(inode: Inode) -> tuple[int, int, int]:
    return inode.version, inode.size, inode.mtime_ns
