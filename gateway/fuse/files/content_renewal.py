"""Gives an open file the content that other nodes have published since.

While a kernel inode is open, it stays with one data file, so new content is copied into that file,
and a program that reads meanwhile gets some of both. This happens only where the kernel cannot be
given another inode (`kernel_inodes`): for files opened by their descriptor, and in libfuse mode.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Protocol

import trio

from gateway.fuse.files.open_file import OpenFile, copy_over, signature_of
from kvfs.base.errors import Busy, Conflict, KvfsError
from kvfs.transfer.transfer import Transfer
from kvfs.tree import tree
from kvfs.vfs.open import DataFetcher
from kvfs.vfs.volume import Volume


class KernelMemory(Protocol):
    """The memory that the kernels of one mount and its views have of files."""

    def attributes(self, ino: int) -> None:
        """Makes them ask again for attributes that they were to believe for long."""

    def content_soon(self, ino: int) -> None:
        """Makes the mount's forget, soon, a file's content and attributes."""

    async def content(self, ino: int) -> None:
        """Returns when they have forgotten a file's content and attributes. Raises Unavailable."""


class Renewing:
    """Renews the open files of one mount."""

    def __init__(
        self,
        volume: Volume,
        node: DataFetcher,
        memory: KernelMemory,
        renamed: Callable[[OpenFile], object],
    ) -> None:
        """`renamed` is told an open file whose data file has another version since."""
        self._renamed = renamed
        self._volume = volume
        self._node = node
        self._memory = memory

    async def renew(self, file: OpenFile) -> None:
        """Returns when the file has the newest content. Raises Busy if that content is replaced
        while it is on its way, Conflict, and what `NodePort.bring` raises."""
        if file.incoming is not None:
            await self._finished(file.incoming)
        while await self._node.bring(file.ino) == "coming":
            pass
        await self._take_over(file)
        await self.forgotten(file)

    async def forgotten(self, file: OpenFile) -> None:
        """Returns when the kernel uses the content that is there now: otherwise a program that
        opens the file would read it only up to the end of the old content."""
        if file.is_remembered:
            await self._memory.content(file.ino)
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
        self._renamed(file)
        file.published = signature_of(os.fstat(file.fd))
