"""Moves ranges of bytes between data files, by the kernel.

Tried in this order: FICLONERANGE (shares the blocks, if offsets and length are multiples of the
filesystem's block), copy_file_range, sendfile. `step` as in `kvfs.session.byte_transfer`.
"""

import errno
import fcntl
import os
import struct
from typing import Final

from kvfs.session.byte_transfer import Step

_FICLONERANGE: Final = 0x4020940D
_RANGE: Final = struct.Struct("=qQQQ")
_PART_BYTES: Final = 64 << 20
_CANNOT: Final = frozenset(
    (errno.EINVAL, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY, errno.EPERM)
)


def copy_range(source: int, offset: int, size: int, target: int, at: int, step: Step) -> int:
    """Copies `size` bytes from `offset` of one file to `at` of another; returns the bytes copied,
    fewer if the source ends before. Raises OSError."""
    if _clone(source, offset, size, target, at):
        return size
    done = 0
    while done < size:
        count = _copy(source, offset + done, min(size - done, _PART_BYTES), target, at + done)
        if count == 0:
            break
        done += count
        step(done)
    return done


def _clone(source: int, offset: int, size: int, target: int, at: int) -> bool:
    try:
        fcntl.ioctl(target, _FICLONERANGE, _RANGE.pack(source, offset, size, at))
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
        return False
    return True


def _copy(source: int, offset: int, size: int, target: int, at: int) -> int:
    try:
        return os.copy_file_range(source, target, size, offset, at)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
    os.lseek(target, at, os.SEEK_SET)
    return os.sendfile(target, source, offset, size)
