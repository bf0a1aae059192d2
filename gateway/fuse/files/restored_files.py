"""Open files of a mount that outlives its daemon, whose handles stand in the mount's journal.

A handle's number, flags and data file are those of before. What only the daemon knew is taken at
its worst: a file open for writing counts as changed and not recorded, so its next close records
it."""

import contextlib
import os
from collections.abc import Mapping, Sequence

from gateway.fuse.channel.journaled_registry import JournaledRegistry
from gateway.fuse.files.content_renewal import KernelMemory
from gateway.fuse.files.kernel_inodes import KernelInodes
from gateway.fuse.files.open_file import Handle, OpenFile
from gateway.fuse.files.open_files import OpenFiles
from kvfs.base.errors import TooManyOpenFiles
from kvfs.meta.records import Flag, Inode
from kvfs.node import Node
from kvfs.node.survivors import SurvivingHandle, Survivors
from kvfs.tree import inodes


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

    async def restore(self, survivors: Survivors, backings: Mapping[int, int]) -> list[Handle]:
        """Takes over the files of a mount that outlived its daemon, which are counted as open
        already. `backings`: ids of their registrations, by inode. Returns their handles, with those
        that views have."""
        inos = list(survivors.by_file)
        records = await self._volume.engine.read(lambda t: inodes.read_inodes(t, inos))
        restored: list[Handle] = []
        for ino, record in zip(inos, records, strict=True):
            handles, fd = survivors.by_file[ino], survivors.descriptors.pop(ino)
            if record is None:  # nobody can say whose it is; its programs read and write on
                os.close(fd)
                survivors.lost.extend(each.entry for each in handles)
                for _ in handles:
                    self._volume.holders.released(ino)
                self._volume.holders.not_writing(ino)
                continue
            file, made = _restored(ino, handles, fd, record, backings.get(ino, 0))
            owner = _owner_of(handles)
            with contextlib.suppress(TooManyOpenFiles):
                if owner is not None:
                    self.shares.take(owner)
                    file.owner = owner
            self._files[ino] = file
            self._handles.update((each.fh, each) for each in made)
            for each in handles:
                self._registry.handle_restored(each.fh, each.entry)
            if not record.nlink:
                self.orphans.held[ino] = record.version
            restored += made
        return restored


def _restored(
    ino: int, handles: list[SurvivingHandle], fd: int, record: Inode, backing_id: int
) -> tuple[OpenFile, list[Handle]]:
    """Returns an open file and its handles, oldest first."""
    writable = any(each.writable for each in handles)
    file = OpenFile(ino, handles[0].version, fd, writable, record)
    file.atime_ns = record.atime_ns
    file.backing_id = backing_id
    file.is_new = not record.flags & Flag.PUBLISHED
    file.is_mappable = not record.flags & Flag.SEALED
    made = []
    for each in handles:
        handle = Handle(each.fh, file, each.flags, each.writable)
        file.handles += 1
        file.viewed += each.is_viewed
        if each.writable:
            file.writers += 1
            file.overwriters += handle.overwrites
        made.append(handle)
    file.rewritten = file.overwriters > 0
    if file.set_ids and file.writers:
        # As recorded: a write since then clears the bits.
        file.armed = record.size, record.mtime_ns, record.ctime_ns
    return file, made


def _owner_of(handles: list[SurvivingHandle]) -> int | None:
    """Returns the user among whose open files it counts."""
    return next((each.owner for each in handles if each.owner is not None), None)
