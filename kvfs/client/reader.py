"""Reads files straight from the store's data files, which `kvfs.vfs.open` has fetched here.

Nothing is copied here: the kernel reads into the caller's memory, or into a new bytearray.
"""

import errno
import os
import stat
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeVar

from kvfs.base.errors import (
    Corrupt,
    Invalid,
    IsADirectory,
    KvfsError,
    NotADirectory,
    NotFound,
    NotSupported,
    TooLarge,
    Unavailable,
)
from kvfs.client.stored_checksums import StoredChecksums
from kvfs.datastore.checksum import CHUNK_BYTES, wrong_in
from kvfs.meta.records import Flag
from kvfs.session import parallel
from kvfs.session.parallel import Step
from kvfs.session.paths import joined, naming, shown
from kvfs.session.session import Session
from kvfs.tree import published_view
from kvfs.tree.published_view import FoundInode
from kvfs.vfs.node_client import Link
from kvfs.vfs.open import FileOpener
from kvfs.vfs.touches import Touches

T = TypeVar("T")
Parts = tuple[bytes, ...]
_STEP_BYTES: Final = 64 << 20
_ALONE_BYTES: Final = 1 << 20
"""Fewer bytes than this are read without the help of threads: waking one costs as much as reading
256 KiB."""


class OpenedFile(NamedTuple):
    """A data file open for reading."""

    fd: int
    size: int
    found: FoundInode
    """The file that it belongs to."""


class Reader:
    """Opens and reads for one client; any thread."""

    def __init__(self, session: Session, touches: Touches, link: Link) -> None:
        self._session = session
        self._touches = touches
        self._opener = FileOpener(session, link)
        self._sums = StoredChecksums(session)

    def open(self, path: Parts, found: FoundInode | None = None) -> OpenedFile:
        """Returns a new descriptor of the file, which `found` may give already.

        Raises NotFound, NotADirectory, NameTooLong, IsADirectory, NotSupported (a symbolic link),
        Invalid (another kind), Corrupt, Unavailable, NoSpace, OSError.
        """
        try:
            return self._open(path, found)
        except NotFound as error:
            self._touches.found_nothing(error)
            raise

    def _open(self, path: Parts, found: FoundInode | None) -> OpenedFile:
        """See `open`."""
        opened = self._open_found(found or self._find(path), path)
        if opened is not None:
            return opened
        shown = joined(path)

        def look() -> tuple[FoundInode, OpenedFile | None]:
            found = self._find(path)
            return found, self._open_found(found, path)

        return self._opener.open(shown, look, lambda found: self._opener.fetch(found, shown))

    def read(self, path: Parts, offset: int, size: int | None, step: Step) -> bytearray:
        """See `Client.get`."""
        return self._read(self.open(path), path, offset, size, step)

    def read_into(
        self, path: Parts, into: memoryview, offset: int, size: int | None, step: Step
    ) -> int:
        """See `Client.get`; returns the bytes read."""
        return self._read_into(self.open(path), path, into, offset, size, step)

    def read_many(
        self, paths: Sequence[Parts], step: Step, *, verify: bool
    ) -> list[bytearray | KvfsError | None]:
        """See `Client.get_many`."""

        def read(_: int, opened: OpenedFile, path: Parts) -> bytearray:
            data = self._read(opened, path, 0, None, parallel.nothing)
            if verify:
                self._check(opened.found, memoryview(data), path)
            return data

        return self._each(paths, read, step)

    def read_many_into(
        self, paths: Sequence[Parts], buffers: Sequence[memoryview], step: Step, *, verify: bool
    ) -> list[int | KvfsError | None]:
        """See `Client.get_many`; returns the bytes read."""

        def read(at: int, opened: OpenedFile, path: Parts) -> int:
            count = self._read_into(opened, path, buffers[at], 0, None, parallel.nothing)
            if verify:
                self._check(opened.found, buffers[at][:count], path)
            return count

        return self._each(paths, read, step)

    def sums_of(self, opened: OpenedFile) -> bytes | None:
        """See `StoredChecksums.of`."""
        return self._sums.of(opened.found)

    def _each(
        self, paths: Sequence[Parts], read: Callable[[int, OpenedFile, Parts], T], step: Step
    ) -> list[T | KvfsError | None]:
        """Returns None for a path that does not exist, and for others the error if there is one."""
        found = self._session.read(lambda t: published_view.find_many(t, paths, self._session.boot))
        if missing := [each for each in found if not isinstance(each, FoundInode)]:
            self._touches.missed(missing)
        results: list[T | KvfsError | None] = [None] * len(paths)

        def job(at: int) -> None:
            try:
                results[at] = read(at, self.open(paths[at], there[at]), paths[at])
            except (NotFound, NotADirectory):
                pass
            except KvfsError as error:
                results[at] = error
            except OSError as error:
                results[at] = Unavailable(f"{joined(paths[at])}: {error.strerror}")

        there = {at: each for at, each in enumerate(found) if isinstance(each, FoundInode)}
        sizes = [each.inode.size for each in there.values()]
        parallel.each(
            self._session, list(there), job, sizes=sizes, alone_below=_ALONE_BYTES, step=step
        )
        return results

    def _read(
        self, opened: OpenedFile, path: Parts, offset: int, size: int | None, step: Step
    ) -> bytearray:
        try:
            data = bytearray(_length(opened, offset, size))
            count = _fill(opened.fd, memoryview(data), offset, step, path)
        finally:
            os.close(opened.fd)
        if count < len(data):
            del data[count:]
        return data

    def _read_into(
        self,
        opened: OpenedFile,
        path: Parts,
        into: memoryview,
        offset: int,
        size: int | None,
        step: Step,
    ) -> int:
        try:
            wanted = _length(opened, offset, size)
            if wanted > len(into):
                raise TooLarge(
                    f"{joined(path)}: {wanted} bytes do not fit into a buffer of {len(into)}"
                )
            return _fill(opened.fd, into[:wanted], offset, step, path)
        finally:
            os.close(opened.fd)

    def _check(self, found: FoundInode, data: memoryview, path: Parts) -> None:
        """Raises Corrupt if the whole content, `data`, is not the sealed one. A file that was
        written to since may well have another."""
        chunks = self._sums.of(found)
        wrong = None if chunks is None else wrong_in(data, chunks)
        if wrong is None or not self._sums.hold(found):
            return
        begin = wrong * CHUNK_BYTES
        raise Corrupt(
            f"{joined(path)}: what was read from byte {begin} on is not what was stored: its "
            "checksum differs"
        )

    def _find(self, path: Parts) -> FoundInode:
        with naming(path):
            return self._session.read(lambda t: published_view.find(t, path, self._session.boot))

    def _open_found(self, found: FoundInode, path: Parts) -> OpenedFile | None:
        """Returns None when the data file has gone, or is not as long as its seal was: look
        again."""
        _require_file(found, path)
        try:
            fd = self._session.files.open(found.ino, found.inode.version, os.O_RDONLY)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            raise Corrupt(f"{joined(path)}: {error.strerror}") from error
        size = os.fstat(fd).st_size
        if found.inode.flags & Flag.SEALED and size != found.inode.size:
            os.close(fd)
            return None
        self._touches.add(found.ino)
        return OpenedFile(fd, size, found)


def _require_file(found: FoundInode, path: Parts) -> None:
    mode = found.inode.mode
    if stat.S_ISREG(mode):
        return
    if stat.S_ISDIR(mode):
        raise IsADirectory(f"{joined(path)} is a directory")
    if stat.S_ISLNK(mode):
        raise NotSupported(
            f"{joined(path)} is a symbolic link to {shown(found.inode.target)}: name the file "
            "itself, or read it through the mount"
        )
    raise Invalid(f"{joined(path)} is no regular file: reach it through the mount")


def _length(opened: OpenedFile, offset: int, size: int | None) -> int:
    """Returns the bytes to read."""
    if offset < 0 or (size is not None and size < 0):
        raise Invalid("an offset or a size is never negative")
    left = max(0, opened.size - offset)
    return left if size is None else min(left, size)


def _fill(fd: int, view: memoryview, offset: int, step: Step, path: Parts) -> int:
    """Reads until the view is full, or the file ends; returns the bytes read."""
    done = 0
    while done < len(view):
        try:
            count = os.preadv(fd, [view[done : done + _STEP_BYTES]], offset + done)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            raise Corrupt(f"{joined(path)}: the disk cannot read its data file") from error
        if count == 0:
            break
        done += count
        step(done)
    return done
