"""A file that tensors are read from: buffered, or past the page cache.

Choice, for each read: what the page cache holds is copied from there; else O_DIRECT, which has the
disk write into the tensor's memory without the copy, and leaves the cache to others. What several
processes of this host are about to read goes through the page cache, so that it comes from the disk
once. Where the filesystem has no O_DIRECT everything is buffered.
"""

import errno
import os
from collections.abc import Sequence
from typing import Final

from gds.page_cache import cached_bytes
from gds.pages import page_down
from kvfs.errors import Conflict, Corrupt

_NO_DIRECT: Final = (errno.EINVAL, errno.EOPNOTSUPP)


class Source:
    """One open file; reads come from any thread. It owns its descriptors."""

    def __init__(self, fd: int, where: str) -> None:
        """Takes `fd` over, open for reading; `where` names the file in errors. Raises OSError."""
        self.fd = fd
        self.where = where
        self._began = os.fstat(fd)
        self.size = self._began.st_size
        self._direct_fd = _open_direct(fd)

    def read_into(self, page: memoryview, begin: int, end: int, *, shared: bool = False) -> None:
        """Read the file's bytes [begin, end) into `page`, memory that begins and ends at multiples
        of a page and whose first byte is that of the page in which `begin` lies. What lies around
        them in their first and last page may be read too.

        `shared`: other processes are about to read them. Raises Corrupt (the file ends before, or
        the disk cannot read it), OSError."""
        if self._direct_fd is not None and not shared and self._is_cold(begin, end):
            try:
                first = page_down(begin)
                self._fill(self._direct_fd, page, first, end - first)
                return
            except OSError as error:
                if error.errno not in _NO_DIRECT:
                    raise
        skip = begin - page_down(begin)
        self._fill(self.fd, page[skip : skip + end - begin], begin, end - begin)

    def read_pieces(self, pieces: Sequence[tuple[memoryview, int]]) -> None:
        """Read into each view what begins at the offset beside it. Raises as `read_into`."""
        for view, offset in pieces:
            self._fill(self.fd, view, offset, len(view))

    def _is_cold(self, begin: int, end: int) -> bool:
        cached = cached_bytes(self.fd, begin, end - begin)
        return cached is not None and cached * 2 < end - begin

    def _fill(self, fd: int, view: memoryview, offset: int, wanted: int) -> None:
        """Fill at least the first `wanted` bytes."""
        done = 0
        while done < wanted:
            try:
                count = os.preadv(fd, [view[done:]], offset + done)
            except OSError as error:
                if error.errno in _NO_DIRECT:
                    raise
                if error.errno != errno.EIO:
                    raise OSError(error.errno, error.strerror, self.where) from None
                raise Corrupt(f"{self.where}: the disk cannot read it at {offset + done}") from None
            if count == 0:
                raise Corrupt(f"{self.where}: truncated: it ends at byte {offset + done}")
            done += count

    def check_unchanged(self) -> None:
        """Raises Conflict where the file was written to since it was opened. (A file that was
        replaced is another file: this one stays as it was while it is open.)"""
        now = os.fstat(self.fd)
        if (now.st_size, now.st_mtime_ns) != (self.size, self._began.st_mtime_ns):
            raise Conflict(f"{self.where}: it was written to while it was read: load it again")

    def close(self) -> None:
        """Nobody reads any more. Idempotent."""
        fds, self.fd, self._direct_fd = (self.fd, self._direct_fd), -1, None
        for fd in fds:
            if fd is not None and fd >= 0:
                os.close(fd)


def _open_direct(fd: int) -> int | None:
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None
