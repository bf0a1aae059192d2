"""How much of a file the page cache holds: by cachestat(2), Linux 6.5 and newer; before, by
mincore(2) of a mapping."""

import ctypes
import errno
import mmap
import os
from typing import Final

from kvfs.datastore.kernel import filesystem_magic
from kvfs.datastore.kernel.cachestat import cachestat

_libc: Final = ctypes.CDLL(None, use_errno=True)
_page_bytes: Final = mmap.PAGESIZE


def cached_bytes(fd: int, offset: int, length: int) -> int | None:
    """Returns the cached bytes of the file's [offset, offset + length), in whole pages; a length of
    0 means to its end. None if the kernel does not tell: for other users' files that may not be
    written to, for a filesystem without a page cache, or if a mount's pages are those of the file
    behind it."""
    try:
        cached = cachestat(fd, offset, length).cached
    except OSError as error:
        # EPERM also where a sandbox does not know the call.
        known = error.errno not in (errno.ENOSYS, errno.EPERM)
        return None if known or not _is_told(fd) else _mapped_bytes(fd, offset, length)
    return None if not cached and _may_be_behind(fd) else cached * _page_bytes


def _may_be_behind(fd: int) -> bool:
    """Returns whether the file's data may be cached as another file's (FUSE passthrough)."""
    return filesystem_magic.magic_of(fd) == filesystem_magic.FUSE


def _is_told(fd: int) -> bool:
    """Returns whether mincore tells this process the truth about the file: for other users' files
    it reports all pages as cached."""
    if os.fstat(fd).st_uid == os.geteuid():
        return True
    return os.access(f"/proc/self/fd/{fd}", os.W_OK, effective_ids=True)


def _mapped_bytes(fd: int, offset: int, length: int) -> int | None:
    size = os.fstat(fd).st_size
    begin = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    end = min(offset + length, size) if length else size
    if begin >= end:
        return 0
    try:
        with mmap.mmap(fd, end - begin, flags=mmap.MAP_PRIVATE, offset=begin) as mapping:
            return _resident(mapping) * _page_bytes
    except (OSError, ValueError):  # it has no mappings, or became shorter
        return None


def _resident(mapping: mmap.mmap) -> int:
    """Returns its pages in memory. Raises OSError."""
    pages = -(-len(mapping) // _page_bytes)
    told = (ctypes.c_ubyte * pages)()
    start = ctypes.c_char.from_buffer(mapping)
    failed = _libc.mincore(ctypes.byref(start), ctypes.c_size_t(len(mapping)), told)
    del start  # the mapping cannot be closed while a pointer into it lives
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    # Of each page's byte the lowest bit counts.
    lowest = int.from_bytes(b"\1" * pages, "little")
    return (int.from_bytes(told, "little") & lowest).bit_count()
