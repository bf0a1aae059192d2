"""Reads files straight from the store's data files, which `kvfs.vfs.open` has fetched here,
and the checksums that the store keeps of them.

Nothing is copied here: the kernel reads into the caller's memory, or into a new bytearray.
"""

import errno
import os
import stat
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvfs.base.errors import (
    Corrupt,
    Invalid,
    IsADirectory,
    NotFound,
    NotSupported,
    TooLarge,
)
from kvfs.datastore.checksum import CHUNK_BYTES, combine, wrong_in
from kvfs.datastore.index import IndexEntry
from kvfs.datastore.kernel.safe_open import Unreadable
from kvfs.meta.records import Flag, Inode
from kvfs.session.parallel import Step, nothing
from kvfs.session.paths import joined, naming, shown
from kvfs.session.session import Session
from kvfs.tree import published_view
from kvfs.tree.inodes import read_inodes
from kvfs.tree.published_view import FoundInode
from kvfs.vfs.names.name_search import LOOKS, NameSearch
from kvfs.vfs.node_client import NodeClient
from kvfs.vfs.open import BlockingOpener
from kvfs.vfs.touches import Touches

Parts = tuple[bytes, ...]


class StoredChecksums:
    """The stored checksums, for one client; any thread."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def of(self, found: FoundInode) -> bytes | None:
        """Returns the xxh3-128 of each chunk, one after the other; None if this store has none of
        this content: it was not sealed yet, or lies in a directory for which another node is
        responsible. Raises what `Session.read` raises."""
        return self.of_many([found])[0]

    def of_many(self, found: Sequence[FoundInode]) -> list[bytes | None]:
        """Does `of` for each, in one transaction."""
        sealed = [each for each in found if each.inode.flags & Flag.SEALED]
        if not sealed:
            return [None] * len(found)
        inos = [each.ino for each in sealed]
        entries = iter(self._session.read_index(lambda index: index.get_many(inos)))
        return [
            _chunks(each.inode, next(entries)) if each.inode.flags & Flag.SEALED else None
            for each in found
        ]

    def check(self, found: FoundInode, chunks: bytes | None, data: memoryview, path: Parts) -> None:
        """Raises Corrupt if the whole content, `data`, is not the sealed one, whose checksums are
        `chunks`. A file that was written to since may well have another."""
        wrong = None if chunks is None else wrong_in(data, chunks)
        if wrong is None or not self._hold(found):
            return
        begin = wrong * CHUNK_BYTES
        raise Corrupt(
            f"{joined(path)}: what was read from byte {begin} on is not what was stored: its "
            "checksum differs"
        )

    def _hold(self, found: FoundInode) -> bool:
        """Returns whether its record still bears this seal: else it was opened for writing since,
        and may well have other bytes. Raises what `Session.read` raises."""
        (now,) = self._session.read(lambda t: read_inodes(t, [found.ino]))
        if now is None or not now.flags & Flag.SEALED:
            return False
        return (now.version, now.checksum) == (found.inode.version, found.inode.checksum)


def _chunks(inode: Inode, entry: IndexEntry | None) -> bytes | None:
    if entry is None or entry.version != inode.version:
        return None
    return entry.chunks if combine(entry.chunks) == inode.checksum else None


_STEP_BYTES: Final = 64 << 20


class OpenedFile(NamedTuple):
    """A data file open for reading."""

    fd: int
    size: int
    found: FoundInode
    """The file that it belongs to."""


class Reader:
    """Opens and reads for one client; any thread."""

    def __init__(self, session: Session, touches: Touches, node: NodeClient) -> None:
        self._session = session
        self._touches = touches
        self._search = NameSearch(session, node)
        self._opener = BlockingOpener(session, node)
        self.sums: Final = StoredChecksums(session)

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

    def open_exactly(self, path: Parts, found: FoundInode) -> OpenedFile:
        """Like `open`, of this content and no other. Raises NotFound (it is not here), Corrupt,
        OSError."""
        opened = self._open_found(found, path)
        if opened is None:
            raise NotFound(f"{joined(path)}: what was matched is not here any more")
        return opened

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
        return self.read_opened(self.open(path), path, offset, size, step)

    def read_into(
        self, path: Parts, into: memoryview, offset: int, size: int | None, step: Step
    ) -> int:
        """See `Client.get`; returns the bytes read."""
        return self.read_opened_into(self.open(path), path, into, offset, size, step)

    def read_opened(
        self,
        opened: OpenedFile,
        path: Parts,
        offset: int = 0,
        size: int | None = None,
        step: Step = nothing,
    ) -> bytearray:
        """Like `read`, of a file that is open; closes it."""
        try:
            data = bytearray(_length(opened, offset, size))
            count = _fill(opened.fd, memoryview(data), offset, step, path)
        finally:
            os.close(opened.fd)
        if count < len(data):
            del data[count:]
        return data

    def read_opened_into(
        self,
        opened: OpenedFile,
        path: Parts,
        into: memoryview,
        offset: int = 0,
        size: int | None = None,
        step: Step = nothing,
    ) -> int:
        """Like `read_into`, of a file that is open; closes it."""
        try:
            wanted = _length(opened, offset, size)
            if wanted > len(into):
                raise TooLarge(
                    f"{joined(path)}: {wanted} bytes do not fit into a buffer of {len(into)}"
                )
            return _fill(opened.fd, into[:wanted], offset, step, path)
        finally:
            os.close(opened.fd)

    def _find(self, path: Parts) -> FoundInode:
        boot = self._session.boot

        def look() -> FoundInode:
            return self._session.read(lambda t: published_view.find(t, path, boot))

        with naming(path):
            return self._search.found(look)

    def find_many(self, paths: Sequence[Parts]) -> list[FoundInode | bytes | NotFound]:
        """Does what `published_view.find_many` does; those that other nodes have are among them."""
        boot = self._session.boot
        found = self._session.read(lambda t: published_view.find_many(t, paths, boot))
        for _ in range(LOOKS):
            absent = [each for each in found if type(each) is not FoundInode]
            missing = [each for each in map(_missing_entry, absent) if each is not None]
            if not missing or not self._search.find(dict.fromkeys(missing)):
                break
            found = self._session.read(lambda t: published_view.find_many(t, paths, boot))
        return found

    def _open_found(self, found: FoundInode, path: Parts) -> OpenedFile | None:
        """Returns None when the data file has gone, or is not as long as its seal was: look
        again."""
        _require_file(found, path)
        try:
            fd = self._session.files.open(found.ino, found.inode.version, os.O_RDONLY)
        except (FileNotFoundError, Unreadable):
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


def _missing_entry(found: FoundInode | bytes | NotFound) -> bytes | None:
    return found.at if isinstance(found, NotFound) else found if type(found) is bytes else None


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
