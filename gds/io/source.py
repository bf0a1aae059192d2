"""A file that tensors are read from: buffered, or past the page cache.

Choice, for each read
- Cached data are copied from the page cache; so are data of which the kernel does not tell whether
  they are cached.
- Otherwise O_DIRECT, which has the disk write into the tensor's memory without the copy, and leaves
  the cache to others: if that memory lies in huge pages. A request to a disk has a limited number
  of segments, and is small if each is a page of 4 KiB (measured on virtio, cold: 3.0 GB/s into huge
  pages, 0.8 into small ones, 1.1 to 1.9 buffered).
- Data that others on this host load too (ranks of a model, servers that have the same one) go
  through the page cache while they do: they come from the disk once. If each rank reads all of
  them, they go there even while no other rank is seen: ranks start seconds apart, and find them.
- Small cold pieces that nobody else wants are read past it many at once (`gds.io.small_pieces`), if
  the disk's blocks are smaller than pages; else through it, announced.
- On a filesystem without O_DIRECT everything is buffered.
"""

import collections
import errno
import os
from collections.abc import Sequence
from typing import Final

from gds.io import cache_fill, co_readers
from gds.io import small_pieces as small
from gds.io.direct_io import alignment
from gds.io.memory import is_huge
from gds.io.page_cache import cached_bytes
from gds.io.small_pieces import Piece
from gds.io.timings import Stage, during
from gds.plan.pages import page_down
from kvfs.base.errors import Conflict, Corrupt

_ANNOUNCED: Final = 256
"""Small reads that a disk gets at once. Read one by one by eight threads, pieces of 2 KiB took 24
to 36 µs each on a virtual NVMe disk, announced 12 to 16 µs."""
_NO_DIRECT: Final = (errno.EINVAL, errno.EOPNOTSUPP)


class SourceFile:
    """One open file, read by any thread. It owns its descriptors."""

    def __init__(self, fd: int, where: str) -> None:
        """Takes over `fd`, open for reading; `where` names the file in errors. Raises OSError."""
        self._owned: tuple[int, ...] = ()
        self._is_abandoned = False
        self.fd = fd
        self.where = where
        self._began = os.fstat(fd)
        self.size = self._began.st_size
        self._direct_fd = _open_direct(fd)
        self._is_shared = False
        self._is_common = False
        self._owned = (fd,) if self._direct_fd is None else (fd, self._direct_fd)
        asked = None if self._direct_fd is None else alignment(fd)
        self._block = None if asked is None else asked.block

    def share(self, *, is_rank: bool, is_common: bool) -> None:
        """Makes this load known to others that may load the file too, and considers theirs: those
        of its model's other ranks (`is_rank`) also where they cannot be seen. `is_common`: they
        will read everything that is read here, if not now then soon."""
        self._is_shared = co_readers.join(self.fd) or is_rank
        self._is_common = is_common

    def read_into(self, page: memoryview, begin: int, end: int, *, is_cached: bool = False) -> None:
        """Reads the file's bytes [begin, end) into `page`, memory that begins and ends at multiples
        of a page and whose first byte is that of the page in which `begin` lies. The bytes around
        them in their first and last page may be read too. `is_cached`: the caller found them not
        to be cold (`is_cold`), so it is not asked again.

        Raises Corrupt (the file ends before, or the disk cannot read it), OSError."""
        with during(Stage.READ, end - begin):
            self._read_into(page, begin, end, is_cached)

    def _read_into(self, page: memoryview, begin: int, end: int, is_cached: bool) -> None:
        is_cold = not is_cached and self.is_cold(begin, end)
        if self._direct_fd is not None and is_cold and is_huge(len(page)) and self.is_alone():
            try:
                first = page_down(begin)
                self._fill(self._direct_fd, page, first, end - first)
                return
            except OSError as error:
                if error.errno not in _NO_DIRECT:
                    raise
        skip = begin - page_down(begin)
        view = page[skip : skip + end - begin]
        if is_cold and self._is_shared:
            # Else the kernel reads ahead what is another rank's: 8 MiB behind each part.
            cache_fill.fill(self.fd, begin, end)
        self._fill(self.fd, view, begin, end - begin)

    def is_alone(self) -> bool:
        """Returns whether nobody else on this host wants the data, as far as `share` tells."""
        if not self._is_shared:
            return True
        return not self._is_common and not co_readers.has_company(self.fd)

    def read_pieces(self, pieces: Sequence[Piece]) -> None:
        """Reads into each view the bytes that begin at the offset beside it. Raises what
        `read_into` raises, and MemoryError."""
        with during(Stage.READ, sum(len(view) for view, _ in pieces)):
            self._read_announced(self._read_direct(pieces))

    def _read_direct(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """Reads pieces past the page cache; returns those that are to be read through it, or could
        not be read past it."""
        if self._direct_fd is None or self._block is None:
            return pieces
        left: list[Piece] = []
        for batch in small.batches(pieces, self._block):
            if self._is_cold(batch) and self.is_alone():
                left += small.read_direct(self._direct_fd, batch, self._block)
            else:
                left += batch
        return left

    def _is_cold(self, pieces: Sequence[Piece]) -> bool:
        """Returns whether most of them would come from the disk. The bytes between them count as
        well, so they may be taken for cached if others had those read."""
        begin = min(offset for _, offset in pieces)
        end = max(offset + len(view) for view, offset in pieces)
        cached = cached_bytes(self.fd, begin, end - begin)
        return cached is not None and cached * 2 < small.page_bytes(pieces)

    def _read_announced(self, pieces: Sequence[Piece]) -> None:
        """Reads through the page cache, some announced ahead of the others."""
        self._announce(pieces[:_ANNOUNCED])
        for at, (view, offset) in enumerate(pieces):
            if at % _ANNOUNCED == 0:
                self._announce(pieces[at + _ANNOUNCED : at + 2 * _ANNOUNCED])
            self._fill(self.fd, view, offset, len(view))

    def _announce(self, pieces: Sequence[Piece]) -> None:
        """Makes the disk read them into the page cache, many at a time, and no more than them."""
        for view, offset in pieces:
            cache_fill.announce(self.fd, offset, offset + len(view))

    def is_cold(self, begin: int, end: int) -> bool | None:
        """Returns whether most of the bytes [begin, end) would come from the disk; None: the kernel
        does not tell."""
        cached = cached_bytes(self.fd, begin, end - begin)
        return None if cached is None else cached * 2 < end - begin

    def _fill(self, fd: int, view: memoryview, offset: int, wanted: int) -> None:
        """Fills at least the first `wanted` bytes."""
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
                size = os.fstat(fd).st_size
                raise Corrupt(f"{self.where}: truncated: it ends at byte {size}")
            done += count

    def check_unchanged(self) -> None:
        """Raises Conflict if the file was written to since it was opened. (A file that was replaced
        is another file: this one stays as it was while it is open.)"""
        now = os.fstat(self.fd)
        if (now.st_size, now.st_mtime_ns) != (self.size, self._began.st_mtime_ns):
            raise Conflict(f"{self.where}: it was written to while it was read: load it again")

    def close(self) -> None:
        """Closes it; no thread may be reading. Idempotent."""
        if self._is_abandoned:
            return
        self.fd, self._direct_fd = -1, None
        # An interrupt comes before all are closed, or after.
        closing = map(os.close, self._owned)
        self._owned = ()
        collections.deque(closing, maxlen=0)

    def abandon(self) -> None:
        """Leaves the file to threads that nobody waits for: its descriptors are closed when they
        let go of it."""
        self._is_abandoned = True

    def __del__(self) -> None:
        """Closes it, even if an interrupt kept it from its owner."""
        self._is_abandoned = False
        self.close()


def _open_direct(fd: int) -> int | None:
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None
