"""Operations on ranges of an open file's bytes that the kernel does not do itself."""

import errno
import os

import trio

from gateway.fuse.files.open_file import OpenFile
from gateway.fuse.files.open_files import OpenFiles
from kvfs.datastore.kernel import allocate
from kvfs.policy.readahead import Readahead
from kvfs.transfer.transfer import Transfer


class Ranges:
    """Ranges of one mount's open files. All methods raise Stale for a handle that is not open."""

    def __init__(self, open_files: OpenFiles) -> None:
        self._open_files = open_files

    async def fallocate(self, fh: int, mode: int, offset: int, length: int) -> None:
        """Calls fallocate(2) on the data file. Raises OSError."""
        file = self._open_files.handle(fh).file
        file.rewritten = True
        await trio.to_thread.run_sync(allocate.fallocate, file.fd, mode, offset, length)

    def seek(self, fh: int, offset: int, whence: int) -> int:
        """Serves SEEK_DATA and SEEK_HOLE; bytes that have not arrived yet count as data. Raises
        OSError."""
        file = self._open_files.handle(fh).file
        if file.is_partial:
            return _seek_in_data(offset, whence, os.fstat(file.fd).st_size)
        return os.lseek(file.fd, offset, whence)

    def end(self, file: OpenFile, offset: int) -> int:
        """Returns where the file ends: appended bytes go there, wherever the kernel takes the end
        to be. The kernel is told of other nodes' appends, but may not have asked for the new length
        yet."""
        end = os.fstat(file.fd).st_size
        if end != offset:
            self._open_files.forget_content(file.ino)
        return end

    def coming(self, fh: int, offset: int, size: int) -> Transfer | None:
        """Returns the transfer that a read of these bytes has to wait for; None: they are here."""
        handle = self._open_files.handle(fh)
        incoming = handle.file.incoming
        if incoming is None or incoming.is_whole:
            return None
        if handle.readahead is None:
            handle.readahead = Readahead()
        for at, length in handle.readahead.ahead(offset, size):
            incoming.want(at, length)
        return None if incoming.has(offset, size) else incoming

    async def copy(
        self, fh_in: int, offset_in: int, fh_out: int, offset_out: int, length: int
    ) -> int:
        """Does copy_file_range(2) between data files and returns the bytes copied. Raises OSError,
        Unavailable and whatever bytes that are still being fetched may raise."""
        coming = self.coming(fh_in, offset_in, length)
        if coming is not None:
            await coming.span(offset_in, length)
        source, target = (self._open_files.handle(fh).file.fd for fh in (fh_in, fh_out))
        return await trio.to_thread.run_sync(
            os.copy_file_range, source, target, length, offset_in, offset_out
        )


def _seek_in_data(offset: int, whence: int, size: int) -> int:
    """Does lseek in a file without holes."""
    if not 0 <= offset < size:
        raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
    return offset if whence == os.SEEK_DATA else size
