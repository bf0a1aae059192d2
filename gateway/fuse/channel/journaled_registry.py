"""The registry of backing files of a mount that outlives its daemon: it enters in the mount's
journal what the kernel is about to have, and removes what it has no more; of the kernels of the
mount's views too."""

import contextlib
from collections.abc import Callable

from gateway.fuse.channel import device as dev
from gateway.fuse.channel.backing_registry import BackingRegistry
from gateway.fuse.files.open_file import Handle, OpenFile
from gateway.holder.mount_journal import NOBODY, VIEWED, JournaledFile, MountJournal
from kvfs.meta.asked_requests import asking
from kvfs.meta.records import namespace_of

_UNKNOWN: int = 4
"""So many ids after the last that is known may be registered and not entered: a kill between the
two."""


class JournaledRegistry(BackingRegistry):
    """Registers data files with the kernel, forgets them, and keeps the journal of both."""

    def __init__(
        self,
        device: int,
        passthrough: bool,
        stack_depth: int,
        direct_writes: bool,
        journal: MountJournal,
    ) -> None:
        super().__init__(device, passthrough, stack_depth, direct_writes)
        self._journal = self.journal = journal
        self.number_of: Callable[[OpenFile], int] = lambda file: file.ino
        """Returns the number of the kernel's inode by which a file is opened."""
        self._entries: dict[int, int] = {}
        """The journal's entry of each backing id."""
        self._handles: dict[int, tuple[int, OpenFile]] = {}
        """The journal's entry of each handle, by its number, and its file."""
        self._entries_of: dict[OpenFile, set[int]] = {}
        """The journal's entries of the handles of each open file."""
        self._views_entries: dict[tuple[int, int], int] = {}
        """The journal's entry of each backing file of a view, by namespace and id."""
        self._views_backings: dict[int, dict[int, int]] = {}
        """The registrations of an earlier daemon with views: by namespace, the ids by number of the
        kernel's inode."""

    def flags(self, handle: Handle) -> tuple[int, int]:
        """Enters the handle, too: it is about to be the kernel's."""
        before = handle.file.backing_id
        answer = super().flags(handle)
        file = handle.file
        number = self.number_of(file)
        if file.backing_id != before:
            self._entries[file.backing_id] = self._journal.registered(number, file.backing_id)
        self._open(handle, number)
        return answer

    def _open(self, handle: Handle, number: int) -> None:
        file = handle.file
        owner = NOBODY if file.owner is None else file.owner
        entry = self._journal.opened(
            JournaledFile(
                *(number, asking.get(), file.version, handle.flags),
                *(file.replaces, owner, handle.fh),
            )
        )
        if entry >= 0:
            self._enter(handle, entry)

    def view_opens(self, handle: Handle) -> None:
        """Enters a handle that is about to be a view's kernel's."""
        self._open(handle, handle.number)

    def view_registers(self, number: int, backing_id: int) -> None:
        """Enters a backing file of a view's kernel."""
        entry = self._journal.registered(number, backing_id | VIEWED)
        self._views_entries[namespace_of(number), backing_id] = entry

    def backings_of_view(self, namespace: int) -> dict[int, int]:
        """Returns the ids, by number of the kernel's inode, of what a view's kernel has of an
        earlier daemon."""
        return self._views_backings.get(namespace, {})

    def view_withdraws(self, number: int, backing_id: int) -> None:
        """Removes it."""
        entry = self._views_entries.pop((namespace_of(number), backing_id), -1)
        if entry >= 0:
            self._journal.withdrawn(entry)

    def _enter(self, handle: Handle, entry: int) -> None:
        self._handles[handle.fh] = entry, handle.file
        self._entries_of.setdefault(handle.file, set()).add(entry)

    def renamed(self, file: OpenFile) -> None:
        """Enters the version that the data file of an open file has now."""
        for entry in self._entries_of.get(file, ()):
            self._journal.renamed(entry, file.version)

    def cut(self, file: OpenFile, is_cut: bool) -> None:
        """Enters whether an open file was cut to nothing since it was published last."""
        for entry in self._entries_of.get(file, ()):
            self._journal.cut(entry, is_cut)

    def again(self, handle: Handle) -> tuple[int, int]:
        """Returns what `flags` did for a handle that the kernel has already."""
        return super().flags(handle)

    def closed(self, file: OpenFile) -> None:
        """Removes its registration from the journal, too."""
        entry = self._entries.pop(file.backing_id, -1)
        super().closed(file)
        if entry >= 0:
            self._journal.withdrawn(entry)

    def handle_restored(self, handle: Handle, entry: int) -> None:
        """Notes the journal's entry of a handle that the kernel has of an earlier daemon."""
        self._enter(handle, entry)

    def handle_released(self, fh: int) -> None:
        """Removes a handle that is the kernel's no more."""
        entry, file = self._handles.pop(fh, (-1, None))
        if entry < 0 or file is None:
            return
        entries = self._entries_of[file]
        entries.discard(entry)
        if not entries:
            del self._entries_of[file]
        self._journal.released(entry)

    def go_on(self, kept: set[int]) -> dict[int, int]:
        """Takes over what an earlier daemon registered, of the kernel's inodes `kept`; the kernel
        forgets the rest. Returns the ids by the inode's number. Those of views are left to
        these."""
        ids: dict[int, int] = {}
        last = 0
        for entry, number, backing_id in list(self._journal.backings()):
            if backing_id & VIEWED:
                of_view = self._views_backings.setdefault(namespace_of(number), {})
                of_view[number] = backing_id & ~VIEWED
                self._views_entries[namespace_of(number), backing_id & ~VIEWED] = entry
                continue
            last = max(last, backing_id)
            if number in kept and number not in ids:
                ids[number] = backing_id
                self._entries[backing_id] = entry
            else:
                self._forget(backing_id)
                self._journal.withdrawn(entry)
        forget_unknown(self.device, last)
        return ids

    def _forget(self, backing_id: int) -> None:
        with contextlib.suppress(OSError):
            dev.backing_close(self.device, backing_id)


def forget_unknown(device: int, last: int) -> None:
    """Makes a kernel forget what a daemon may have registered after this id, and not entered."""
    for unknown in range(last + 1, last + 1 + _UNKNOWN):
        with contextlib.suppress(OSError):
            dev.backing_close(device, unknown)
