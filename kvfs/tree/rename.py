"""rename(2), with NOREPLACE and EXCHANGE: checks first, then the moves."""

from typing import Final

from kvfs.base.errors import (
    CrossNamespace,
    Exists,
    Invalid,
    IsADirectory,
    NotADirectory,
    NotEmpty,
    NotFound,
    NotPermitted,
)
from kvfs.meta import delegations, keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import ROOT_INODE, namespace_of
from kvfs.tree import namespaces
from kvfs.tree.entries import (
    DirectoryEntry,
    Keep,
    Removed,
    absence,
    entry_key,
    find_shown,
    is_empty,
    live_directory,
    lose_link,
    relocate,
    touch,
)
from kvfs.tree.inodes import read_inode, stamp
from kvfs.tree.private_files import check_unseen

RENAME_NOREPLACE: Final = 1
RENAME_EXCHANGE: Final = 2
RENAME_WHITEOUT: Final = 4


def rename(
    t: Transaction,
    old_parent: int,
    old_name: bytes,
    new_parent: int,
    new_name: bytes,
    *,
    flags: int = 0,
    now: int,
    keep: Keep,
) -> Removed | None:
    """Moves a name, atomically over an existing one; returns what was replaced.

    Two links of one inode: nothing happens, as in POSIX. Between top-level names it renames the
    namespace. Raises NotFound, Exists (NOREPLACE), NotADirectory, IsADirectory, NotEmpty, Invalid
    (into itself, unknown flags), CrossNamespace (also for a directory of a namespace with
    --coherence peer), NotPermitted (a file to the top level),
    NameTooLong; `delegations.Delegated`.
    """
    if flags & ~(RENAME_NOREPLACE | RENAME_EXCHANGE) or flags == RENAME_NOREPLACE | RENAME_EXCHANGE:
        raise Invalid(f"rename does not know the flags {flags:#x}")
    namespaces.check_name(old_name)
    namespaces.check_name(new_name)
    source = find_shown(t, old_parent, old_name)
    if source is None:
        raise absence(t, old_parent)
    if old_parent != new_parent:
        _check_namespaces(source, old_parent, new_parent)
    if source.directory:
        _check_stays(t, old_parent)
    target = find_shown(t, new_parent, new_name)
    old = old_parent, source.name
    new = new_parent, new_name if target is None else target.name
    if flags & RENAME_EXCHANGE:
        _exchange(t, source, old, target, new, now)
        return None
    if target is not None:
        if flags & RENAME_NOREPLACE:
            raise Exists("the new name is taken")
        if target.ino == source.ino:
            return None
    return _move(t, source, old, target, new, now, keep)


def _check_namespaces(source: DirectoryEntry, old_parent: int, new_parent: int) -> None:
    if namespace_of(old_parent) == namespace_of(new_parent):
        return
    if old_parent == ROOT_INODE and namespace_of(source.ino) == namespace_of(new_parent):
        raise Invalid("a namespace cannot move into itself")
    if new_parent == ROOT_INODE and not source.directory:
        raise NotPermitted("only namespaces stand at the top level: put the file into one")
    raise CrossNamespace("a name cannot move from one namespace into another: copy it")


def _check_stays(t: Transaction, parent: int) -> None:
    """Checks a directory that is to move. Raises CrossNamespace where other nodes may have files
    below its name that are not known here."""
    if namespaces.is_peer(t, namespace_of(parent)):
        raise CrossNamespace(
            "a directory of a namespace with --coherence peer does not move, since other nodes may"
            " have files in it: copy it"
        )


def _check_not_inside(t: Transaction, entry: DirectoryEntry, directory: int) -> None:
    """Raises Invalid when `directory` is the entry's directory or lies below it."""
    if not entry.directory:
        return
    while directory != ROOT_INODE:
        if directory == entry.ino:
            raise Invalid("a directory cannot move into itself")
        directory = read_inode(t, directory).parent


def _move(
    t: Transaction,
    source: DirectoryEntry,
    old: tuple[int, bytes],
    target: DirectoryEntry | None,
    new: tuple[int, bytes],
    now: int,
    keep: Keep,
) -> Removed | None:
    new_directory = live_directory(t, new[0])
    if source.directory:
        _check_not_inside(t, source, new[0])
    removed = None
    if target is None and source.directory:
        check_unseen(t, new[0])
    if target is not None:
        _check_replace(t, source, target)
        removed = _remove_target(t, target, new, now, keep)
        if new[0] == ROOT_INODE:  # it was a namespace, and the root's record has changed with it
            new_directory = live_directory(t, new[0])
    t.delete(source.key)
    key = keys.ENTRY + keys.pack_u64(new[0]) + new[1]
    t.put(key + b"/" if source.directory else key, keys.pack_u64(source.ino))
    relocate(t, source.ino, read_inode(t, source.ino), old, new, now)
    if new[0] == ROOT_INODE:
        _follow_namespace(t, source, new)
    replaced_directory = target is not None and target.directory and new[0] != ROOT_INODE
    gained = -1 if replaced_directory else 0
    if old[0] != new[0]:
        moved = 1 if source.directory else 0
        touch(t, old[0], read_inode(t, old[0]), now, -moved)
        gained += moved
    if gained:
        touch(t, new[0], new_directory, now, gained)
    else:
        stamp(t, new[0], new_directory, now)
    return removed


def _check_replace(t: Transaction, source: DirectoryEntry, target: DirectoryEntry) -> None:
    if source.directory and not target.directory:
        raise NotADirectory("a directory cannot replace a file")
    if target.directory and not source.directory:
        raise IsADirectory("a file cannot replace a directory")
    if not target.directory:
        return
    if not is_empty(t, target.ino):
        raise NotEmpty("the directory at the new name is not empty")
    delegations.check_none(t, namespace_of(target.ino))


def _remove_target(
    t: Transaction, target: DirectoryEntry, link: tuple[int, bytes], now: int, keep: Keep
) -> Removed:
    inode = read_inode(t, target.ino)
    if link[0] == ROOT_INODE:
        namespaces.forget(t, namespace_of(target.ino), link[1], now)
    t.delete(target.key)
    return lose_link(t, target.ino, inode, link, now, keep)


def _follow_namespace(t: Transaction, entry: DirectoryEntry, link: tuple[int, bytes]) -> None:
    if link[0] == ROOT_INODE:
        namespaces.rename(t, namespace_of(entry.ino), link[1])


def _exchange(
    t: Transaction,
    source: DirectoryEntry,
    old: tuple[int, bytes],
    target: DirectoryEntry | None,
    new: tuple[int, bytes],
    now: int,
) -> None:
    if target is None:
        raise NotFound("there is nothing to exchange with")
    if target.ino == source.ino:
        return
    _check_namespaces(target, new[0], old[0])
    if target.directory:
        _check_stays(t, new[0])
    _check_not_inside(t, source, new[0])
    _check_not_inside(t, target, old[0])
    t.delete(source.key)
    t.delete(target.key)
    for entry, origin, place in ((source, old, new), (target, new, old)):
        key = entry_key(*place, entry.directory)
        if t.get(key) is not None:
            raise Exists("a file and a directory share the name: exchange would hide one")
        t.put(key, keys.pack_u64(entry.ino))
        relocate(t, entry.ino, read_inode(t, entry.ino), origin, place, now)
        _follow_namespace(t, entry, place)
    gained = 0 if old[0] == new[0] else source.directory - target.directory
    touch(t, old[0], read_inode(t, old[0]), now, -gained)
    touch(t, new[0], read_inode(t, new[0]), now, gained)
