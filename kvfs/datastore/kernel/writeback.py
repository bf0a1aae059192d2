"""Starts writing data to the disk before anybody waits for them.

Data that are synced at the end of a long write otherwise wait in the page cache until then, up to a
fifth of the memory: the sync takes as long as the disk needs for them, while the writer's peer
waits for an answer. sync_file_range(2) with SYNC_FILE_RANGE_WRITE only starts the writing: no
metadata, no flush of the disk, no promise. If the C library has no such call, nothing is started.

It also makes each page read-only for processes that have it mapped, so that their next store faults
and sets mtime: a store into a page that was dirty before leaves no trace. A filesystem in memory
has no writeback, and stores go unseen there.
"""

import contextlib
import ctypes
import errno
import os
from typing import Final

from kvfs.datastore import file_sync
from kvfs.datastore.kernel.cachestat import cachestat
from kvfs.datastore.kernel.filesystem_sync import sync_file_range

_WAIT_BEFORE: Final = 1
_WRITE: Final = 2
_FEW_PAGES: Final = 4096
"""Dirty pages whose writing is begun within a millisecond."""
_REFUSED: Final = (errno.EIO, errno.ENOSPC, errno.EDQUOT)
_call = sync_file_range


def start_writing(fd: int, offset: int, size: int) -> None:
    """Starts to write these bytes to the disk; may wait while its queue is full."""
    if _call is not None and size:
        _call(fd, offset, size, _WRITE)


def clean_now(fd: int) -> bool:
    """Makes each later store through a mapping set mtime, if that waits for nothing. Returns
    whether it does; False: `clean` may do it."""
    try:
        pages = cachestat(fd)
        if not pages.dirty:
            return True
        if pages.writeback or pages.dirty > _FEW_PAGES:  # what is on its way is not begun again
            return False
        start_writing(fd, 0, 1 << 62)
        return not cachestat(fd).dirty
    except OSError:
        return False


def clean(fd: int) -> None:
    """Like `clean_now`, but waits for the disk; for a thread. The process that syncs the file is
    told of a refusal by the disk."""
    # A wait tells its descriptor of errors, which the next sync by that one would be silent about.
    with contextlib.suppress(OSError):
        own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            failed = _call is not None and _call(own, 0, 0, _WAIT_BEFORE | _WRITE)
            if failed and ctypes.get_errno() in _REFUSED:
                file_sync.mark_lost(fd)  # a descriptor that is opened later is not told
        finally:
            os.close(own)
