"""Asks the kernel whether a data file is in use, and waits for writes that are under way.

RELEASE does not mean unused: a mapping outlives its descriptor, and stores through a shared one
still change the file. F_SETLEASE knows: a write lease is granted only when nobody else has the file
open or mapped, a read lease only when nobody has it open or mapped for writing (ext4, xfs, btrfs
and tmpfs; verified by the tests).

The lease is dropped at once, so nobody waits for it in the normal case. An open that falls between
makes the kernel signal the holder; SIGURG, which is ignored by default, replaces SIGIO, which would
kill the process. If the filesystem grants no leases at all (some network filesystems), the answer
is None: nobody knows, and the caller relies on what this process has open.

A write(2) sets mtime before its first byte, and nothing at its end. But it holds a lock of the
file's to its end, for which some calls of a reader wait: SEEK_DATA on ext4, btrfs and tmpfs, a read
on xfs (`settled`).
"""

import contextlib
import errno
import fcntl
import os
import signal
from typing import Final

_BUSY: Final = (errno.EAGAIN, errno.EACCES)


_LOOKS: Final = 16


def is_unused(fd: int) -> bool | None:
    """Returns whether only `fd` (opened for reading) has the file open, and nobody has it mapped;
    None: the filesystem cannot tell."""
    return _granted(fd, fcntl.F_WRLCK)


def is_quiet(fd: int) -> bool | None:
    """Returns whether nobody has the file open or mapped for writing (`fd` is opened for reading);
    None: the filesystem cannot tell."""
    return _granted(fd, fcntl.F_RDLCK)


def settled(fd: int) -> os.stat_result:
    """Returns the file's state at a moment when no write(2) to it was under way: while size and
    mtime are the same, its content is. Waits for the writes that it finds, and for up to sixteen in
    a row; beyond that, and for stores through a mapping, nothing is promised. Raises OSError."""
    before = os.fstat(fd)
    for _ in range(_LOOKS):
        with contextlib.suppress(OSError):  # ENXIO: it has no data
            os.lseek(fd, 0, os.SEEK_DATA)
        os.pread(fd, 1, 0)
        now = os.fstat(fd)
        if (now.st_size, now.st_mtime_ns) == (before.st_size, before.st_mtime_ns):
            break
        before = now
    return before


def _granted(fd: int, kind: int) -> bool | None:
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, kind)
    except OSError as error:
        return False if error.errno in _BUSY else None
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


def supported(directory: str) -> bool:
    """Returns whether the filesystem of `directory` grants leases to this process. Raises OSError
    if it cannot be written."""
    name = f"{directory}/.lease.{os.getpid()}.{os.urandom(4).hex()}"
    fd = os.open(name, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        return is_unused(fd) is True
    finally:
        os.close(fd)
        os.unlink(name)
