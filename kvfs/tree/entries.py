"""The steps of every change of a name: find, touch the parent, move, lose a link.

A directory's entry is `name/`, any other's `name`. Both may stand in one parent, and names may have
bytes that no mount can show, since object stores allow it: see `name_escaping`.

Invariants
- A file with one link has no backlink keys; with more, one for each link, and (parent, name) of its
  record is one of them.
- An inode without a link has nlink 0, parent 0 and an orphan key.
"""

import stat
from collections.abc import Callable
from typing import Final, NamedTuple

from kvfs.base.errors import Corrupt, DirectoryGone, KvfsError, NotADirectory, NotFound
from kvfs.meta import delegations, keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag, Inode, namespace_of, namespace_root, pack, unpack_inode
from kvfs.tree import name_escaping, namespaces
from kvfs.tree.inodes import drop_inode, is_directory, read_inode, stamp, write_inode

Keep = Callable[[int], bool]
"""Returns whether an inode whose last link goes may still be held, and so must stay as an
orphan."""

_PARENT: Final = 9
"""The offset of the parent in a backlink key: `b` and the inode come before."""
_NAME: Final = 17


class DirectoryEntry(NamedTuple):
    """An existing name."""

    key: bytes
    ino: int
    directory: bool

    @property
    def name(self) -> bytes:
        """The name as the engine has it."""
        return self.key[9:-1] if self.directory else self.key[9:]


class Pruned(NamedTuple):
    """A directory that went with the last name in it."""

    parent: int
    name: bytes
    removed: "Removed"


class Removed(NamedTuple):
    """The inode behind a name before it went."""

    ino: int
    inode: Inode
    """The record as it is now: with one link fewer."""
    dropped: bool
    """Whether the record is gone, so that the data file may go. False: a link is left, or it may be
    held."""
    marker: "Removed | None" = None
    """The object's empty marker that went with its directory."""


def find_shown(t: Transaction, parent: int, name: bytes) -> DirectoryEntry | None:
    """Returns the entry that the mount shows under this name, which may be an odd form."""
    key = keys.ENTRY + keys.pack_u64(parent) + name
    value = t.get(key)
    if value is not None:
        return DirectoryEntry(key, int.from_bytes(value), False)
    if b"%" not in name:
        key += b"/"
        value = t.get(key)
        return None if value is None else DirectoryEntry(key, int.from_bytes(value), True)
    entry = find_entry(t, parent, name)
    if entry is not None:
        return entry
    suffix = name_escaping.find(t, parent, name)
    if suffix is None:
        return None
    key = keys.entries(parent) + suffix
    return DirectoryEntry(key, keys.unpack_u64(t.get(key) or b""), suffix.endswith(b"/"))


def find_entry(t: Transaction, parent: int, name: bytes) -> DirectoryEntry | None:
    """Returns the entry of this very name, a file's first."""
    key = keys.ENTRY + keys.pack_u64(parent) + name
    value = t.get(key)
    if value is not None:
        return DirectoryEntry(key, int.from_bytes(value), False)
    key += b"/"
    value = t.get(key)
    return None if value is None else DirectoryEntry(key, int.from_bytes(value), True)


def absence(t: Transaction, parent: int) -> KvfsError:
    """Returns the error for a name that is not in a directory: DirectoryGone where a cluster has no
    directory of this number, so that a kernel looks its path up once more."""
    if t.node and t.get(keys.INODE + keys.pack_u64(parent)) is None:
        return DirectoryGone("the directory is gone: its path may lead to another one")
    return NotFound("no such name")


def entry_key(parent: int, name: bytes, directory: bool) -> bytes:
    return keys.directory_entry(parent, name) if directory else keys.file_entry(parent, name)


def live_directory(t: Transaction, ino: int) -> Inode:
    """Returns the record of a directory that can take names. Raises NotFound when it was removed,
    NotADirectory."""
    value = t.get(keys.INODE + keys.pack_u64(ino))
    if value is None:
        gone = DirectoryGone if t.node else NotFound
        raise gone("the directory was removed")
    inode = unpack_inode(value)
    if not stat.S_ISDIR(inode.mode):
        raise NotADirectory("a part of the path is not a directory")
    if not inode.nlink:
        raise NotFound("the directory was removed")
    return inode


def is_empty(t: Transaction, directory: int) -> bool:
    prefix = keys.entries(directory)
    return next(t.scan(prefix, keys.after(prefix)), None) is None


def touch(t: Transaction, ino: int, inode: Inode, now: int, subdirectories: int = 0) -> None:
    """Records that a directory's names changed, and that it gained so many subdirectories. A
    namespace's own directory does not count those that are each node's own: its record is
    everybody's."""
    if not subdirectories or (
        ino == namespace_root(namespace_of(ino)) and namespaces.is_peer(t, namespace_of(ino))
    ):
        stamp(t, ino, inode, now)
        return
    inode.mtime_ns = inode.ctime_ns = now
    inode.nlink += subdirectories
    write_inode(t, ino, inode)


def relocate(
    t: Transaction, ino: int, inode: Inode, old: tuple[int, bytes], new: tuple[int, bytes], now: int
) -> None:
    """Records that one link moved from `old` to `new` (each parent, name); the caller changes the
    entries."""
    if inode.nlink > 1 and not is_directory(inode):
        t.delete(keys.backlink(ino, *old))
        t.put(keys.backlink(ino, *new), b"")
    if (inode.parent, inode.name) == old:
        inode.parent, inode.name = new
    inode.ctime_ns = now
    write_inode(t, ino, inode)


def lose_link(
    t: Transaction, ino: int, inode: Inode, link: tuple[int, bytes], now: int, keep: Keep
) -> Removed:
    """Records that the link (parent, name) is gone; the caller changes the entry."""
    inode.ctime_ns = now
    inode.nlink = 0 if stat.S_ISDIR(inode.mode) else inode.nlink - 1
    if inode.nlink > 0:
        t.delete(keys.backlink(ino, *link))
        _choose_link(t, ino, inode, link)
        write_inode(t, ino, inode)
        return Removed(ino, inode, False)
    # In a cluster other nodes may have a data file of it, which they drop first.
    if keep(ino) or (t.node and not is_directory(inode)):
        inode.parent, packed = 0, keys.pack_u64(ino)
        t.put_all([(keys.ORPHAN + packed, b""), (keys.INODE + packed, pack(inode))])
        return Removed(ino, inode, False)
    drop_inode(t, ino, inode)
    return Removed(ino, inode, True)


def prune(
    t: Transaction,
    directory: int,
    now: int,
    keep: Keep,
    is_in_use: Callable[[int], bool] = lambda _ino: False,
) -> list[Pruned]:
    """Removes a directory that was made for names below it (IMPLIED) if it is empty and not in use,
    and likewise those above it; returns them. Raises Stale, `delegations.Delegated`."""
    gone: list[Pruned] = []
    root = namespace_root(namespace_of(directory))
    while directory != root and is_empty(t, directory) and not is_in_use(directory):
        inode = read_inode(t, directory)
        if not inode.flags & Flag.IMPLIED or not inode.nlink:
            break
        delegations.check_none(t, namespace_of(directory))
        parent, name = inode.parent, inode.name
        t.delete(keys.directory_entry(parent, name))
        removed = lose_link(t, directory, inode, (parent, name), now, keep)
        touch(t, parent, read_inode(t, parent), now, -1)
        gone.append(Pruned(parent, name, removed))
        directory = parent
    return gone


def links(t: Transaction, ino: int, inode: Inode) -> list[tuple[int, bytes]]:
    """Returns (parent, name) of each link."""
    if inode.nlink == 0:
        return []
    if inode.nlink == 1 or is_directory(inode):
        return [(inode.parent, inode.name)]
    prefix = keys.backlinks(ino)
    found = [key for key, _ in t.scan(prefix, keys.after(prefix))]
    return [(keys.unpack_u64(key, _PARENT), key[_NAME:]) for key in found]


def _choose_link(t: Transaction, ino: int, inode: Inode, gone: tuple[int, bytes]) -> None:
    if inode.nlink > 1 and (inode.parent, inode.name) != gone:
        return
    prefix = keys.backlinks(ino)
    pair = next(t.scan(prefix, keys.after(prefix)), None)
    if pair is None:
        raise Corrupt(
            f"the file has {inode.nlink} names left, but none is recorded: run `kvfs fsck --repair`"
        )
    key = pair[0]
    inode.parent, inode.name = keys.unpack_u64(key, _PARENT), key[_NAME:]
    if inode.nlink == 1:
        t.delete(key)
