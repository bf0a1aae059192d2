"""How much of a file the page cache holds: cachestat(2), Linux 6.5 and newer."""

import ctypes
import os
from typing import Final

_CACHESTAT: Final = 451
"""The system call's number, the same on all architectures."""


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Stat(ctypes.Structure):
    _fields_ = (
        ("cached", ctypes.c_uint64),
        ("dirty", ctypes.c_uint64),
        ("writeback", ctypes.c_uint64),
        ("evicted", ctypes.c_uint64),
        ("recently_evicted", ctypes.c_uint64),
    )


_libc: Final = ctypes.CDLL(None, use_errno=True)
_page_bytes: Final = os.sysconf("SC_PAGE_SIZE")


def cached_bytes(fd: int, offset: int, length: int) -> int | None:
    """Of the file's bytes [offset, offset + length), in whole pages; a length of 0 means to its
    end. None where the kernel does not tell: an older one, or a filesystem without a page cache."""
    found = _Stat()
    asked = _Range(offset, length)
    if _libc.syscall(_CACHESTAT, fd, ctypes.byref(asked), ctypes.byref(found), 0):
        return None
    return int(found.cached) * _page_bytes
