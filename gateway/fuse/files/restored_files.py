"""Open files of a mount that outlives its daemon, whose handles stand in the mount's journal.

A handle's number, flags and data file are those of before. What only the daemon knew is taken at
its worst: a file open for writing counts as changed and not recorded, so its next close records
it; in a cluster unless its data file is as its record says."""

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence

from gateway.fuse.channel.journaled_registry import JournaledRegistry
from gateway.fuse.files.content_renewal import KernelMemory
from gateway.fuse.files.kernel_inodes import KernelInodes
from gateway.fuse.files.open_file import Handle, OpenFile, signature_of
from gateway.fuse.files.open_files import OpenFiles
from kvfs.base.errors import KvfsError, TooManyOpenFiles
from kvfs.meta.records import Flag, Inode
from kvfs.node import Node
from kvfs.node.survivors import SurvivingFile, SurvivingHandle, Survivors
from kvfs.tree import inodes

log = logging.getLogger(__name__)


class JournaledOpenFiles(OpenFiles):
    """The open files of such a mount."""

    def __init__(
        self,
        node: Node,
        registry: JournaledRegistry,
        memory: KernelMemory,
        kernels: Sequence[KernelInodes],
        first: int,
    ) -> None:
        """`first`: all handles come after this number."""
        super().__init__(node, registry, memory, kernels)
        self._registry = registry
        self._next = first + 1
        self._lapses = node.volume.lapses
        self._is_unbroken = node.cluster is None or node.cluster.member.is_unbroken
        registry.number_of = kernels[0].number_of

    async def release(self, fh: int) -> int:
        """Removes the handle from the journal, too."""
        try:
            return await super().release(fh)
        finally:
            self._registry.handle_released(fh)

    def release_now(self, fh: int, *, only_read: bool) -> bool:
        """Removes the handle from the journal, too."""
        is_done = super().release_now(fh, only_read=only_read)
        if is_done:
            self._registry.handle_released(fh)
        return is_done

    async def restore(
        self, survivors: Survivors, backings: Mapping[int, int]
    ) -> tuple[list[Handle], list[int]]:
        """Takes over the files of a mount that outlived its daemon, which are counted as open
        already. `backings`: ids of their registrations, by number of the kernel's inode. Returns
        their handles, with those that views have, and the journal's entries of those that no mount
        can have any more."""
        inos = [each.ino for each in survivors.files]
        records = await self._volume.engine.read(lambda t: inodes.read_inodes(t, inos))
        newest: dict[int, int] = {}
        for each in survivors.files:
            newest[each.ino] = max(newest.get(each.ino, 0), each.version)
        contents: dict[int, OpenFile] = {}
        restored: list[Handle] = []
        lost: list[int] = []
        for found, record in zip(survivors.files, records, strict=True):
            is_former = newest[found.ino] != found.version
            file = await self._file(found, record, is_former=is_former)
            if file is None or record is None:
                lost.extend(each.entry for each in found.handles)
                for _ in found.handles:
                    self._volume.holders.released(found.ino)
                continue
            own = {each.number for each in found.handles if not each.view}
            file.backing_id = next((backings[number] for number in own if number in backings), 0)
            contents |= dict.fromkeys(own, file)
            restored += self._taken(file, found.handles, record)
            if not record.nlink:
                self.orphans.held[found.ino] = record.version
        self.kernels[0].go_on(contents)
        formers = {handle.file for handle in restored if handle.file.is_former}
        await self._transfers.outdated.drop([(file.ino, file.version) for file in formers])
        return restored, lost

    async def _file(
        self, found: SurvivingFile, record: Inode | None, *, is_former: bool
    ) -> OpenFile | None:
        """Returns an open file; None: nobody can say whose it is, or its data are nowhere any more.
        Its programs may read and write on by passthrough."""
        ino, version, fd, writable = found.ino, found.version, found.take(), found.writable
        if record is None or fd < 0:
            if fd >= 0:
                os.close(fd)
                self._volume.holders.not_writing(ino)
            if record is None or is_former or record.version != version:
                log.warning("inode %x was open, and its content cannot be opened again", ino)
                return None
            try:
                return await self._opener.open(
                    ino, os.O_RDWR if writable else os.O_RDONLY, writable
                )
            except (KvfsError, OSError) as error:
                log.warning("inode %x was open, and cannot be opened again: %s", ino, error)
                return None
        file = OpenFile(ino, version, fd, writable, record)
        file.is_former, file.is_draft = is_former, found.is_draft
        if is_former:
            self._table.formers.setdefault(ino, []).append(file)
        else:
            self._files[ino] = file
        return file

    def _taken(self, file: OpenFile, handles: list[SurvivingHandle], record: Inode) -> list[Handle]:
        """Gives an open file its handles, oldest first."""
        owner = _owner_of(handles)
        with contextlib.suppress(TooManyOpenFiles):
            if owner is not None:
                self.shares.take(owner)
                file.owner = owner
        if self._lapses is not None:
            file.lapses = self._lapses() if self._is_unbroken else -1
        made = _restored(file, handles, record, is_shared=self._transfers.is_shared)
        for handle, each in zip(made, handles, strict=True):
            self._handles[handle.fh] = handle
            self._registry.handle_restored(handle, each.entry)
            if self._appends is not None and self.is_leased(file.ino, handle.flags):
                self._appends.made(file.ino)
                handle.appends = file.is_appended = True
        return made


def _restored(
    file: OpenFile, handles: list[SurvivingHandle], record: Inode, *, is_shared: bool
) -> list[Handle]:
    file.atime_ns = record.atime_ns
    file.is_new = not record.flags & Flag.PUBLISHED
    file.is_mappable = not record.flags & Flag.SEALED
    file.replaces = any(each.is_cut for each in handles)
    made = []
    for each in handles:
        handle = Handle(each.fh, file, each.flags, each.writable)
        handle.number = each.number
        file.handles += 1
        file.viewed += each.view > 0
        if each.writable:
            file.writers += 1
            file.overwriters += handle.overwrites
        made.append(handle)
    st = os.fstat(file.fd)
    is_recorded = (record.size, record.mtime_ns) == (st.st_size, st.st_mtime_ns)
    if is_shared and not file.is_new and record.version == file.version and is_recorded:
        # Else others' later content would refuse a close by which nothing was written.
        file.published = signature_of(st)
    file.rewritten = file.overwriters > 0
    if file.set_ids and file.writers:
        # As recorded: a write since then clears the bits.
        file.armed = record.size, record.mtime_ns, record.ctime_ns
    return made


def _owner_of(handles: list[SurvivingHandle]) -> int | None:
    """Returns the user among whose open files it counts."""
    return next((each.owner for each in handles if each.owner is not None), None)
