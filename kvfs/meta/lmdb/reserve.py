"""Space that only the metadata use, so that a disk which others filled can be emptied.

Two reserves are kept ahead of their use: blocks behind the ends of `data.mdb` and of the journal
(fallocate, which leaves the files' sizes alone), and the file `reserve`, which is given up when
even that does not suffice, or a start needs space for small files. Both are filled again as soon as
there is space.

While the disk is full, commits live on the remaining blocks, each for as long as its kind may:

| a commit that | goes on while there is left of the blocks |
|---|---|
| adds (a name, an attribute) | three quarters |
| changes (a close, a seal) | half |
| removes (an unlink, an eviction) | anything |

A removal gives blocks of data files back as well, from which the next commit fills these up.
"""

import contextlib
import ctypes
import errno
import os
from pathlib import Path
from typing import Final

import lmdb

from kvfs.base.errors import NoSpace
from kvfs.meta.lmdb.growth import Growth, growth_of
from kvfs.meta.lmdb.journal import Position, Writes, journal_path, last_values

_MOST: Final = 16 << 20
_LEAST: Final = 4 << 20
_SHARE: Final = 64
"""The share of the disk's size, one part in so many; on a small one at most one in _SMALL_SHARE."""
_SMALL_SHARE: Final = 16
_MIRROR_MOST: Final = 64 << 20
"""Limit for a replica: some 100,000 files of other nodes."""
_SLICE_BYTES: Final = 512 << 10
"""Bytes of the file given up at a time: a start's small files need less (the largest is
`run/known`), though XFS makes none where less than some 50 blocks are free."""
_ADDED_BYTES: Final = 128
"""A commit that makes the metadata longer by more than that counts as adding."""
_KEEP_SIZE: Final = 1
_NAME: Final = "reserve"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_SHORT_WRITE: Final = os.strerror(errno.EIO)
_UNSUPPORTED: Final = (errno.EOPNOTSUPP, errno.ENOSYS)
_fallocate: Final = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def is_full(error: BaseException, directory: Path) -> bool:
    """Returns whether the error means that the disk has no space. LMDB calls a partly failed write
    an I/O error: the space left shows what it was."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    what = str(error)
    if isinstance(error, lmdb.DiskError) or "No space left" in what:
        return True
    return _SHORT_WRITE in what and _has_no_space(directory)


def _has_no_space(directory: Path) -> bool:
    try:
        disk = os.statvfs(directory)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < _SLICE_BYTES


def permitted(growth: Growth, left: float) -> bool:
    """Returns whether such a commit may use the remaining share of blocks that cannot be filled up
    now."""
    if growth.takes_away:
        return True
    return left > (0.75 if growth.names or growth.size_bytes > _ADDED_BYTES else 0.5)


def wanted_bytes(disk_bytes: int, *, is_mirror: bool = False) -> int:
    """Returns bytes kept on a disk of that size: three eighths of them for `data.mdb`, one for the
    journal, half as a file. A replica has to take the commits of others, however full this disk
    is."""
    if is_mirror:
        return min(_MIRROR_MOST, disk_bytes // _SMALL_SHARE)
    return min(_MOST, max(disk_bytes // _SHARE, min(_LEAST, disk_bytes // _SMALL_SHARE)))


class Reserve:
    """The reserve of one writing engine, within its write transactions."""

    def __init__(self, directory: Path, environment: lmdb.Environment) -> None:
        self._directory = directory
        self._data_bytes = self._journal_bytes = self._file_bytes = self._step = 0
        self._is_mirror: bool | None = None
        self._environment = environment
        self._page_bytes = environment.stat()["psize"]
        self._journal = -1
        self._data = -1
        self.generation = -1
        """The generation of the journal that was checked last."""
        self.until = 0
        """The length of the journal before which it need not be checked again."""
        self.left = 1.0
        """The remaining share of the whole, if it cannot be filled up; else 1."""

    def close(self) -> None:
        """Idempotent."""
        for fd in (self._journal, self._data):
            if fd >= 0:
                os.close(fd)
        self._journal = self._data = self.generation = -1

    def _measure(self, is_mirror: bool) -> None:
        disk = os.statvfs(self._directory)
        whole = wanted_bytes(disk.f_blocks * disk.f_frsize, is_mirror=is_mirror)
        self._data_bytes, self._journal_bytes = whole * 3 // 8, whole // 8
        self._file_bytes, self._step = whole // 2, whole // 32
        self._is_mirror = is_mirror

    def fill(self, position: Position, *, is_mirror: bool) -> None:
        """Keeps the wanted blocks ahead of the ends of both files. Raises OSError, except for a
        lack of space."""
        if is_mirror is not self._is_mirror:
            self._measure(is_mirror)
        self._open(position.generation)
        end = (self._environment.info()["last_pgno"] + 1) * self._page_bytes
        self.left = min(
            self._ahead(self._journal, position.end, self._journal_bytes),
            self._ahead(self._data, end, self._data_bytes),
        )
        self.until = 0 if self.left < 1 else position.end + self._step
        if self.left == 1:
            fill_file(self._directory, self._file_bytes)

    def admit(self, before: "lmdb.Transaction[bytes]", writes: Writes) -> None:
        """Raises NoSpace if the remaining blocks are not for a commit of this kind. `before`: the
        state without these writes."""
        if self.left == 1:
            return
        if not permitted(growth_of(last_values(writes).items(), before.get), self.left):
            raise NoSpace(
                f"no space for the metadata in {self._directory}: free some space on that"
                " filesystem"
            )

    def _ahead(self, fd: int, end: int, wanted: int) -> float:
        """Allocates blocks behind the end of a file; returns which share of them there is."""
        if _fallocate(fd, _KEEP_SIZE, end, wanted + self._step) == 0:
            return 1.0
        code = ctypes.get_errno()
        if code in _UNSUPPORTED:
            return 1.0
        if code not in _FULL:
            raise OSError(code, os.strerror(code))
        return max(0.0, min(0.99, (os.fstat(fd).st_blocks * 512 - end) / wanted))

    def _open(self, generation: int) -> None:
        if generation == self.generation:
            return
        self.close()
        flags = os.O_WRONLY | os.O_CLOEXEC
        self._data = os.open(self._directory / "data.mdb", flags)
        self._journal = os.open(journal_path(self._directory, generation), flags)
        self.generation = generation


def fill_file(directory: Path, size: int) -> None:
    """Makes the file that can be given up, if the disk has much more space than that."""
    path = directory / _NAME
    with contextlib.suppress(OSError):
        if path.exists() and path.stat().st_size >= size:
            return
        disk = os.statvfs(directory)
        if disk.f_bavail * disk.f_frsize < 4 * size:
            return
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
        finally:
            os.close(fd)


def give_up(directory: Path) -> bool:
    """Frees some of the file's space; returns whether there was any."""
    path = directory / _NAME
    try:
        size = path.stat().st_size
        os.truncate(path, max(0, size - _SLICE_BYTES))
    except OSError:
        return False
    return size > 0


def give_up_where_full(directory: Path) -> None:
    """Frees some of the file's space, if there is no other, before small files are made."""
    if _has_no_space(directory):
        give_up(directory)
