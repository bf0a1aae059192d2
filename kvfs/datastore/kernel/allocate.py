"""fallocate(2) with all its modes: the standard library has only os.posix_fallocate."""

import ctypes
import errno
import os
from typing import Final

_libc: Final = ctypes.CDLL(None, use_errno=True)
_fallocate: Final = _libc.fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """Allocates, punches, zeros or collapses a range of bytes; `mode` as in fallocate(2).

    Raises OSError. May take long; releases the GIL.
    """
    while _fallocate(fd, mode, offset, length) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
