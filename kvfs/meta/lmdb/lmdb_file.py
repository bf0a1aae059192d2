"""The part of LMDB's own file format that is read and written here (data version 1, on 64-bit
machines).

`data.mdb` is pages; pages 0 and 1 each hold a meta record: the roots of two trees (free pages, and
the data) as of one transaction. A commit writes new pages and then the meta page that is not in
force, so a meta record together with the pages it leads to *is* a snapshot. Format: lmdb's `mdb.c`,
MDB_page, MDB_meta, MDB_db, MDB_node.
"""

import os
import struct
from collections import deque
from typing import Final, NamedTuple

MAGIC: Final = 0xBEEFC0DE
DATA_VERSION: Final = 1
META_SIZE: Final = 136
_HEADER: Final = struct.Struct("=QHHHH")
"""pgno, pad, flags, lower, upper; an overflow page has its number of pages in place of the last
two."""
_META: Final = struct.Struct("=IIQQ48s48sQQ")
_DB: Final = struct.Struct("=IHHQQQQQ")
_NODE: Final = struct.Struct("=HHHH")
_PAGE_NUMBER: Final = struct.Struct("=Q")
_BRANCH: Final = 1
_LEAF: Final = 2
_OVERFLOW: Final = 4
_ELSEWHERE: Final = 1
"""A flag: the value has pages of its own."""
_SUB_DATABASE: Final = 2
NO_PAGE: Final = (1 << 64) - 1
_MAX_KEY: Final = 511
_PAGE_SIZES: Final = tuple(1 << bits for bits in range(9, 17))
_UNWRITTEN_TAIL: Final = 64
"""Pages at the end that a transaction took and gave back without writing them."""


class Meta(NamedTuple):
    """One meta record."""

    page_size: int
    roots: tuple[int, int]
    """The roots of the free pages' tree and of the unnamed database."""
    last_page: int
    txnid: int


class TreePage(NamedTuple):
    """A page of a tree."""

    raw: bytes
    is_branch: bool
    offsets: tuple[int, ...]
    """The offsets of its nodes."""


class Leaf(NamedTuple):
    """The contents of a leaf's node."""

    key: bytes
    value: bytes
    database: int | None
    """The root of the database that has this name."""


def parse(raw: bytes) -> Meta | None:
    """Parses a page; None if it is not a meta record of the known format."""
    if len(raw) != META_SIZE:
        return None
    magic, version, _, _, free, main, last_page, txnid = _META.unpack(raw)
    page_size = _DB.unpack(free)[0]
    if magic != MAGIC or version != DATA_VERSION or page_size not in _PAGE_SIZES:
        return None
    return Meta(page_size, (_DB.unpack(free)[-1], _DB.unpack(main)[-1]), last_page, txnid)


def read_metas(fd: int) -> list[Meta]:
    """Returns the valid meta records; a healthy file has two."""
    first = parse(os.pread(fd, META_SIZE, _HEADER.size))
    sizes = _PAGE_SIZES if first is None else (first.page_size,)
    others = (parse(os.pread(fd, META_SIZE, size + _HEADER.size)) for size in sizes)
    return [meta for meta in (first, *others) if meta is not None]


def find_damage(fd: int, meta: Meta, limit_pages: int) -> str | None:
    """Returns the damage of the snapshot's pages, None when none was found.

    Looks at the headers of at most `limit_pages` pages, from the roots down, and at the file's
    length. The snapshot must be held by a read transaction, or nobody may be writing.
    """
    size = os.fstat(fd).st_size
    needed = (meta.last_page + 1 - _UNWRITTEN_TAIL) * meta.page_size
    if size < needed:
        return f"it has {size} bytes, its last page lies beyond {needed}"
    waiting = deque(root for root in meta.roots if root != NO_PAGE)
    for _ in range(limit_pages):
        if not waiting:
            break
        pgno = waiting.popleft()
        children = _read_children(fd, meta, pgno)
        if children is None:
            return f"page {pgno} is not what its parent says"
        waiting.extend(children)
    return None


def count_free_pages(fd: int, meta: Meta) -> int:
    """Returns how many pages of the file no snapshot before this one needs; damaged pages of their
    list count as none. Held as `find_damage` says. Raises OSError."""
    waiting, found = [meta.roots[0]], 0
    while waiting:
        page = read_page(fd, meta, waiting.pop())
        if page is None:
            continue
        for offset in page.offsets:
            if page.is_branch:
                waiting.append(child_of(page, offset))
            else:
                found += _count_of(fd, meta, page, offset)
    return found


def _count_of(fd: int, meta: Meta, page: TreePage, offset: int) -> int:
    """Returns the number at the head of a list of pages."""
    _, _, flags, key_size = _NODE.unpack_from(page.raw, offset)
    start = offset + _NODE.size + key_size
    raw = page.raw[start : start + _PAGE_NUMBER.size]
    if flags & _ELSEWHERE and len(raw) == _PAGE_NUMBER.size:
        far = _PAGE_NUMBER.unpack(raw)[0] * meta.page_size + _HEADER.size
        raw = os.pread(fd, _PAGE_NUMBER.size, far)
    return int(_PAGE_NUMBER.unpack(raw)[0]) if len(raw) == _PAGE_NUMBER.size else 0


def read_page(fd: int, meta: Meta, pgno: int) -> TreePage | None:
    """Returns a page of a tree; None when it is damaged. Raises OSError."""
    if not 1 < pgno <= meta.last_page:
        return None
    raw = os.pread(fd, meta.page_size, pgno * meta.page_size)
    if len(raw) < meta.page_size:
        return None
    number, _, flags, lower, upper = _HEADER.unpack_from(raw)
    sane = number == pgno and _HEADER.size <= lower <= upper <= meta.page_size
    if not sane or flags & (_BRANCH | _LEAF) not in (_BRANCH, _LEAF):
        return None
    offsets = struct.unpack_from(f"={(lower - _HEADER.size) // 2}H", raw, _HEADER.size)
    if any(not upper <= offset <= meta.page_size - _NODE.size for offset in offsets):
        return None
    return TreePage(raw, bool(flags & _BRANCH), offsets)


def child_of(page: TreePage, offset: int) -> int:
    """Returns the page that a branch's node leads to."""
    low, high, top, _ = _NODE.unpack_from(page.raw, offset)
    return int(low | high << 16 | top << 32)


def read_leaf(fd: int, meta: Meta, page: TreePage, offset: int) -> Leaf | None:
    """Returns the contents of a leaf's node; None when it is damaged. Raises OSError."""
    low, high, flags, key_size = _NODE.unpack_from(page.raw, offset)
    start, size = offset + _NODE.size + key_size, low | high << 16
    here = _PAGE_NUMBER.size if flags & _ELSEWHERE else size
    if flags & ~(_ELSEWHERE | _SUB_DATABASE) or start + here > len(page.raw):
        return None
    if not 0 < key_size <= _MAX_KEY:
        return None
    key, value = page.raw[offset + _NODE.size : start], page.raw[start : start + here]
    if flags & _SUB_DATABASE:
        return Leaf(key, b"", _DB.unpack(value)[-1]) if size == _DB.size else None
    if not flags & _ELSEWHERE:
        return Leaf(key, value, None)
    (pgno,) = _PAGE_NUMBER.unpack(value)
    far = _read_overflow(fd, meta, pgno, size)
    return None if far is None else Leaf(key, far, None)


def _read_overflow(fd: int, meta: Meta, pgno: int, size: int) -> bytes | None:
    """Returns a value that has pages of its own; None when they are damaged."""
    if not 1 < pgno <= meta.last_page or size > (meta.last_page - pgno + 1) * meta.page_size:
        return None
    raw = os.pread(fd, _HEADER.size + size, pgno * meta.page_size)
    if len(raw) < _HEADER.size + size:
        return None
    number, _, flags, *_ = _HEADER.unpack_from(raw)
    return raw[_HEADER.size :] if number == pgno and flags & _OVERFLOW else None


def _read_children(fd: int, meta: Meta, pgno: int) -> list[int] | None:
    """Returns the pages that a page leads to; None when it is damaged."""
    page = read_page(fd, meta, pgno)
    if page is None:
        return None
    if page.is_branch:
        return [child_of(page, offset) for offset in page.offsets]
    return [root for offset in page.offsets for root in _sub_database(page.raw, offset)]


def _sub_database(page: bytes, offset: int) -> tuple[int, ...]:
    """Returns the root of the database that a leaf's node holds, if it holds one."""
    _, _, flags, key_size = _NODE.unpack_from(page, offset)
    start = offset + _NODE.size + key_size
    if not flags & _SUB_DATABASE or start + _DB.size > len(page):
        return ()
    root = _DB.unpack_from(page, start)[-1]
    return () if root == NO_PAGE else (int(root),)
