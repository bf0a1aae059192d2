"""The table of a mount's open files: by inode, with former contents, and data files that stay open
without a handle.

All handles of an inode share one `OpenFile`. A task in the middle of something with an `OpenFile`
counts among its `users`: the last of its handles and users closes it.
"""

import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import trio

from gateway.fuse.files.kernel_inodes import KernelInodes
from gateway.fuse.files.open_file import OpenFile
from kvfs.base import detach
from kvfs.base.descriptors import OpenFileShares
from kvfs.meta.records import Inode
from kvfs.transfer.transfers import Transfers
from kvfs.vfs.volume import Volume

if TYPE_CHECKING:
    from outcome import Outcome

LARGE_BLOCKS: Final = (256 << 20) // 512
"""From this many blocks on, giving them back takes some 4 ms on ext4: longer than the event loop
may be blocked."""


class Registrations(Protocol):
    """The data files that the kernel reads and writes itself."""

    def may_pass(self, file: OpenFile) -> bool:
        """Returns whether the kernel may read and write an open file's data file itself."""

    def closed(self, file: OpenFile) -> None:
        """Notes that the file's last handle was released."""

    def renamed(self, file: OpenFile) -> None:
        """Notes that the data file of an open file may have another version since."""

    def cut(self, file: OpenFile, is_cut: bool) -> None:
        """Notes whether an open file was cut to nothing since it was published last."""


class OpenTable:
    """The open files of one mount. Used from the event loop."""

    def __init__(
        self,
        volume: Volume,
        transfers: Transfers,
        shares: OpenFileShares,
        registrations: Registrations,
        kernels: list[KernelInodes],
    ) -> None:
        self._volume = volume
        self._transfers = transfers
        self._shares = shares
        self._registrations = registrations
        self.kernels = kernels
        """The inodes of all connections to the kernel, the mount's first; empty where each inode is
        one to the kernel for good."""
        self.files: dict[int, OpenFile] = {}
        self.formers: dict[int, list[OpenFile]] = {}
        """By inode, former contents that programs have open."""
        self.idle: OrderedDict[int, OpenFile] = OrderedDict()
        """Data files that are kept open without a handle, the least recently used first."""

    def has_content(self, ino: int, version: int) -> bool:
        """Returns whether the data file of this version is open, or an open file may need it."""
        opened = [*self.formers.get(ino, ())]
        if ino in self.files:
            opened.append(self.files[ino])
        return any(file.version == version or file.users for file in opened)

    def removed(self, ino: int, last: Inode) -> None:
        """Notes that other nodes removed the file, and dropped its record, which was this."""
        file = self.files.get(ino)
        for each in [*self.formers.get(ino, ()), *([] if file is None else [file])]:
            each.is_removed = True
            if not each.is_partial:
                each.record = last

    def revive(self, ino: int, owner: int | None) -> OpenFile:
        """Puts a file back that was kept open. Raises TooManyOpenFiles."""
        if owner is not None:
            self._shares.take(owner)
        file = self.files[ino] = self.idle.pop(ino)
        file.owner = owner
        self._volume.index.touch(ino)
        return file

    def let_go(self, ino: int) -> None:
        """Closes the data file if it is kept open without a handle: it is to go, or its record
        changed."""
        file = self.idle.pop(ino, None)
        if file is not None:
            self._close(file)

    def let_all_go(self) -> None:
        """Closes all that are kept open without a handle."""
        for ino in list(self.idle):
            self.let_go(ino)

    def close_unused(self, file: OpenFile, st: os.stat_result | None = None) -> None:
        """Closes a file without a handle, unless it was only read. That one stays open for a while:
        a file that is read once is read again, and its next open takes half as long. `st`: its data
        file, looked at just now; None: it was not."""
        if file.handles or file.users:
            return
        self._drop(file)
        outdated = self._transfers.outdated.has(file.ino)
        if file.writable or file.incoming is not None or outdated or file.is_former:
            self._close(file, st)
            return
        self.idle[file.ino] = file
        if len(self.idle) > self._shares.idle_most:
            self._close(self.idle.popitem(last=False)[1])

    def discard(self, file: OpenFile) -> None:
        """Closes a file without a handle or user, even one that was only read."""
        self._drop(file)
        self._close(file)

    async def in_use(self, file: OpenFile, work: Callable[[OpenFile], Awaitable[None]]) -> None:
        """Does work that others have to wait for; the file stays open meanwhile."""
        await detach.aside()
        file.users += 1
        try:
            await work(file)
        except BaseException:
            file.users -= 1
            self.close_unused(file)
            raise
        file.users -= 1

    def end_former(self, file: OpenFile) -> None:
        """Forgets a former content: it is closed, or the file's open file again."""
        formers = self.formers[file.ino]
        formers.remove(file)
        if not formers:
            del self.formers[file.ino]

    def _drop(self, file: OpenFile) -> None:
        if self.files.get(file.ino) is file:
            del self.files[file.ino]
        elif file.is_former:
            self.end_former(file)
        else:
            return
        if file.owner is not None:
            self._shares.give(file.owner)
            file.owner = None

    def _close(self, file: OpenFile, st: os.stat_result | None = None) -> None:
        self._registrations.closed(file)
        for each in self.kernels:
            each.closed(file)
        if self._transfers.is_shared:
            self._transfers.outdated.closed(file.ino)
        if file.is_draft:
            self._volume.files.drop_draft(file.ino, file.version)
        blocks = (st or os.fstat(file.fd)).st_blocks
        if blocks > LARGE_BLOCKS:  # the last close of an unlinked file gives its blocks back
            trio.lowlevel.start_thread_soon(partial(os.close, file.fd), _closed)
        else:
            os.close(file.fd)


def is_large(fd: int) -> bool:
    """Returns whether giving back the file's blocks takes longer than the event loop may be
    blocked."""
    return os.fstat(fd).st_blocks > LARGE_BLOCKS


def _closed(_: "Outcome[None]") -> None:
    """Ignores the outcome: nobody waits for a close."""
