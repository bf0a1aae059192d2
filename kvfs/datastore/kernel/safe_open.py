"""Opens a data file: beneath its directory, through no symbolic link, a regular file of a trusted
owner.

openat2 (Linux 5.6) checks all of that but the owner in one system call; if it is missing or a
container's filter forbids it, each component is opened without following links. Measured for a data
file, with its close: os.open alone 1.3 us, this 2.8 us; an open on the mount takes 16 to 25.

The open itself never waits (O_NONBLOCK): a FIFO would make its reader wait for a writer, a line for
its carrier. The descriptor is a blocking one all the same, as network filesystems may take the flag
for a request not to wait for a lock; a file under a lease is waited for.
"""

import ctypes
import errno
import functools
import logging
import math
import os
import stat
import struct
import time
from collections.abc import Collection
from typing import Final

from kvfs.datastore.kernel.ownership import owner_name

_OPENAT2: Final = 437
"""The system call's number, the same on all architectures."""
_NO_SYMLINKS: Final = 0x04
_BENEATH: Final = 0x08
_HOW: Final = struct.Struct("=QQQ")
"""struct open_how of linux/openat2.h."""
_syscall: Final = ctypes.CFUNCTYPE(
    ctypes.c_long,
    ctypes.c_long,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_size_t,
    use_errno=True,
)(("syscall", ctypes.CDLL(None)))
AT_ONCE: Final = os.O_NONBLOCK | os.O_NOCTTY
"""The flags of an open that never waits."""
WAY: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""The flags for a directory on the way."""
_REDIRECTED: Final = (errno.ELOOP, errno.EXDEV)
_UNREADABLE: Final = (errno.EIO, errno.EUCLEAN, errno.EBADMSG)
"""The errors by which a filesystem says that its disk failed, or has lost what it needs."""
_TELL_S: Final = 10.0
"""Time between two lines of the log about such files."""
_told_at = -math.inf
log = logging.getLogger(__name__)


class Unreadable(OSError):
    """The disk does not give a data file. Its first line in ten seconds is logged."""


def open_file(directory: int, name: str, flags: int, owners: Collection[int]) -> int:
    """Returns a new descriptor of the regular file `name` beneath `directory` (a descriptor).

    Raises FileNotFoundError if there is none; Unreadable if its disk fails; OSError with EIO, which
    is logged too, if it is no regular file of one of `owners`, or a symbolic link leads to it.
    """
    waits = not flags & os.O_NONBLOCK
    try:
        fd = _open(directory, name, flags | AT_ONCE, 0)
    except FileNotFoundError:
        raise
    except BlockingIOError:
        if not waits:
            raise
        fd = _open_leased(directory, name, flags)
    except OSError as error:
        if error.errno in _REDIRECTED:
            raise _refused(directory, name, "is reached through a symbolic link") from None
        if error.errno in _UNREADABLE:
            raise _unreadable(directory, name, error) from None
        if _is_something_else(directory, name):
            raise _refused(directory, name, "is no regular file") from None
        raise
    found = os.fstat(fd)
    if found.st_mode & 0o170000 == stat.S_IFREG and found.st_uid in owners:
        if waits:
            os.set_blocking(fd, True)
        return fd
    os.close(fd)
    if stat.S_ISREG(found.st_mode):
        raise _refused(directory, name, f"belongs to {owner_name(found.st_uid)}")
    raise _refused(directory, name, "is no regular file")


def create_file(directory: int, name: str, flags: int) -> int:
    """Returns a new descriptor of a file that is made (O_CREAT with O_EXCL, or O_TMPFILE), for its
    owner alone. Raises what os.open raises, OSError with EIO if a symbolic link leads there."""
    try:
        return _open(directory, name, flags, 0o600)
    except OSError as error:
        if error.errno in _REDIRECTED:
            raise _refused(directory, name, "is reached through a symbolic link") from None
        raise


def _open_leased(directory: int, name: str, flags: int) -> int:
    """Opens a file that another process has leased, once the lease is given back."""
    at = _open(directory, name, os.O_PATH, 0)
    try:
        if not stat.S_ISREG(os.fstat(at).st_mode):
            raise _refused(directory, name, "is no regular file")
        return os.open(f"/proc/self/fd/{at}", flags | os.O_CLOEXEC)
    finally:
        os.close(at)


def _is_something_else(directory: int, name: str) -> bool:
    """Returns whether the name belongs to anything but a regular file."""
    try:
        return not stat.S_ISREG(os.lstat(name, dir_fd=directory).st_mode)
    except OSError:
        return False


def _open(directory: int, name: str, flags: int, mode: int) -> int:
    if not _is_supported():
        return _open_by_component(directory, name, flags, mode)
    how = _how(flags | os.O_CLOEXEC, mode)
    while (fd := _syscall(_OPENAT2, directory, name.encode(), how, _HOW.size)) < 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code), name)
    return int(fd)


@functools.lru_cache(maxsize=64)
def _how(flags: int, mode: int) -> bytes:
    return _HOW.pack(flags, mode, _BENEATH | _NO_SYMLINKS)


@functools.cache
def _is_supported() -> bool:
    fd = int(_syscall(_OPENAT2, _AT_FDCWD, b"/", _HOW.pack(os.O_PATH, 0, 0), _HOW.size))
    if fd < 0:
        return False
    os.close(fd)
    return True


_AT_FDCWD: Final = -100


def _open_by_component(directory: int, name: str, flags: int, mode: int) -> int:
    """Does what openat2 does."""
    *above, last = name.split("/")
    at = directory
    try:
        for each in above:
            below = os.open(each, WAY, dir_fd=at)
            if at != directory:
                os.close(at)
            at = below
        return os.open(last, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=at)
    except NotADirectoryError as error:  # a link too: O_DIRECTORY is asked before O_NOFOLLOW
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from error
    finally:
        if at != directory:
            os.close(at)


def _unreadable(directory: int, name: str, error: OSError) -> Unreadable:
    global _told_at
    path = _path(directory, name)
    if time.monotonic() - _told_at >= _TELL_S:
        _told_at = time.monotonic()
        log.error(
            "the data file %s cannot be opened (%s): look at its disk and the kernel's log; what it"
            " cannot give any more is to be restored",
            *(path, error.strerror),
        )
    return Unreadable(error.errno, error.strerror, path)


def _path(directory: int, name: str) -> str:
    return f"{os.readlink(f'/proc/self/fd/{directory}')}/{name}"


def _refused(directory: int, name: str, why: str) -> OSError:
    path = _path(directory, name)
    log.error(
        "the data file %s %s, so it is not opened: who put it there may read or change data; look "
        "into it and remove it",
        path,
        why,
    )
    return OSError(errno.EIO, f"the data file {why}", path)
