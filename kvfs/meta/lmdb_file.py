"""What we read and write of LMDB's own file format (data version 1, on 64-bit machines).

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
_BRANCH: Final = 1
_LEAF: Final = 2
_SUB_DATABASE: Final = 2
_NO_PAGE: Final = (1 << 64) - 1
_PAGE_SIZES: Final = tuple(1 << bits for bits in range(9, 17))
_UNWRITTEN_TAIL: Final = 64
"""Pages at the end that a transaction took and gave back without writing them."""


class Meta(NamedTuple):
    """One meta record."""

    page_size: int
    roots: tuple[int, int]
    """Of the free pages' tree and of the unnamed database."""
    last_page: int
    txnid: int


def parse(raw: bytes) -> Meta | None:
    """None where this is not a meta record of the format we know."""
    if len(raw) != META_SIZE:
        return None
    magic, version, _, _, free, main, last_page, txnid = _META.unpack(raw)
    page_size = _DB.unpack(free)[0]
    if magic != MAGIC or version != DATA_VERSION or page_size not in _PAGE_SIZES:
        return None
    return Meta(page_size, (_DB.unpack(free)[-1], _DB.unpack(main)[-1]), last_page, txnid)


def read_metas(fd: int) -> list[Meta]:
    """The meta records that are valid; a healthy file has two."""
    first = parse(os.pread(fd, META_SIZE, _HEADER.size))
    sizes = _PAGE_SIZES if first is None else (first.page_size,)
    others = (parse(os.pread(fd, META_SIZE, size + _HEADER.size)) for size in sizes)
    return [meta for meta in (first, *others) if meta is not None]


def find_damage(fd: int, meta: Meta, limit_pages: int) -> str | None:
    """What is wrong with the snapshot's pages, None when nothing was found.

    Looks at the headers of at most `limit_pages` pages, from the roots down, and at the file's
    length. The snapshot must be held by a read transaction, or nobody may be writing.
    """
    size = os.fstat(fd).st_size
    needed = (meta.last_page + 1 - _UNWRITTEN_TAIL) * meta.page_size
    if size < needed:
        return f"it has {size} bytes, its last page lies beyond {needed}"
    waiting = deque(root for root in meta.roots if root != _NO_PAGE)
    for _ in range(limit_pages):
        if not waiting:
            break
        pgno = waiting.popleft()
        children = _read_children(fd, meta, pgno)
        if children is None:
            return f"page {pgno} is not what its parent says"
        waiting.extend(children)
    return None


def _read_children(fd: int, meta: Meta, pgno: int) -> list[int] | None:
    """The pages that a page leads to; None when it is damaged."""
    if not 1 < pgno <= meta.last_page:
        return None
    page = os.pread(fd, meta.page_size, pgno * meta.page_size)
    if len(page) < meta.page_size:
        return None
    number, _, flags, lower, upper = _HEADER.unpack_from(page)
    sane = number == pgno and _HEADER.size <= lower <= upper <= meta.page_size
    if not sane or flags & (_BRANCH | _LEAF) not in (_BRANCH, _LEAF):
        return None
    offsets = struct.unpack_from(f"={(lower - _HEADER.size) // 2}H", page, _HEADER.size)
    if any(not upper <= offset <= meta.page_size - _NODE.size for offset in offsets):
        return None
    if flags & _BRANCH:
        return [_child_of(page, offset) for offset in offsets]
    return [root for offset in offsets for root in _sub_database(page, offset)]


def _child_of(page: bytes, offset: int) -> int:
    low, high, top, _ = _NODE.unpack_from(page, offset)
    return int(low | high << 16 | top << 32)


def _sub_database(page: bytes, offset: int) -> tuple[int, ...]:
    """The root of the database that a leaf's node holds, if it holds one."""
    _, _, flags, key_size = _NODE.unpack_from(page, offset)
    start = offset + _NODE.size + key_size
    if not flags & _SUB_DATABASE or start + _DB.size > len(page):
        return ()
    root = _DB.unpack_from(page, start)[-1]
    return () if root == _NO_PAGE else (int(root),)
