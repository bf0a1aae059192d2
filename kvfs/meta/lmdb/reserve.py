"""Space that only the metadata use, so that a disk which others filled can be emptied.

Two reserves are kept ahead of their use: blocks behind the ends of `data.mdb` and of the journal
(fallocate, which leaves the files' sizes alone), and the file `reserve`, which is given up when
even that does not suffice, or a start needs space for small files. Both are filled again as soon as
there is space. The last part of LMDB's map, which ends where the system gives no more address
space, is kept in the same way.

While the disk or the map is full, commits live on what remains, each for as long as its kind may:

| a commit that | goes on while there is left of the blocks |
|---|---|
| adds (a name, an attribute) | three quarters |
| changes (a close, a seal) | half |
| removes (an unlink, an eviction) | anything |

A removal gives blocks of data files back as well, from which the next commit fills these up, and
pages of the map.

A replica takes what its cluster has committed from the disk's last block, but of the map it leaves
half of the reserve: it can let go of what is gone, and its node of data files, until others have
removed something.
"""

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import lmdb

from kvfs.base.errors import NoSpace
from kvfs.meta.lmdb.growth import Growth, growth_of
from kvfs.meta.lmdb.journal import Position, Writes, journal_path, last_values
from kvfs.meta.lmdb.lmdb_file import count_free_pages, read_metas

_MOST: Final = 16 << 20
_LEAST: Final = 4 << 20
_SHARE: Final = 64
"""The share of the disk's size, one part in so many; on a small one at most one in _SMALL_SHARE."""
_SMALL_SHARE: Final = 16
_REPLICA_MOST: Final = 64 << 20
"""Limit for a replica: some 100,000 files of other nodes."""
_LEFT_BY_REPLICA: Final = 0.5
"""The share of the map's reserve that what a cluster commits leaves."""
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
    return left > (0.75 if _adds(growth) else 0.5)


def _adds(growth: Growth) -> bool:
    return not growth.takes_away and (growth.names > 0 or growth.size_bytes > _ADDED_BYTES)


def wanted_bytes(disk_bytes: int, *, is_replica: bool = False) -> int:
    """Returns bytes kept on a disk of that size: three eighths of them for `data.mdb`, one for the
    journal, half as a file. A replica has to take the commits of others, however full this disk
    is."""
    if is_replica:
        return min(_REPLICA_MOST, disk_bytes // _SMALL_SHARE)
    return min(_MOST, max(disk_bytes // _SHARE, min(_LEAST, disk_bytes // _SMALL_SHARE)))


class Reserve:
    """The reserve of one writing engine, within its write transactions."""

    def __init__(self, directory: Path, environment: lmdb.Environment) -> None:
        self._directory = directory
        self._data_bytes = self._journal_bytes = self._file_bytes = self._step = 0
        self._is_replica: bool | None = None
        self._environment = environment
        self._page_bytes = environment.stat()["psize"]
        self._map_bytes = environment.info()["map_size"]
        self._map_left = 1.0
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

    def _measure(self, is_replica: bool) -> None:
        disk = os.statvfs(self._directory)
        whole = wanted_bytes(disk.f_blocks * disk.f_frsize, is_replica=is_replica)
        self._data_bytes, self._journal_bytes = whole * 3 // 8, whole // 8
        self._file_bytes, self._step = whole // 2, whole // 32
        self._is_replica = is_replica

    def fill(self, position: Position, *, is_replica: bool) -> None:
        """Keeps the wanted blocks ahead of the ends of both files, and looks what the map has left;
        the caller holds the writer lock. Raises OSError, except for a lack of space."""
        if is_replica is not self._is_replica:
            self._measure(is_replica)
        self._open(position.generation)
        end = (self._environment.info()["last_pgno"] + 1) * self._page_bytes
        self._map_left = self._left_in_map(end)
        self.left = min(
            self._ahead(self._journal, position.end, self._journal_bytes),
            self._ahead(self._data, end, self._data_bytes),
            self._map_left,
        )
        self.until = 0 if self.left < 1 else position.end + self._step
        if self.left == 1:
            fill_file(self._directory, self._file_bytes)

    def admit(self, before: Callable[[bytes], bytes | None], writes: Writes) -> None:
        """Raises NoSpace if the remaining blocks are not for a commit of this kind. `before`: a
        key's value without these writes."""
        if self.left == 1 or (self._is_replica and self._map_left > _LEFT_BY_REPLICA):
            return
        growth = growth_of(last_values(writes).items(), before)
        if self._is_replica:
            if _adds(growth):
                raise map_full(self._directory)
        elif not permitted(growth, self.left):
            is_map_full = self._map_left < 1
            raise map_full(self._directory) if is_map_full else disk_full(self._directory)

    def _left_in_map(self, end: int) -> float:
        """Returns which share there is of the pages that the map keeps. The free ones before the
        end of the file, which nobody else counts, are looked at only where it is near."""
        wanted, enough = self._data_bytes, self._data_bytes + self._step
        left = self._map_bytes - end
        if left < enough:
            newest = max(read_metas(self._data), key=lambda meta: meta.txnid)
            left += count_free_pages(self._data, newest) * self._page_bytes
        return 1.0 if left >= enough else max(0.0, min(0.99, left / wanted))

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
        flags = os.O_RDWR | os.O_CLOEXEC
        self._data = os.open(self._directory / "data.mdb", flags)
        self._journal = os.open(journal_path(self._directory, generation), flags)
        self.generation = generation


def disk_full(directory: Path) -> NoSpace:
    """Returns the error of a commit for which the filesystem has no space."""
    return NoSpace(f"no space for the metadata in {directory}: free some space on that filesystem")


def map_full(directory: Path) -> NoSpace:
    """Returns the error of a commit for which LMDB's map has no page."""
    return NoSpace(
        f"the metadata file {directory / 'data.mdb'} has reached its largest size: remove files, in"
        " a cluster on another node, or lift the limit of address space (ulimit -v) and restart"
    )


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
