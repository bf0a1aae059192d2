"""The part of `fsck` that compares the engine's records with each other: names, links, lists,
usage.

Reads page by page. A problem's `mend` is one transaction that repairs just what it names; an inode
whose names were lost comes back under its namespace's top directory as `lost+found-<inode
number>`.
"""

import stat
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

from kvfs.base.printable import printable
from kvfs.datastore.index import Table
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.local_keys import is_local_key
from kvfs.meta.records import (
    ROOT_INODE,
    Flag,
    Inode,
    Usage,
    namespace_of,
    namespace_root,
    pack,
    unpack_inode,
    unpack_usage,
)
from kvfs.tree import namespaces
from kvfs.tree.inodes import BLOCK, drop_inode, write_inode


class Problem(NamedTuple):
    """One inconsistency."""

    kind: str
    """One of the kinds listed in `fsck`."""
    subject: str
    detail: str
    mend: Callable[[], None] | None
    """Repairs it; None if only a person can decide."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.subject}: {self.detail}"


_PAGE: Final = 1024
Pair = tuple[bytes, bytes]


class RecordCheck:
    """Checks the engine's records against each other."""

    def __init__(self, engine: Table, spaces: Sequence[bytes] | None = None) -> None:
        """`spaces`: the ids, as keys have them, of namespaces whose names are each node's own, of
        which alone the keys that are this node's are checked; None: all is."""
        self._engine = engine
        self._spaces = spaces

    def problems(self) -> Iterator[Problem]:
        """Yields every problem once; repairing one while the iteration goes on is fine."""
        usage: dict[int, Usage] = {}
        for key, value in self._all_of(keys.INODE):
            ino, inode = keys.unpack_u64(key, 1), unpack_inode(value)
            if not _is_top(ino):
                counted = usage.setdefault(namespace_of(ino), Usage())
                counted.bytes += BLOCK * inode.blocks
                counted.inodes += 1
            yield from self._of_inode(ino, inode)
        for key, value in self._all_of(keys.ENTRY):
            yield from self._of_entry(key, keys.unpack_u64(value))
        yield from self._of_lists()
        yield from self._of_usage(usage)

    def pages(self, start: bytes, end: bytes) -> Iterator[Pair]:
        """Yields all pairs from `start` to `end`, a page of them in memory at a time."""
        while page := self._engine.read_now(partial(_page, start=start, end=end)):
            yield from page
            start = page[-1][0] + b"\0"

    def _all_of(self, kind: bytes) -> Iterator[Pair]:
        """Yields the pairs of a class that are checked."""
        if self._spaces is None:
            yield from self.pages(kind, keys.after(kind))
            return
        for space in self._spaces:
            for pair in self.pages(kind + space, keys.after(kind + space)):
                if is_local_key(pair[0], self._spaces):
                    yield pair

    def _of_inode(self, ino: int, inode: Inode) -> Iterator[Problem]:
        if ino != ROOT_INODE and inode.nlink and not self._is_reachable(ino, inode):
            yield self._problem(
                "unreachable_inode", ino, "no name leads to it", lambda t: _reattach(t, ino)
            )
        elif (nlink := self._engine.read_now(lambda t: _count_links(t, ino, inode))) != inode.nlink:
            detail = f"it has {nlink} links, its record says {inode.nlink}"
            yield self._problem("wrong_link_count", ino, detail, lambda t: _recount_links(t, ino))
        for key, wanted, kind in _lists(ino, inode):
            if wanted and self._engine.read_now(lambda t, key=key: t.get(key)) is None:  # type: ignore[misc]
                detail = f"the list of {kind} files lacks it"
                yield self._problem("wrong_list", ino, detail, partial(_put_empty, key=key))

    def _is_reachable(self, ino: int, inode: Inode) -> bool:
        entry = _entry_of(inode)
        value = self._engine.read_now(lambda t: t.get(entry))
        return value is not None and keys.unpack_u64(value) == ino

    def _of_entry(self, key: bytes, ino: int) -> Iterator[Problem]:
        parent, name = keys.unpack_u64(key, 1), key[9:]
        value, above = self._engine.read_now(
            lambda t: (t.get(keys.inode(ino)), t.get(keys.inode(parent)))
        )
        directory = name.endswith(b"/")
        name = name.removesuffix(b"/")
        if value is None or directory != stat.S_ISDIR(unpack_inode(value).mode):
            problem = "leads to nothing" if value is None else "leads to an inode of another kind"
        elif above is None or not stat.S_ISDIR(unpack_inode(above).mode):
            problem = "stands in a directory that is gone"
        elif not self._knows(ino, unpack_inode(value), parent, name):
            problem = "is not among the names that its inode has"
        else:
            return
        subject = self._engine.read_now(lambda t: _path(t, parent, name))
        yield Problem(
            "dangling_entry", subject, problem, partial(self._now, partial(_remove, key=key))
        )

    def _knows(self, ino: int, inode: Inode, parent: int, name: bytes) -> bool:
        if (inode.parent, inode.name) == (parent, name):
            return True
        backlink = keys.backlink(ino, parent, name)
        return self._engine.read_now(lambda t: t.get(backlink)) is not None

    def _of_lists(self) -> Iterator[Problem]:
        """Yields keys that hang on an inode which is gone, or which is in another state than they
        say."""
        for key, _ in self._all_of(keys.ORPHAN):
            yield from self._stale(key, "orphan", lambda inode: not inode.nlink)
        for key, _ in self._all_of(keys.UNSEALED):
            yield from self._stale(key, "unsealed", lambda inode: stat.S_ISREG(inode.mode))
        for key, _ in self._all_of(keys.UNPUBLISHED):
            yield from self._stale(key, "unpublished", lambda i: not i.flags & Flag.PUBLISHED)
        for key, _ in self._all_of(keys.XATTR):
            yield from self._stale(key, "extended attribute", lambda _inode: True)
        for key, _ in self._all_of(b"b"):
            yield from self._stale(key, "link", lambda inode: inode.nlink > 1)

    def _stale(self, key: bytes, kind: str, fits: Callable[[Inode], bool]) -> Iterator[Problem]:
        ino = keys.unpack_u64(key, 1)
        value = self._engine.read_now(lambda t: t.get(keys.inode(ino)))
        if value is None or not fits(unpack_inode(value)):
            detail = f"it is listed as {kind} and is not"
            yield self._problem("wrong_list", ino, detail, partial(_remove, key=key))

    def _of_usage(self, usage: dict[int, Usage]) -> Iterator[Problem]:
        for each in self._engine.read_now(namespaces.list_all):
            if self._spaces is not None and keys.pack_u16(each.id) not in self._spaces:
                continue
            counted = usage.get(each.id, Usage())
            if counted != each.usage:
                yield Problem(
                    "wrong_usage",
                    f"namespace {each.namespace.name.decode(errors='backslashreplace')}",
                    f"it holds {counted.bytes} bytes in {counted.inodes} inodes, "
                    f"the books say {each.usage.bytes} in {each.usage.inodes}",
                    partial(self._now, partial(_recount_usage, namespace_id=each.id)),
                )

    def _problem(
        self, kind: str, ino: int, detail: str, mend: Callable[[Transaction], None]
    ) -> Problem:
        subject = self._engine.read_now(lambda t: name_of(t, ino))
        return Problem(kind, subject, detail, partial(self._now, mend))

    def _now(self, mend: Callable[[Transaction], None]) -> None:
        self._engine.transact_now(mend)


def name_of(t: Transaction, ino: int) -> str:
    """Names an inode in a message: by its path as far as the records tell, and its number."""
    value = t.get(keys.inode(ino))
    number = f"inode {ino:#x}"
    if value is None:
        return number
    inode = unpack_inode(value)
    if ino == ROOT_INODE:
        return f"/ ({number})"
    if not inode.nlink or not inode.name:
        return f"a file without a name ({number})"
    return f"{_path(t, inode.parent, inode.name)} ({number})"


def _path(t: Transaction, parent: int, name: bytes) -> str:
    """Returns the path on one line; it begins with `...` if it cannot be followed up to the
    root."""
    parts, seen = [name], set[int]()
    while parent != ROOT_INODE:
        value = t.get(keys.inode(parent))
        if value is None or parent in seen:
            parts.append(b"...")
            break
        seen.add(parent)
        inode = unpack_inode(value)
        parts.append(inode.name)
        parent = inode.parent
    else:
        parts.append(b"")
    return printable(b"/".join(reversed(parts)).decode(errors="backslashreplace"))


def _page(t: Transaction, start: bytes, end: bytes) -> list[Pair]:
    found: list[Pair] = []
    for pair in t.scan(start, end):
        found.append(pair)
        if len(found) == _PAGE:
            break
    return found


def _is_top(ino: int) -> bool:
    """Returns whether it is the root or a namespace's top directory, which usage does not count."""
    return ino == namespace_root(namespace_of(ino))


def _entry_of(inode: Inode) -> bytes:
    make = keys.directory_entry if stat.S_ISDIR(inode.mode) else keys.file_entry
    return make(inode.parent, inode.name)


def _lists(ino: int, inode: Inode) -> list[tuple[bytes, bool, str]]:
    """Returns (key, whether it must be there, name of the list)."""
    regular = stat.S_ISREG(inode.mode)
    return [
        (keys.orphan(ino), not inode.nlink, "orphan"),
        (keys.unsealed(ino), regular and _is_unsealed(inode), "unsealed"),
        (keys.unpublished(ino), regular and not inode.flags & Flag.PUBLISHED, "unpublished"),
    ]


def _is_unsealed(inode: Inode) -> bool:
    return not inode.flags & Flag.SEALED or inode.boot != 0


def _backlinks(t: Transaction, ino: int) -> list[tuple[int, bytes]]:
    prefix = keys.backlinks(ino)
    return [(keys.unpack_u64(key, 9), key[17:]) for key, _ in t.scan(prefix, keys.after(prefix))]


def _count_links(t: Transaction, ino: int, inode: Inode) -> int:
    """Returns the right link count: for a directory, 2 and one for each directory in it; for
    anything else, the number of names that lead to it."""
    if stat.S_ISDIR(inode.mode):
        if not inode.nlink:
            return 0
        prefix = keys.entries(ino)
        # Of the name alone: a file without one has no more of a key than its directory's number.
        children = t.scan(prefix, keys.after(prefix))
        return 2 + sum(key.endswith(b"/", len(prefix)) for key, _ in children)
    return len(_names(t, ino, inode))


def _names(t: Transaction, ino: int, inode: Inode) -> list[tuple[int, bytes]]:
    known = set(_backlinks(t, ino))
    if inode.parent:
        known.add((inode.parent, inode.name))
    packed = keys.pack_u64(ino)
    return sorted(each for each in known if t.get(keys.file_entry(*each)) == packed)


def _recount_links(t: Transaction, ino: int) -> None:
    value = t.get(keys.inode(ino))
    if value is None:
        return
    inode = unpack_inode(value)
    inode.nlink = _count_links(t, ino, inode)
    if not stat.S_ISDIR(inode.mode):
        names = _names(t, ino, inode)
        for parent, name in _backlinks(t, ino):
            t.delete(keys.backlink(ino, parent, name))
        if len(names) > 1:
            for parent, name in names:
                t.put(keys.backlink(ino, parent, name), b"")
    write_inode(t, ino, inode)


def _reattach(t: Transaction, ino: int) -> None:
    """Gives an inode a name again: another that it has, its old one if that is free, else one under
    the top."""
    value = t.get(keys.inode(ino))
    if value is None:
        return
    inode = unpack_inode(value)
    others = [] if stat.S_ISDIR(inode.mode) else _names(t, ino, inode)
    if others:
        inode.parent, inode.name = others[0]
    elif not _is_free(t, inode.parent, inode.name):
        inode.parent = namespace_root(namespace_of(ino))
        inode.name = b"lost+found-%x" % ino
        if not _is_free(t, inode.parent, inode.name):
            drop_inode(t, ino, inode)  # its namespace is gone
            return
    if not others:
        t.put(_entry_of(inode), keys.pack_u64(ino))
    write_inode(t, ino, inode)
    _recount_links(t, ino)


def _is_free(t: Transaction, parent: int, name: bytes) -> bool:
    """Returns whether the directory is there and has no such name."""
    value = t.get(keys.inode(parent))
    if value is None or not stat.S_ISDIR(unpack_inode(value).mode):
        return False
    return not (t.get(keys.file_entry(parent, name)) or t.get(keys.directory_entry(parent, name)))


def _recount_usage(t: Transaction, namespace_id: int) -> None:
    counted = Usage()
    for key, value in t.scan(keys.inode(namespace_id << 48), keys.inode((namespace_id + 1) << 48)):
        if not _is_top(keys.unpack_u64(key, 1)):
            counted.bytes += BLOCK * unpack_inode(value).blocks
            counted.inodes += 1
    books = t.get(keys.usage(namespace_id))
    if books is not None and unpack_usage(books) != counted:
        t.put(keys.usage(namespace_id), pack(counted))


def _put_empty(t: Transaction, key: bytes) -> None:
    t.put(key, b"")


def _remove(t: Transaction, key: bytes) -> None:
    t.delete(key)
