"""The kernel's rules for O_DIRECT on a file: statx(2) with STATX_DIOALIGN, Linux 6.1 and newer."""

import ctypes
import os
from typing import Final, NamedTuple

from gds.plan.pages import PAGE_BYTES

_STATX_DIOALIGN: Final = 0x2000
_AT_EMPTY_PATH: Final = 0x1000
_libc: Final = ctypes.CDLL(None, use_errno=True)


class _Statx(ctypes.Structure):
    _fields_ = (
        ("mask", ctypes.c_uint32),
        ("unused", ctypes.c_uint8 * 148),
        ("memory", ctypes.c_uint32),
        ("offset", ctypes.c_uint32),
        ("rest", ctypes.c_uint8 * 96),
    )


class Alignment(NamedTuple):
    """The alignment that O_DIRECT asks for, in bytes."""

    memory: int
    offset: int
    """The alignment of offset and length."""

    @property
    def block(self) -> int | None:
        """The unit to align offset, length and memory to, if that moves less than the page cache
        does; else None."""
        block = max(self)
        return block if block < PAGE_BYTES else None


def alignment(fd: int) -> Alignment | None:
    """Returns the alignment of an open regular file; None: the kernel does not tell, or it has no
    O_DIRECT."""
    found = _Statx()
    try:
        statx = _libc.statx
    except AttributeError:  # an older libc
        return None
    if statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, ctypes.byref(found)):
        return None
    if not found.mask & _STATX_DIOALIGN or not found.offset:
        return None
    return Alignment(found.memory, found.offset)


def alignment_in(directory: str | os.PathLike[str]) -> Alignment | None:
    """Returns the alignment of a file that would be made in a directory; None also if none can be
    made."""
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        return alignment(fd)
    finally:
        os.close(fd)
