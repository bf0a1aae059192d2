"""Opens data files for the mount: at once where they are here and as their records say, else by the
loop of every door (`kvfs.vfs.open`), in which a file may also be opened while its data arrive.
"""

import contextlib
import os
from functools import partial
from typing import Final

import trio

from gateway.fuse.files.open_file import OpenFile, signature_of
from gateway.fuse.files.open_table import OpenTable
from gateway.fuse.files.publish import Publishing, differs, unsealed_here
from kvfs.base import detach
from kvfs.base.errors import Conflict, IsADirectory, KvfsError
from kvfs.datastore.kernel.safe_open import Unreadable
from kvfs.meta.records import Flag, Inode
from kvfs.node import Node
from kvfs.transfer.transfer import SMALL_BYTES, Transfer
from kvfs.tree import tree
from kvfs.tree.published_view import FoundInode
from kvfs.vfs.missing_data import is_torn
from kvfs.vfs.open import FileOpener
from kvfs.vfs.port import State

_PAUSE_S: Final = 0.1
"""Pause before a file that changed while it was fetched is looked at again."""


class DataOpener:
    """Opens data files for one mount's table. Raises what `OpenFiles.open` raises."""

    def __init__(self, node: Node, table: OpenTable, publishing: Publishing) -> None:
        self._volume = node.volume
        self._transfers = node.transfers
        self._table = table
        self._publishing = publishing
        self._opener = FileOpener(node.engine, node.port)

    def open_whole(self, ino: int, inode: Inode, flags: int) -> OpenFile | None:
        """Opens a data file to be read; returns None if it is missing or differs from its
        record."""
        try:
            fd = self._volume.files.open(ino, inode.version, os.O_RDONLY | flags & os.O_NOATIME)
        except (FileNotFoundError, Unreadable):
            return None
        stat = os.fstat(fd)
        if is_torn(inode, stat):
            os.close(fd)
            return None
        return self._opened(ino, inode, fd, stat, False)

    def by_descriptor(self, ino: int, inode: Inode, fd: int) -> OpenFile:
        """Returns the file by a descriptor of its data file, which it takes, and its record."""
        return self._opened(ino, inode, fd, os.fstat(fd), False)

    async def open(self, ino: int, flags: int, writable: bool) -> OpenFile:
        """Opens a file's data file, whose data are fetched if they are not here."""
        found, file = await self._look(ino, flags, writable)
        if file is not None:
            return file
        await detach.aside()
        return await self._opener.open(
            _shown(found.inode),
            partial(self._look, ino, flags, writable),
            partial(self._fetch, flags=flags, writable=writable),
        )

    async def _look(
        self, ino: int, flags: int, writable: bool
    ) -> tuple[FoundInode, OpenFile | None]:
        """Returns the record, and the file if it is open by now, or its data file is here and as
        the record says."""
        volume = self._volume
        inode: Inode = await volume.engine.read(lambda t: tree.read_inode(t, ino))
        if inode.mode & 0o170000 != 0o100000:
            raise IsADirectory(f"inode {ino:x} is not a regular file")
        if (file := self._table.files.get(ino)) is not None:
            return FoundInode(ino, inode), file
        access = os.O_RDWR if writable else os.O_RDONLY
        try:
            fd = volume.files.open(ino, inode.version, access | flags & os.O_NOATIME)
        except (FileNotFoundError, Unreadable):
            return FoundInode(ino, inode), None
        stat = os.fstat(fd)
        if is_torn(inode, stat) and not flags & os.O_TRUNC:
            os.close(fd)
            return FoundInode(ino, inode), None
        file = self._opened(ino, inode, fd, stat, writable)
        if self._transfers.is_shared and differs(inode, stat):
            await self._publish_left(file)
        return FoundInode(ino, inode), file

    def _opened(
        self, ino: int, inode: Inode, fd: int, stat: os.stat_result, writable: bool
    ) -> OpenFile:
        file = OpenFile(ino, inode.version, fd, writable, inode)
        file.atime_ns = inode.atime_ns
        if inode.flags & Flag.PUBLISHED:
            file.published = signature_of(stat)
        file.is_mappable = not inode.flags & Flag.SEALED  # else nobody had it mapped for writing
        try:
            self._volume.index.touch(ino)
        except BaseException:
            os.close(fd)
            raise
        self._table.files[ino] = file
        return file

    async def _publish_left(self, file: OpenFile) -> None:
        """Records what the last close could not; nobody gets the file before. Raises what
        `Publishing.publish` raises."""
        if await self._volume.engine.read(lambda t: unsealed_here(t, file.ino)) is None:
            return
        file.published, file.rewritten = None, True
        file.users += 1
        try:
            await self._publishing.publish(file)
        except BaseException:
            file.users -= 1
            if not file.handles and not file.users:
                self._table.discard(file)
            raise
        file.users -= 1

    # ---- what is not here

    async def _fetch(self, found: FoundInode, *, flags: int, writable: bool) -> OpenFile | None:
        """Fetches data that are not here, or torn. Returns the file if it can be opened meanwhile,
        or another task opened it; None: look again."""
        ino, inode = found
        if self._is_there(ino, inode.version) or not inode.nlink or not self._transfers.is_possible:
            await self._opener.fetch(found, _shown(inode))
            return None
        if flags & os.O_TRUNC and self._transfers.is_shared:
            return self._begin_anew(ino, inode)
        opened: list[OpenFile] = []

        async def begin() -> State:
            if (file := await self._begin(ino, inode, flags, writable)) is not None:
                opened.append(file)
            return "here"

        await self._opener.fetch_by(found, _shown(inode), begin)
        return opened[0] if opened else None

    def _is_there(self, ino: int, version: int) -> bool:
        try:
            return self._volume.files.has(ino, version)
        except OSError:  # its disk fails: the node settles that
            return True

    async def _begin(self, ino: int, inode: Inode, flags: int, writable: bool) -> OpenFile | None:
        """Has the data of a file come; see `_fetch`."""
        incoming = self._transfers.begin(ino, inode)
        try:
            if writable or flags & os.O_NOATIME:
                await incoming.whole()
            elif inode.size <= SMALL_BYTES:
                return self._open_by(ino, inode, await incoming.opened())
            else:
                await incoming.begun()
        except Conflict:  # it was written elsewhere meanwhile
            await trio.sleep(_PAUSE_S)
        file = self._table.files.get(ino)
        if file is not None or incoming.is_whole or writable:
            return file
        return self._open_incoming(ino, incoming, inode)

    def _open_by(self, ino: int, inode: Inode, fd: int) -> OpenFile:
        """Opens a file by the descriptor that its transfer gave."""
        file = self._table.files.get(ino)
        if file is not None:
            os.close(fd)
            return file
        return self._opened(ino, inode, fd, os.fstat(fd), False)

    def _open_incoming(self, ino: int, incoming: Transfer, inode: Inode) -> OpenFile | None:
        try:
            fd = self._volume.files.open_arriving(ino, inode.version)
        except FileNotFoundError:
            return None
        file = self._opened(ino, inode, fd, os.fstat(fd), False)
        file.incoming = incoming
        return file

    def _begin_anew(self, ino: int, inode: Inode) -> OpenFile:
        """Opens a file that is truncated to nothing and therefore needs none of its data."""
        fd = self._volume.files.begin_draft(ino, inode.version)
        file = self._opened(ino, inode, fd, os.fstat(fd), True)
        file.is_draft = True
        file.published = None
        return file

    async def fetch_rest(self, file: OpenFile) -> None:
        """Fetches the missing bytes of an open file. If the rest of that content is gone, it comes
        from whichever node has the file by now, and programs that had it open read on."""
        assert file.incoming is not None
        with contextlib.suppress(KvfsError, OSError):
            await file.incoming.begun()
        if not file.incoming.has_failed:
            return
        inode = await self._volume.engine.read(lambda t: tree.read_inode(t, file.ino))
        incoming = self._transfers.begin(file.ino, inode)
        await incoming.begun()
        files = self._volume.files
        try:
            fd = files.open_arriving(file.ino, inode.version)
        except FileNotFoundError:  # it is whole by now
            await incoming.whole()
            fd = files.open(file.ino, inode.version, os.O_RDONLY)
        os.dup2(fd, file.fd, inheritable=False)
        os.close(fd)
        file.incoming = incoming


def _shown(inode: Inode) -> str:
    return os.fsdecode(inode.name)
