"""One sync of a filesystem in place of one for each of many files: syncfs(2).

A sync of a small file is two waits for the disk and a flush of its cache, whatever its size; all of
a filesystem take as many. It also waits for what other programs wrote there, so it is done only
while little is: by `/proc/meminfo`, of all filesystems.

| filesystem | syncfs |
|---|---|
| ext2, ext3, ext4, xfs, f2fs, tmpfs | writes all, and has the disk flush its cache |
| btrfs | the same, but mount table and stat(2) number it differently: not found, files one by one |
| others (FUSE tells its server of none, for one) | files one by one |
"""

import ctypes
import errno
import os
from pathlib import Path
from typing import Final

from kvfs.datastore.kernel.filesystem_probe import mount_of

_MEMORY: Final = Path("/proc/meminfo")
_WHOLE: Final = frozenset({"ext2", "ext3", "ext4", "xfs", "f2fs", "tmpfs"})
_WAITING: Final = (b"Dirty:", b"Writeback:")
MOST_BYTES: Final = 256 << 20
"""Bytes that may wait for all disks of the host."""
_WAIT_BEFORE: Final = 1
_libc: Final = ctypes.CDLL(None, use_errno=True)
_syncfs: Final = getattr(_libc, "syncfs", None)
sync_file_range = getattr(_libc, "sync_file_range", None)
"""The system call; None if the C library lacks it."""
if sync_file_range is not None:
    sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def sync_filesystem(fd: int) -> bool:
    """Puts everything that was written to the filesystem of an open file on disk, as far as the
    disk takes it: `check_written` tells that of each file. Returns False, and promises nothing, if
    files are to be synced one by one."""
    if _syncfs is None or sync_file_range is None or _waiting_bytes() > MOST_BYTES:
        return False
    return mount_of(os.fstat(fd).st_dev).type in _WHOLE and _syncfs(fd) == 0


def check_written(fd: int) -> None:
    """Raises OSError, once for each descriptor, if the disk refused any of a file's data since it
    was opened, or nobody was told of a refusal before."""
    if sync_file_range is None or sync_file_range(fd, 0, 0, _WAIT_BEFORE) != 0:
        code = ctypes.get_errno() or errno.ENOSYS
        raise OSError(code, os.strerror(code))


def _waiting_bytes() -> int:
    """Returns the bytes that wait for a disk; more than ever wait if that is not known."""
    try:
        lines = _MEMORY.read_bytes().splitlines()
    except OSError:
        return 1 << 62
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(_WAITING))
