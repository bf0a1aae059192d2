"""Syncs of data files to the disk: a file whose sync failed once is never believed again.

After a failed sync the kernel takes the pages for clean, though the disk does not have them, and
tells each open file of it once: the next sync, or one of a descriptor that is opened later, finds
nothing to write and succeeds. So the data file is marked, and every further sync of it fails: its
content is known to be in memory alone, and for as long as that lasts, a holder of the file may copy
it to a file of another name, or truncate it to nothing and write it anew.

The mark is an extended attribute, for other processes and later runs; if the disk refuses that too,
this process remembers it.

| `truncate` to nothing | the mark | later syncs |
|---|---|---|
| cut: the kernel has waited for pages on their way, and has none of the old ones | stays | fail |
| synced: the disk has the new length, and nothing it refused is wanted | stays | fail |
| the sync failed, or another sync failed since the cut began (another mark) | stays | fail |
| otherwise | goes | are believed |
"""

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Sequence
from typing import Final

from kvfs.datastore.kernel import filesystem_sync

_ATTRIBUTE: Final = "user.kvfs.unsynced"
_REMEMBERED: Final = 4096
_PASSING: Final = (
    *(errno.EINTR, errno.EAGAIN, errno.ENOMEM, errno.EMFILE),
    *(errno.EBADF, errno.EINVAL),
)
"""Errors of a call that lose nothing."""
_failed: dict[str, bytes] = {}
"""The marks of data files that could not be marked, by their paths; the latest ones."""
_marking: Final = threading.Lock()
"""Held so that a mark just made is not mistaken for the one before it."""
_TOKEN_BYTES: Final = 8
_MANY: Final = 8
"""Files from which one sync of their filesystem costs less than theirs."""
counters: Final = {"failed_syncs": 0}
"""Counts the data files that this process marked."""


def sync(fd: int, *, datasync: bool = False) -> None:
    """Makes the data file's content survive power loss. Raises OSError, and from then on at each
    sync of this data file by any descriptor."""
    _sync_by(fd, os.fdatasync if datasync else os.fsync)


def _sync_by(fd: int, call: Callable[[int], None]) -> None:
    if is_lost(fd):
        raise OSError(
            errno.EIO, "the disk refused an earlier sync of it: copy it to a file of another name"
        )
    try:
        call(fd)
    except OSError as error:
        if error.errno not in _PASSING:
            mark_lost(fd)
        raise


def sync_many(fds: Sequence[int]) -> dict[int, OSError]:
    """Does `sync` for each of these data files; returns those for which it failed, with the errors.
    Many of one filesystem are synced with it, where that costs less."""
    failed: dict[int, OSError] = {}
    by_device: dict[int, list[int]] = {}
    for fd in fds:
        by_device.setdefault(os.fstat(fd).st_dev, []).append(fd)
    for group in by_device.values():
        is_synced = len(group) >= _MANY and filesystem_sync.sync_filesystem(group[0])
        is_flushed = False
        for fd in group:
            try:
                if is_flushed:
                    _sync_by(fd, filesystem_sync.check_written)
                else:
                    sync(fd)
                    is_flushed = is_synced  # the disk's cache too, of what came there last
            except OSError as error:
                failed[fd] = error
    return failed


def is_lost(fd: int) -> bool:
    """Returns whether a sync of the data file failed before."""
    return _mark(fd) is not None


def mark_lost(fd: int) -> None:
    """Records that content of the data file may have been lost on its way to the disk."""
    counters["failed_syncs"] += 1
    token = os.urandom(_TOKEN_BYTES)
    with _marking:
        try:
            os.setxattr(fd, _ATTRIBUTE, token)
        except OSError:
            while len(_failed) >= _REMEMBERED:
                del _failed[next(iter(_failed))]
            _failed[_path(fd)] = token


def truncate(fd: int, size: int) -> None:
    """Sets the data file's length. A file cut to nothing is rid of an earlier failed sync once the
    disk has that: this waits for it, so call it in a thread if `is_lost`. Raises OSError if the
    length was not set."""
    mark = _mark(fd) if size == 0 else None
    os.ftruncate(fd, size)
    if mark is None:
        return
    with contextlib.suppress(OSError):  # it stays as it was: every sync fails
        os.fsync(fd)
        with _marking:
            if _mark(fd) == mark and _failed.pop(_path(fd), None) is None:
                os.removexattr(fd, _ATTRIBUTE)


def _mark(fd: int) -> bytes | None:
    try:
        return os.getxattr(fd, _ATTRIBUTE)
    except OSError:
        return _failed.get(_path(fd)) if _failed else None


def _path(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")
