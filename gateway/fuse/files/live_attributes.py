"""Attributes of the mount's inodes: their record's, or their data file's where that is the truth.

| the file | size and times |
|---|---|
| sealed, and nobody has it open for writing here | the record's; the data file's access time |
| not sealed, or open for writing here | the data file's |
| open with a content that other nodes have replaced | that content's |
"""

import os
import stat
from collections.abc import Awaitable, Callable

import msgspec

from gateway.fuse.codec.protocol import Fattr
from gateway.fuse.codec.set_attributes import Attributes, changes_of, completed
from gateway.fuse.files.kernel_inodes import InodeOpener
from gateway.fuse.files.open_file import OpenFile
from gateway.fuse.files.open_files import OpenFiles
from gateway.fuse.files.open_table import LARGE_BLOCKS
from kvfs.base.clock import file_time_ns
from kvfs.base.errors import Stale
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag, Inode
from kvfs.tree import inodes, tree
from kvfs.vfs.volume import Volume


class LiveAttributes:
    """The attributes of one mount's inodes."""

    def __init__(
        self, volume: Volume, open_files: OpenFiles, release: Callable[[int], Awaitable[None]]
    ) -> None:
        """`release` ends a handle, and with it an orphan that nothing else holds."""
        self._engine = volume.engine
        self._volume = volume
        self._store = volume.files
        self._open_files = open_files
        self._publishing = open_files.publishing
        self._release = release

    def live(self, ino: int, inode: Inode) -> Inode:
        """Completes the record by the data file's own stat, where that is the truth. Changes
        `inode`."""
        if not stat.S_ISREG(inode.mode) or self._is_as_sealed(ino, inode):
            atime = self._volume.atimes.get(ino)
            if atime is not None:
                inode.atime_ns = atime
            return inode
        st = self._data_stat(ino, inode.version)
        return inode if st is None else completed(inode, st)

    def _is_as_sealed(self, ino: int, inode: Inode) -> bool:
        """Returns whether a file is what its record was sealed as. A program that has it open for
        writing here sees its own changes, whatever another node has published and sealed since: the
        file then counts as not sealed. Changes `inode`."""
        if not inode.flags & Flag.SEALED:
            return False
        file = self._open_files.get(ino)
        if file is None or not file.writers:
            return True
        inode.flags &= ~Flag.SEALED
        return False

    def _content(self, ino: int, opener: InodeOpener | None) -> OpenFile | None:
        """Returns the content that the opener's inode has open, which other nodes may have
        replaced."""
        return None if opener is None else opener.content(self._open_files.get(ino))

    def _opened_and_removed(self, ino: int, opener: InodeOpener | None) -> OpenFile | None:
        """Returns the opener's content of a file that other nodes removed while it was open."""
        file = self._content(ino, opener) or self._open_files.get(ino)
        return file if file is not None and file.is_removed else None

    def _data_stat(self, ino: int, version: int) -> os.stat_result | None:
        """Returns the data file's own stat; None if it is missing or incomplete here, or the open
        content is one that others have replaced."""
        file = self._open_files.get(ino)
        if file:
            if file.is_partial or (file.version < version and not file.writers):
                return None
            return os.fstat(file.fd)
        try:
            return self._store.stat(ino, version)
        except FileNotFoundError:
            return None

    async def getattr(self, ino: int, opener: InodeOpener | None = None) -> Inode:
        """Returns attributes, with the access time that reads by passthrough left on the data file.
        An open file has them even if another node has dropped its record. `opener`: the kernel's
        inode, which has them as it was opened."""
        content = self._content(ino, opener)
        file = self._open_files.get(ino) if content is None else content
        try:
            inode = await self._engine.read(lambda t: tree.read_inode(t, ino))
        except Stale:
            if file is None:
                raise
            return _removed(file)
        if not stat.S_ISREG(inode.mode):
            return inode
        if content is not None and _is_replaced(content, inode):
            return _as_opened(inode, content)
        if file and file.armed and await self._publishing.disarm(file):
            inode = await self._engine.read(lambda t: tree.read_inode(t, ino))
        return self.present(ino, inode)

    def present(self, ino: int, inode: Inode) -> Inode:
        """Returns a regular file's record like `live`; a sealed file's has the data file's access
        time. Changes `inode`."""
        st = self._data_stat(ino, inode.version)
        if st is None:
            return inode
        if self._is_as_sealed(ino, inode):
            inode.atime_ns = st.st_atime_ns
            return inode
        return completed(inode, st)

    async def setattr(
        self, ino: int, valid: int, wanted: Attributes, opener: InodeOpener | None = None
    ) -> Inode:
        """Does chmod, chown, utimens and truncate, in any combination. Returns the attributes as
        the opener's inode has them."""
        if valid & Fattr.SIZE:
            await self._truncate(ino, wanted.size)
        now = file_time_ns()
        changes = changes_of(valid, wanted, now)

        def fn(t: Transaction) -> Inode:
            if valid & Fattr.KILL_SUIDGID:
                present = tree.read_inode(t, ino).mode
                mode = present if changes.mode is None else stat.S_IFMT(present) | changes.mode
                changes.mode = stat.S_IMODE(inodes.without_set_ids(mode))
            return inodes.set_attributes(t, ino, changes, now)

        try:
            inode = await self._engine.transact(fn, private=ino)
        except Stale:
            file = self._opened_and_removed(ino, opener)
            if file is None:
                raise
            return _removed_with(file, changes, now)
        self._open_files.mode_changed(ino, inode.mode)
        if valid & (Fattr.ATIME | Fattr.MTIME) and stat.S_ISREG(inode.mode):
            self._stamp(ino, inode, valid)
        content = self._content(ino, opener)
        if content is not None and _is_replaced(content, inode):
            return _as_opened(inode, content)
        return self.live(ino, inode)

    def _stamp(self, ino: int, inode: Inode, valid: int) -> None:
        """Sets times on the data file too, which is the truth while the file is not sealed."""
        self._volume.atimes.pop(ino, None)
        st = self._data_stat(ino, inode.version)
        if st is None:
            return
        times = (
            inode.atime_ns if valid & Fattr.ATIME else st.st_atime_ns,
            inode.mtime_ns if valid & Fattr.MTIME else st.st_mtime_ns,
        )
        if file := self._open_files.get(ino):
            os.utime(file.fd, ns=times)
        else:
            os.utime(self._store.path(ino, inode.version), ns=times, follow_symlinks=False)

    async def is_large(self, ino: int) -> bool:
        """Returns whether truncating this file may take long."""
        return (await self.getattr(ino)).blocks > LARGE_BLOCKS

    async def _truncate(self, ino: int, size: int) -> None:
        try:
            handle = await self._open_files.open(ino, os.O_WRONLY, None)
        except Stale:
            file = self._opened_and_removed(ino, None)
            if file is None:
                raise
            await self._open_files.cut(file, size)
            return
        try:
            await self._open_files.cut(handle.file, size)
        finally:
            await self._release(handle.fh)


def _is_replaced(content: OpenFile, inode: Inode) -> bool:
    """Returns whether a file has another content than the one that is open."""
    return content.version < inode.version and not content.writers


def _as_opened(inode: Inode, content: OpenFile) -> Inode:
    """Returns a record with size and times of a content that was replaced."""
    if not content.is_partial:
        return completed(inode, os.fstat(content.fd))
    former = content.record
    inode.size, inode.blocks = former.size, former.blocks
    inode.mtime_ns = former.mtime_ns
    return inode


def _removed(file: OpenFile) -> Inode:
    """Returns a record for an open file whose own has gone."""
    inode = msgspec.structs.replace(file.record, nlink=0, flags=file.record.flags & ~Flag.SEALED)
    return inode if file.is_partial else completed(inode, os.fstat(file.fd))


def _removed_with(file: OpenFile, changes: inodes.AttributeChanges, now: int) -> Inode:
    """Sets attributes of an open file whose own record has gone; they go with its last close."""
    inodes.change_attributes(file.record, changes, now)
    if changes.atime_ns is not None or changes.mtime_ns is not None:
        st = os.fstat(file.fd)
        atime_ns = st.st_atime_ns if changes.atime_ns is None else changes.atime_ns
        mtime_ns = st.st_mtime_ns if changes.mtime_ns is None else changes.mtime_ns
        os.utime(file.fd, ns=(atime_ns, mtime_ns))
    return _removed(file)
