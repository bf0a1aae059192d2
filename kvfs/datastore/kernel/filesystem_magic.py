"""The kind of filesystem that a file lies on, as the kernel numbers them (linux/magic.h)."""

import ctypes
from typing import Final

EXT4: Final = 0xEF53
XFS: Final = 0x58465342
BTRFS: Final = 0x9123683E
TMPFS: Final = 0x01021994
FUSE: Final = 0x65735546
_STATFS_WORDS: Final = 32
"""More than a struct statfs has; the first is the filesystem's kind."""
_libc: Final = ctypes.CDLL(None, use_errno=True)


def magic_of(fd: int) -> int | None:
    """Returns the number of the kind; None: the kernel does not tell."""
    found = (ctypes.c_long * _STATFS_WORDS)()
    return None if _libc.fstatfs(fd, ctypes.byref(found)) else int(found[0])
