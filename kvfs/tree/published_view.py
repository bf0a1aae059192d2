"""The namespace as a process other than the mount sees it: files that were published.

A file that was never closed is visible on its mount alone; one whose data a power cut may have torn
(written in another boot, never synced) is a miss until the node's start has dropped it. Directories
and other inodes are visible as they are.
"""

import stat
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvfs.base.errors import NameTooLong, NotADirectory, NotFound
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import ROOT_INODE, Flag, Inode, unpack_inode
from kvfs.tree import tree
from kvfs.tree.inodes import is_directory, read_inode, read_inodes
from kvfs.tree.namespaces import MAX_NAME

_UNPUBLISHED: Final = (keys.UNPUBLISHED, keys.after(keys.UNPUBLISHED))
"""The range of the marks of files that are not published yet."""


def is_here(t: Transaction, ino: int, inode: Inode) -> bool:
    """Returns whether this node's own mount shows it: a file that another node is making, and did
    not publish, is its maker's alone."""
    if inode.flags & Flag.PUBLISHED or not stat.S_ISREG(inode.mode):
        return True
    return t.get(keys.unpublished(ino)) in (None, t.node)


class FoundInode(NamedTuple):
    """An inode that a path leads to."""

    ino: int
    inode: Inode


class ListedInode(NamedTuple):
    """A name in a directory."""

    key: bytes
    """The point to go on from after it."""
    name: bytes
    ino: int
    inode: Inode


def is_visible(t: Transaction, ino: int, inode: Inode, boot: int) -> bool:
    """Returns whether others than its mount may read it; `boot` is the running one's id. Another
    node answers for files that it wrote and did not sync yet: it serves nothing before it has
    recovered."""
    if not stat.S_ISREG(inode.mode):
        return True
    if not inode.flags & Flag.PUBLISHED:
        return False
    if inode.boot in (0, boot):
        return True
    return bool(t.node) and t.get(keys.unsealed(ino)) not in (None, t.node)


def find(t: Transaction, path: Sequence[bytes], boot: int) -> FoundInode:
    """Walks a path from the root of the mount; symbolic links are not followed.

    Raises NotFound (with its `at`), NotADirectory (a part of the path is none), NameTooLong; their
    messages do not name the path.
    """
    above = ROOT_INODE
    ino, inode = ROOT_INODE, read_inode(t, ROOT_INODE)
    for name in path:
        if not is_directory(inode):
            raise NotADirectory("a part of the path is not a directory")
        found = tree.find(t, ino, name)
        if found is None:
            raise missing(ino, name)
        above = ino
        ino, inode = found
    if not is_visible(t, ino, inode, boot):
        raise missing(above, path[-1])
    return FoundInode(ino, inode)


def missing(directory: int, name: bytes) -> NotFound:
    """Returns the error of a name that is not there."""
    error = NotFound("no such file or directory")
    error.at = keys.file_entry(directory, name)
    return error


def find_many(
    t: Transaction, paths: Sequence[tuple[bytes, ...]], boot: int
) -> list[FoundInode | bytes | NotFound]:
    """Like `find`; for a path that leads nowhere it gives the missing entry (`NotFound.at`), or the
    reason for its directory. Each directory is looked up once, its files by two reads for all."""
    directories: dict[tuple[bytes, ...], int | NotFound] = {}
    is_one = len(paths) == 1
    found: list[FoundInode | bytes | NotFound] = []
    files: list[tuple[int, bytes]] = []
    """The place in `found`, and the entry, of each plain name below a namespace."""
    for at, path in enumerate(paths):
        above = path[:-1]
        directory = directories.get(above)
        if directory is None:
            directory = directories[above] = find_directory(t, above, boot)
        if is_one or not above or type(directory) is not int or not _is_plain(path[-1]):
            found.append(_find_in(t, directory, path, boot))
        else:
            entry = keys.ENTRY + keys.pack_u64(directory) + path[-1]
            files.append((at, entry))
            found.append(entry)
    if files:
        for at in _find_files(t, files, boot, found):
            found[at] = _find_in(t, directories[paths[at][:-1]], paths[at], boot)
    return found


def _is_plain(name: bytes) -> bool:
    """Returns whether its entry is known without a look (see `tree.find`)."""
    return len(name) <= MAX_NAME and b"%" not in name and name not in (b".", b"..")


def _find_files(
    t: Transaction,
    files: Sequence[tuple[int, bytes]],
    boot: int,
    found: list[FoundInode | bytes | NotFound],
) -> list[int]:
    """Puts the inode of each entry (see `keys.file_entry`) of a visible file in its place in
    `found`; returns the places of those under whose names there is something else."""
    others: list[int] = []
    absent: list[tuple[int, bytes]] = []
    there: list[tuple[int, bytes]] = []
    for file, number in zip(files, t.get_many([entry for _, entry in files]), strict=True):
        if number:
            there.append((file[0], number))
        else:
            absent.append(file)
    records = t.get_many([keys.INODE + number for _, number in there])
    for (at, number), record in zip(there, records, strict=True):
        inode = None if record is None else unpack_inode(record)
        if inode is not None and inode.flags & Flag.PUBLISHED and inode.boot in (0, boot):
            found[at] = FoundInode(int.from_bytes(number, "big"), inode)  # as `is_visible` has it
        else:
            others.append(at)
    if absent:
        directories = t.get_many([entry + b"/" for _, entry in absent])
        others += [at for (at, _), inside in zip(absent, directories, strict=True) if inside]
    return others


def _find_in(
    t: Transaction, directory: int | NotFound, path: tuple[bytes, ...], boot: int
) -> FoundInode | bytes | NotFound:
    if isinstance(directory, NotFound):
        return directory
    name = path[-1] if path else b"."
    found = tree.find(t, directory, name) if len(name) <= MAX_NAME else None
    if found is None or not is_visible(t, *found, boot):
        return keys.file_entry(directory, name)
    return FoundInode(*found)


def find_directory(t: Transaction, path: Sequence[bytes], boot: int) -> int | NotFound:
    """Returns the inode of a directory; the error if the path leads to none."""
    try:
        found = find(t, path, boot)
    except NotFound as error:
        return error.with_traceback(None)  # which holds what its callers had
    except (NotADirectory, NameTooLong) as error:
        return NotFound(str(error))
    return found.ino if is_directory(found.inode) else NotFound("not a directory")


def exist(t: Transaction, entries: Sequence[bytes]) -> list[bool]:
    """Returns whether each of these entries (see `keys.file_entry`) is a name of a published file,
    or of anything else; three round trips for all, mostly two.

    A record torn by a power cut counts as existing until the node's start has dropped it: only
    entries are looked at.
    """
    values = t.get_many(entries)
    if next(t.scan(*_UNPUBLISHED), None) is not None:
        _hide_unpublished(t, values)
    found = [value is not None for value in values]
    missing = [at for at, there in enumerate(found) if not there]
    if missing:
        directories = t.get_many([entries[at] + b"/" for at in missing])
        for at, value in zip(missing, directories, strict=True):
            found[at] = value is not None
    return found


def _hide_unpublished(t: Transaction, values: list[bytes | None]) -> None:
    there = [(at, value) for at, value in enumerate(values) if value is not None]
    marks = t.get_many([keys.UNPUBLISHED + value for _, value in there])
    for (at, _), mark in zip(there, marks, strict=True):
        if mark is not None:
            values[at] = None


def list_children(
    t: Transaction, parent: int, after_key: bytes, limit: int, boot: int
) -> tuple[list[ListedInode], bytes]:
    """Returns the visible entries among the next `limit` names after `after_key`, and where to go
    on (empty: nowhere, all were given)."""
    children = tree.list_children(t, parent, after_key, limit)
    records = read_inodes(t, [child.ino for child in children])
    listed = [
        ListedInode(child.key, child.name, child.ino, inode)
        for child, inode in zip(children, records, strict=True)
        if inode is not None and is_visible(t, child.ino, inode, boot)
    ]
    return listed, children[-1].key if len(children) == limit else b""
