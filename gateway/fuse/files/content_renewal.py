"""Gives an open file the content that other nodes have published since.

While a kernel inode is open, it stays with one data file, so new content is copied into that file,
and a program that reads meanwhile gets some of both. This happens only where the kernel cannot be
given another inode (`kernel_inodes`): for files opened by their descriptor, and in libfuse mode.
"""

import contextlib
import os
from collections.abc import Awaitable, Callable

import trio

from gateway.fuse.files.open_file import OpenFile, copy_over, signature_of
from kvfs.base.errors import Busy, Conflict, KvfsError
from kvfs.transfer.transfer import Transfer
from kvfs.transfer.transfers import Transfers
from kvfs.tree import tree
from kvfs.vfs.volume import Volume


async def _nothing(_: int) -> None:
    """Stands in where no kernel needs to be told."""


class Renewing:
    """Renews the open files of one mount."""

    def __init__(self, volume: Volume, transfers: Transfers) -> None:
        self._volume = volume
        self._transfers = transfers
        self.forget_content: Callable[[int], Awaitable[None]] = _nothing
        """Makes the kernel forget what it knows of an open file's content. Raises Unavailable."""

    async def renew(self, file: OpenFile) -> None:
        """Returns when the file has the newest content. Raises Busy if that content is replaced
        while it is on its way, Conflict, and what `Transfers.bring` raises."""
        if file.incoming is not None:
            await self._finished(file.incoming)
        await self._transfers.bring(file.ino)
        await self._take_over(file)
        await self.forgotten(file)

    async def forgotten(self, file: OpenFile) -> None:
        """Returns when the kernel uses the content that is there now: otherwise a program that
        opens the file would read it only up to the end of the old content."""
        if file.is_remembered:
            await self.forget_content(file.ino)
            file.is_remembered = False

    async def _finished(self, incoming: Transfer) -> None:
        try:
            await incoming.whole()
        except (KvfsError, OSError) as error:
            raise Busy(
                "other nodes replaced the file while its data came here, and it is open: close it "
                f"first ({error})"
            ) from error

    async def _take_over(self, file: OpenFile) -> None:
        """Copies new content into the data file that is open: while a kernel inode is open, it
        stays with that one."""
        inode = await self._volume.engine.read(lambda t: tree.read_inode(t, file.ino))
        if inode.version <= file.version:
            return  # another open of it did so meanwhile
        files = self._volume.files
        try:
            source = files.open(file.ino, inode.version, os.O_RDONLY)
        except FileNotFoundError:
            raise Conflict("the file is written on other nodes all the time") from None
        try:
            target = os.open(f"/proc/self/fd/{file.fd}", os.O_RDWR | os.O_CLOEXEC)
            try:
                await trio.to_thread.run_sync(copy_over, source, target)
            finally:
                os.close(target)
        finally:
            os.close(source)
        file.is_remembered = True
        if file.is_former:
            return  # what has the newest content open has the new name: this one keeps its own
        # Where its old name has gone, what was brought keeps the new one.
        with contextlib.suppress(FileNotFoundError):
            files.replace_version(file.ino, file.version, inode.version)
        file.version = inode.version
        file.published = signature_of(os.fstat(file.fd))
