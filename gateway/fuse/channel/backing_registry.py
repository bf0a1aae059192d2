"""The registry of data files that the kernel reads and writes by itself (FUSE passthrough), and the
flags of the replies that open a file."""

import os

from gateway.fuse.channel import device as dev
from gateway.fuse.codec.protocol import Fopen
from gateway.fuse.files.open_file import Handle, OpenFile
from gateway.holder.mount_journal import MountJournal


class BackingRegistry:
    """Registers data files with the kernel and forgets them."""

    journal: MountJournal | None = None
    """The journal of a mount that outlives its daemon; None: it ends with it."""

    def __init__(
        self, device: int, passthrough: bool, stack_depth: int, direct_writes: bool
    ) -> None:
        self.device = device
        self.passthrough = passthrough
        self.stack_depth = stack_depth if passthrough else 0
        self._direct_writes = direct_writes
        self.direct_reads = False
        """Whether files that are still being fetched are read past the mount's page cache: their
        bytes go to the reader as they arrive and need no second set of pages."""
        self.lock_flags = 0
        """Flags of INIT for locks that the mount keeps in place of the kernel: the mount is then
        told of every close."""

    @property
    def direct_writes(self) -> bool:
        """Whether a file that is created only to be written is written past the mount's page
        cache."""
        return self._direct_writes and not self.passthrough

    def flags(self, handle: Handle) -> tuple[int, int]:
        """Returns (open flags, backing id) for a reply that opens this handle."""
        file = handle.file
        flags = 0 if handle.writable or self.lock_flags else Fopen.NOFLUSH
        is_first = file.handles - file.viewed == 1
        if self.passthrough and is_first and not file.backing_id and self.may_pass(file):
            try:
                file.backing_id = dev.backing_open(self.device, file.fd)
            except OSError:
                file.backing_id = 0  # this file is relayed until its last handle closes
        if file.backing_id:
            return flags | Fopen.PASSTHROUGH, file.backing_id
        if handle.creating and self.direct_writes and _is_write_only(handle.flags):
            return flags | Fopen.DIRECT_IO, 0
        if file.incoming is not None and self.direct_reads and file.is_partial:
            flags |= Fopen.DIRECT_IO
        return flags if handle.replaced else flags | Fopen.KEEP_CACHE, 0

    def holds(self, file: OpenFile) -> bool:
        """Returns whether the kernel has the file open, or is about to."""
        return file.handles > file.viewed or file.users > 0

    def may_pass(self, file: OpenFile) -> bool:
        """Returns whether the kernel may read and write the file without asking: not while it is
        being fetched."""
        return self.passthrough and not file.set_ids and file.incoming is None

    def view_opens(self, handle: Handle) -> None:
        """Notes that a handle is about to be a view's kernel's."""

    def backings_of_view(self, _namespace: int) -> dict[int, int]:
        """Returns the ids, by number of the kernel's inode, of what a view's kernel has of an
        earlier daemon."""
        return {}

    def again(self, handle: Handle) -> tuple[int, int]:
        """Returns what `flags` did for a handle that the kernel has already."""
        return self.flags(handle)

    def view_registers(self, number: int, backing_id: int) -> None:
        """Notes that a view's kernel has a backing file."""

    def view_withdraws(self, number: int, backing_id: int) -> None:
        """Notes that it has it no more."""

    def renamed(self, file: OpenFile) -> None:
        """Does nothing: the kernel knows no version."""

    def cut(self, file: OpenFile, is_cut: bool) -> None:
        """Does nothing: the kernel knows it."""

    def closed(self, file: OpenFile) -> None:
        """Notes that the file's last handle was released."""
        if file.backing_id:
            try:  # a call less than by `suppress`
                dev.backing_close(self.device, file.backing_id)
            except OSError:  # after the mount the kernel has forgotten them all
                pass
            file.backing_id = 0


def _is_write_only(flags: int) -> bool:
    return flags & os.O_ACCMODE == os.O_WRONLY
