"""Tells whether others on this host load the same file just now: each says so by a lock.

It is a read lock on one byte far beyond all files' ends, of the open file: it ends with the
descriptor, however the process ends. A write lock on the whole file is refused meanwhile.
"""

import fcntl
import os
import struct
from typing import Final

_AT: Final = 1 << 62
_FLOCK: Final = struct.Struct("@hhqqi4x")
"""Kind, whence, start, length, process: struct flock."""


def join(fd: int) -> bool:
    """Tells others that the file open as `fd`, for reading, is being loaded, until it is closed.
    Returns False on a filesystem without locks, where loads do not find each other."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_RDLCK))
    except OSError:
        return False
    return True


def has_company(fd: int) -> bool:
    """Returns whether others load its file; True also if that cannot be known."""
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK))
    except OSError:
        return True
    return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)


def _flock(kind: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, _AT, 1, 0)
