"""Salvage: reads what it can of an LMDB file in which bits have flipped, for an administrator's
repair.

LMDB trusts its pages, and would follow a damaged one out of its mapping. So they are read here,
each checked against its length; a page that contradicts its parent is left out, with everything
below it. A bit that flipped inside of a value cannot be noticed.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import lmdb

from kvfs.meta.lmdb.lmdb_file import (
    NO_PAGE,
    Leaf,
    Meta,
    TreePage,
    child_of,
    read_leaf,
    read_metas,
    read_page,
)

_BATCH: Final = 4_096


def salvage(path: Path, environment: lmdb.Environment) -> int:
    """Puts the readable part of all databases of a file into a new environment; returns how many
    pages and pairs cannot be read. Raises OSError, lmdb.Error."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        metas = read_metas(fd)
        if not metas:
            return 1
        snapshot = _Snapshot(fd, max(metas, key=lambda meta: meta.txnid))
        for each in _copy(snapshot.leaves(snapshot.meta.roots[1]), environment, None):
            if each.database is not None:
                _copy(snapshot.leaves(each.database), environment, each.key)
        return snapshot.unreadable
    finally:
        os.close(fd)


class _Snapshot:
    """The pages of a meta record, as far as they can be read."""

    def __init__(self, fd: int, meta: Meta) -> None:
        self.meta = meta
        self.unreadable = 0
        """Pages and pairs so far."""
        self._fd = fd
        self._seen: set[int] = set()

    def leaves(self, root: int) -> Iterator[Leaf]:
        """Yields the leaves in the order of their keys."""
        waiting = [root] if root != NO_PAGE else []
        while waiting:
            page = self._page(waiting.pop())
            if page is None:
                self.unreadable += 1
            elif page.is_branch:
                waiting.extend(child_of(page, offset) for offset in reversed(page.offsets))
            else:
                yield from self._of_page(page)

    def _of_page(self, page: TreePage) -> Iterator[Leaf]:
        for offset in page.offsets:
            try:
                leaf = read_leaf(self._fd, self.meta, page, offset)
            except OSError:
                leaf = None
            if leaf is None:
                self.unreadable += 1
            else:
                yield leaf

    def _page(self, pgno: int) -> TreePage | None:
        if pgno in self._seen:
            return None
        self._seen.add(pgno)
        try:
            return read_page(self._fd, self.meta, pgno)
        except OSError:
            return None


def _copy(leaves: Iterator[Leaf], environment: lmdb.Environment, name: bytes | None) -> list[Leaf]:
    """Puts pairs into the database of that name; returns the databases that are among them."""
    handle: Any = environment.open_db(name)
    databases: list[Leaf] = []
    batch: list[Leaf] = []
    for leaf in leaves:
        if leaf.database is not None:
            databases.append(leaf)
        else:
            batch.append(leaf)
        if len(batch) == _BATCH:
            _put(batch, environment, handle)
            batch.clear()
    _put(batch, environment, handle)
    return databases


def _put(batch: list[Leaf], environment: lmdb.Environment, handle: Any) -> None:
    with environment.begin(handle, write=True) as transaction:
        for leaf in batch:
            transaction.put(leaf.key, leaf.value)
