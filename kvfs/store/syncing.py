"""Data files on the disk: a sync that failed once is believed no more.

After a failed sync the kernel takes the pages for clean, though the disk does not have them, and
tells each open file of it once: the next sync, or one of a descriptor that is opened later, finds
nothing to write and succeeds. So the data file is marked, and every further sync of it fails: its
content is known to be in memory alone, and for as long as that lasts. Whoever has it copies it to a
file of another name, or writes it anew there.

The mark is an extended attribute, for other processes and later runs; where the disk refuses that
too, this process remembers it.
"""

import errno
import os
from typing import Final

_ATTRIBUTE: Final = "user.kvfs.unsynced"
_REMEMBERED: Final = 4096
_PASSING: Final = (
    *(errno.EINTR, errno.EAGAIN, errno.ENOMEM, errno.EMFILE),
    *(errno.EBADF, errno.EINVAL),
)
"""Errors of a call, which lose nothing."""
_failed: dict[str, None] = {}
"""Paths of data files that could not be marked, the latest ones."""
counters: Final = {"failed_syncs": 0}
"""Data files that were marked by this process."""


def sync(fd: int, *, datasync: bool = False) -> None:
    """What was written to the data file survives power loss when this returns. Raises OSError, from
    then on at each sync of this data file by whatever descriptor."""
    if is_lost(fd):
        raise OSError(
            errno.EIO, "the disk refused an earlier sync of it: copy it to a file of another name"
        )
    try:
        if datasync:
            os.fdatasync(fd)
        else:
            os.fsync(fd)
    except OSError as error:
        if error.errno not in _PASSING:
            mark_lost(fd)
        raise


def is_lost(fd: int) -> bool:
    """Whether a sync of the data file failed before."""
    try:
        os.getxattr(fd, _ATTRIBUTE)
    except OSError:
        return bool(_failed) and _path(fd) in _failed
    return True


def mark_lost(fd: int) -> None:
    """What was written to the data file may have been lost on its way to the disk."""
    counters["failed_syncs"] += 1
    try:
        os.setxattr(fd, _ATTRIBUTE, b"")
    except OSError:
        while len(_failed) >= _REMEMBERED:
            del _failed[next(iter(_failed))]
        _failed[_path(fd)] = None


def _path(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")
