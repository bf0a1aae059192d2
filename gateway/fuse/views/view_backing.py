"""The backing files and handles of a view's kernel, which has its own numbers for them."""

import contextlib
from collections.abc import Iterable, Mapping

from gateway.fuse.channel import device as dev
from gateway.fuse.channel.backing_registry import BackingRegistry
from gateway.fuse.channel.journaled_registry import forget_unknown
from gateway.fuse.codec.protocol import Fopen, Init
from gateway.fuse.files.open_file import Handle, OpenFile


class _Opened:
    """The opens that the view's kernel has of one of its inodes."""

    __slots__ = ("backing_id", "handles")

    def __init__(self) -> None:
        self.handles = 0
        self.backing_id = 0


class ViewBacking(BackingRegistry):
    """Registers data files with a view's kernel, which has its own numbers for them."""

    def __init__(self, device: int, mount: BackingRegistry, replaced: set[int]) -> None:
        """`replaced`: inodes whose content others replaced; the mount will want to know."""
        super().__init__(device, mount.passthrough, mount.stack_depth, direct_writes=False)
        self.lock_flags = Init.POSIX_LOCKS
        self._mount = mount
        self._replaced = replaced
        self._opened: dict[int, _Opened] = {}
        """By the number of the kernel's inode."""
        self._numbers: dict[OpenFile, set[int]] = {}
        """The numbers of the inodes by which the kernel has a file open."""
        self._handles: dict[int, Handle] = {}

    def flags(self, handle: Handle) -> tuple[int, int]:
        """Returns (open flags, backing id) for a reply that opens this handle. The first handle of
        a kernel's inode decides for all of them."""
        file = handle.file
        if handle.replaced:
            self._replaced.add(file.ino)
        opened = self._add(handle)
        file.viewed += 1
        flags = 0 if handle.writable else Fopen.NOFLUSH
        if opened.handles == 1 and self.may_pass(file):
            with contextlib.suppress(OSError):  # it is relayed until its last handle closes
                opened.backing_id = dev.backing_open(self.device, file.fd)
                self._mount.view_registers(handle.number, opened.backing_id)
        self._mount.view_opens(handle)
        return _answer(flags, opened)

    def again(self, handle: Handle) -> tuple[int, int]:
        """Returns the same for a handle that an earlier daemon gave out."""
        return _answer(0 if handle.writable else Fopen.NOFLUSH, self._opened[handle.number])

    def go_on(self, handles: Iterable[Handle], ids: Mapping[int, int]) -> None:
        """Takes over the handles that the view's kernel has of an earlier daemon, and what that
        registered (`ids`, by number of the kernel's inode); the kernel forgets the rest."""
        for handle in handles:
            self._add(handle).backing_id = ids.get(handle.number, 0)
        for number, backing_id in ids.items():
            if number not in self._opened:
                self._withdraw(number, backing_id)
        forget_unknown(self.device, max(ids.values(), default=0))

    def _add(self, handle: Handle) -> _Opened:
        opened = self._opened.get(handle.number)
        if opened is None:
            opened = self._opened[handle.number] = _Opened()
            self._numbers.setdefault(handle.file, set()).add(handle.number)
        opened.handles += 1
        self._handles[handle.fh] = handle
        return opened

    def released(self, fh: int) -> None:
        """Notes that this handle is about to be released."""
        handle = self._handles.pop(fh, None)
        if handle is None:
            return
        file = handle.file
        file.viewed -= 1
        opened = self._opened[handle.number]
        opened.handles -= 1
        if not opened.handles:
            del self._opened[handle.number]
            numbers = self._numbers[file]
            numbers.discard(handle.number)
            if not numbers:
                del self._numbers[file]
            if opened.backing_id:
                self._withdraw(handle.number, opened.backing_id)

    def _withdraw(self, number: int, backing_id: int) -> None:
        with contextlib.suppress(OSError):
            dev.backing_close(self.device, backing_id)
        self._mount.view_withdraws(number, backing_id)

    def holds(self, file: OpenFile) -> bool:
        return file in self._numbers or file.users > 0

    def numbers(self) -> list[int]:
        """Returns the numbers of the kernel's inodes that are open."""
        return list(self._opened)

    def left(self) -> list[int]:
        """Returns the handles that were not released."""
        return list(self._handles)


def _answer(flags: int, opened: _Opened) -> tuple[int, int]:
    if opened.backing_id:
        return flags | Fopen.PASSTHROUGH, opened.backing_id
    return flags | Fopen.DIRECT_IO, 0
