"""Names of a directory that a node tells others of, and those of several nodes as one list.

A node tells of files that were published and whose data it has, and of directories with such a file
below them: so each name of a list leads to something that its holder has. Symbolic links, special
files and empty directories are told to nobody.

Invariants
- A page has all names of its node from its start up to `following`, in the order of their keys. So
  the merged page has all names of all nodes up to the least `following`, each once.
- A page costs its node no more than the entries that were asked for, whatever it tells of them.
"""

import stat
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final, Literal

import msgspec

from kvfs.base.errors import UNDECODABLE, Invalid
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag, Inode, namespace_of, namespace_root, pack, unpack_inode
from kvfs.tree import etags, name_escaping
from kvfs.tree.copies import peer_directories
from kvfs.tree.copies.peer_directories import DirectoryAccess
from kvfs.tree.inodes import get_xattr, list_xattrs, with_times

Detail = Literal["names", "records", "attributes"]
"""The facts that are told of each name: its type; also its record and ETag; also all extended
attributes."""
MOST_NAME: Final = name_escaping.SPLIT + 1
"""Bytes of an entry's name, without the '/' of a directory."""
_PATIENCE: Final = 1024
"""Entries that are looked at for one that is told of: a directory with more counts as one that has
such."""


class AskedPage(msgspec.Struct, array_like=True, frozen=True):
    """A question for names of a directory."""

    namespace_id: int
    path: bytes
    """That of the directory; empty: the namespace's own."""
    start: bytes
    """The first key that is wanted."""
    limit: int
    """Entries that are looked at."""


class ToldName(msgspec.Struct, array_like=True):
    """A name of a directory, as its holder tells it."""

    key: bytes
    """The entry: the name, with a '/' if it is a directory's."""
    ino: int
    mode: int
    changed_ns: int
    """ctime."""
    renews_ns: int = 0
    """The removal of the name after which the file was written; 0: none is known."""
    record: bytes = b""
    attributes: list[tuple[bytes, bytes]] = []


class ToldPage(msgspec.Struct, array_like=True):
    """Names of a directory, in the order of their keys."""

    names: list[ToldName]
    following: bytes = b""
    """The first key that may come next; empty: these are the last."""
    changed_ns: int = 0
    """ctime of the directory; 0: there is none."""
    directories: list[DirectoryAccess] = []
    """Owner and mode of each directory of its path, from that below the namespace's root down."""


def is_told(t: Transaction, ino: int, inode: Inode) -> bool:
    """Returns whether this node tells others of a file: it is whole, and its data are here."""
    if not stat.S_ISREG(inode.mode) or not inode.flags & Flag.PUBLISHED or inode.nlink != 1:
        return False
    return t.get(keys.placement(ino, t.node)) is not None


def tells_of_any(t: Transaction, directory: int) -> bool:
    """Returns whether this node tells others of any file below a directory."""
    looked_at = 0
    scans = [_entries(t, directory, b"")]
    while scans:
        for suffix, packed in scans[-1]:
            looked_at += 1
            if looked_at > _PATIENCE:
                return True
            if suffix.endswith(b"/"):
                scans.append(_entries(t, keys.unpack_u64(packed), b""))
                break
            record = t.get(keys.INODE + packed)
            if record is not None and is_told(t, keys.unpack_u64(packed), unpack_inode(record)):
                return True
        else:
            scans.pop()
    return False


def told_page(t: Transaction, asked: AskedPage, detail: Detail) -> ToldPage:
    """Returns what this node tells of a part of a directory."""
    found = peer_directories.all_along(t, asked.namespace_id, asked.path)
    if found is None:
        return ToldPage([])
    directory = found[-1][0] if found else namespace_root(asked.namespace_id)
    page = ToldPage([], b"", _changed_ns(t, directory), peer_directories.access(found))
    last = None
    entries = list(islice(_entries(t, directory, asked.start), asked.limit))
    records = t.get_many([keys.INODE + packed for _, packed in entries])
    for (suffix, packed), record in zip(entries, records, strict=True):
        last = suffix
        told = None if record is None else _told(t, suffix, packed, record, detail)
        if told is not None:
            page.names.append(told)
    if last is not None and len(entries) == asked.limit:
        page.following = last + b"\0"
    return page


def merged(
    pages: Sequence[tuple[int, ToldPage]],
    is_removed: Callable[[ToldName], bool],
    first_asked: Callable[[bytes, Sequence[int]], int],
) -> tuple[ToldPage, list[int]]:
    """Returns one page of the pages that nodes told, and the node of each of its names. Of nodes
    with different files of one name it has that of the one which `first_asked` returns for it."""
    end = min((page.following for _, page in pages if page.following), default=b"")
    tellers: dict[bytes, dict[int, ToldName]] = {}
    for node, page in pages:
        for told in page.names:
            if (not end or told.key < end) and not is_removed(told):
                tellers.setdefault(told.key, {})[node] = told
    names, nodes = [], []
    for key in sorted(tellers):
        by_node = tellers[key]
        node = next(iter(by_node))
        if len({each.ino for each in by_node.values()}) > 1:
            node = first_asked(key, list(by_node))
        names.append(by_node[node])
        nodes.append(node)
    changed_ns = max((page.changed_ns for _, page in pages), default=0)
    return ToldPage(names, end, changed_ns), nodes


def check_page(asked: AskedPage, page: ToldPage, detail: Detail) -> None:
    """Raises Invalid unless these may be the names that were asked for. Their records become those
    of files whose data are elsewhere."""
    space, last = asked.namespace_id, asked.start
    if page.names and len(page.directories) != peer_directories.depth(asked.path):
        raise Invalid("a node tells of other directories than were asked for")
    for told in page.names:
        name = told.key.removesuffix(b"/")
        if told.key < last or len(name) > MOST_NAME or b"/" in name:
            raise Invalid("a node tells of names that were not asked for")
        if name_escaping.is_hidden(told.key) or stat.S_ISDIR(told.mode) != told.key.endswith(b"/"):
            raise Invalid("a node tells of a name that can be none")
        if namespace_of(told.ino) != space or told.ino == namespace_root(space):
            raise Invalid("a node tells of a file of another namespace")
        if detail != "names":
            told.record = _of_elsewhere(told)
        last = told.key + b"\0"
    if page.following and not asked.start < page.following >= last:
        raise Invalid("a node tells of a page that does not get on")


def _of_elsewhere(told: ToldName) -> bytes:
    try:
        inode = unpack_inode(told.record)
    except UNDECODABLE as error:
        raise Invalid(f"a node tells of a record that is none: {error}") from None
    if inode.mode != told.mode or not inode.flags & Flag.PUBLISHED:
        raise Invalid("a node tells of a file that was never closed")
    inode.blocks = inode.boot = 0
    return pack(inode)


def _entries(t: Transaction, directory: int, start: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields what may be told of: the entry without its directory, and the inode number packed."""
    prefix = keys.entries(directory)
    is_top = directory == namespace_root(namespace_of(directory))
    for key, packed in t.scan(prefix + start, keys.after(prefix)):
        suffix = key[len(prefix) :]
        if is_top and suffix == b"/":
            continue  # its path would be that of the namespace
        if name_escaping.NUL not in suffix or name_escaping.is_continuation(suffix):
            yield suffix, packed


def _told(
    t: Transaction, suffix: bytes, packed: bytes, record: bytes, detail: Detail
) -> ToldName | None:
    ino, inode = keys.unpack_u64(packed), unpack_inode(record)
    if suffix.endswith(b"/"):
        if not tells_of_any(t, ino):
            return None
        with_times(t, ino, inode)
    elif not is_told(t, ino, inode):
        return None
    told = ToldName(suffix, ino, inode.mode, inode.ctime_ns)
    if detail != "names":
        told.record = pack(inode)
        told.attributes = _attributes(t, ino, detail)
    return told


def _attributes(t: Transaction, ino: int, detail: Detail) -> list[tuple[bytes, bytes]]:
    if detail == "attributes":
        return [(name, get_xattr(t, ino, name)) for name in list_xattrs(t, ino)]
    etag = t.get(keys.xattr(ino, etags.ETAG))
    return [] if etag is None else [(etags.ETAG, etag)]


def _changed_ns(t: Transaction, directory: int) -> int:
    record = t.get(keys.inode(directory))
    return 0 if record is None else with_times(t, directory, unpack_inode(record)).ctime_ns
