"""The part of a file in the page cache, as cachestat(2) counts it (Linux 6.5 and newer)."""

import ctypes
import os
from typing import Final, NamedTuple

_NUMBER: Final = 451
"""The system call's number, the same on all architectures."""
_libc: Final = ctypes.CDLL(None, use_errno=True)


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


class Pages(NamedTuple):
    """Numbers of pages."""

    cached: int
    dirty: int
    writeback: int
    """Pages on their way to the disk."""


def cachestat(fd: int, offset: int = 0, length: int = 0) -> Pages:
    """Counts the pages of the bytes [offset, offset + length), in whole pages; a length of 0 means
    to the end.

    Raises OSError: ENOSYS, EPERM (another user's file, or a sandbox that does not know the call),
    EOPNOTSUPP (a filesystem without a page cache).
    """
    found = _Stat()
    asked = _Range(offset, length)
    if _libc.syscall(_NUMBER, fd, ctypes.byref(asked), ctypes.byref(found), 0):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return Pages(found.cached, found.dirty, found.writeback)
