"""Open files of the mount and their handles: what an open, a create and a release do.

All handles of an inode share one `OpenFile`: while a kernel inode is open, its data file is fixed,
and so is whether it is read and written by passthrough.

| module | subject |
|---|---|
| `open_table` | the open files by inode, and when their data files are closed |
| `data_opener` | how a data file is opened, and what is done if its data are not here |
| `former_contents` | content that others have published since a file was opened |
| `publish` | what was written, recorded |

With an engine on another host these methods wait for it, and other requests of the same file come
in between.
"""

import contextlib
import logging
import os
from collections.abc import Sequence
from typing import Final

import trio

from gateway.fuse.files.content_renewal import KernelMemory, Renewing
from gateway.fuse.files.data_opener import DataOpener
from gateway.fuse.files.former_contents import FORMER, FormerContents
from gateway.fuse.files.kernel_inodes import InodeOpener, KernelInodes
from gateway.fuse.files.open_file import Handle, OpenFile, signature_of, turn
from gateway.fuse.files.open_table import OpenTable, Registrations, is_large
from gateway.fuse.files.orphans import Orphans
from gateway.fuse.files.publish import Publishing, differs, unsealed_here
from gateway.fuse.files.unrecorded_closes import Unrecorded
from kvfs.base import detach
from kvfs.base.errors import KvfsError, Stale
from kvfs.datastore import file_lease, file_sync
from kvfs.datastore.kernel import writeback
from kvfs.meta.records import Inode
from kvfs.node import Node
from kvfs.tree import inodes

log = logging.getLogger(__name__)
_BAD_HANDLE: Final = "no such open file: the daemon was restarted, or the handle was closed"


class OpenFiles:
    """The table of open files and handles of one mount. Used from the event loop."""

    def __init__(
        self,
        node: Node,
        registrations: Registrations,
        memory: KernelMemory,
        kernels: Sequence[KernelInodes] = (),
    ) -> None:
        """`memory`: what the kernels remember of files. `kernels`: the inodes of the connections to
        the kernel, the mount's first; none where each inode is one to the kernel for good."""
        self._volume = volume = node.volume
        self._transfers = transfers = node.transfers
        self._appends = node.appends
        self._former_writers = node.former_writers
        self._registrations = registrations
        self.shares: Final = node.open_file_shares
        self.forget_attributes: Final = memory.attributes
        self.forget_content: Final = memory.content_soon
        self.kernels: Final = list(kernels)
        """The inodes of all connections, which come and go with views."""
        self._table = table = OpenTable(volume, transfers, self.shares, registrations, self.kernels)
        self._files = table.files
        self.orphans: Final = Orphans(volume, table.let_go)
        self.publishing: Final = Publishing(
            *(volume, transfers, node.near, node.boot, node.is_strict, self.orphans.lost_place),
            self._renamed,
            registrations.cut,
        )
        self.get: Final = table.files.get
        """Returns the open file of an inode, if any handle is open."""
        self.let_go: Final = table.let_go
        self.has_content: Final = table.has_content
        self.removed: Final = table.removed
        self.unrecorded: Final = Unrecorded(self.publishing.publish, table.close_unused)
        self._opener = DataOpener(node, table, self.publishing)
        self._formers = FormerContents(
            volume.engine,
            table,
            Renewing(volume, node.port, memory, self._renamed),
            self.unrecorded,
            self._opener.fetch_rest,
        )
        self.part: Final = self._formers.part
        self._handles: dict[int, Handle] = {}
        self._making: dict[int, list[trio.Event]] = {}
        """By inode, events of the tasks that wait for its data file; it may have its record
        already."""
        self._next = 1
        self.replaced: Final[set[int]] = set()
        """Inodes whose content others replaced and of which the kernel may keep pages."""

    def is_changed(self, ino: int) -> bool:
        """Returns whether published content of a file may be overwritten by now: others must wait
        until the file is closed, or until the failed record of its last close is made up for."""
        if self._former_writers is not None and ino in self._former_writers:
            return True
        file = self._files.get(ino)
        if file is not None and (file.writers or not file.is_mappable):
            return file.is_changed
        inode = detach.finish(self._volume.engine.read(lambda t: unsealed_here(t, ino)))
        if inode is None:
            return False
        try:
            fd = self._volume.files.open_unseen(ino, inode.version)
        except FileNotFoundError:
            return False
        except BlockingIOError:  # looked at by the sealer or the evictor: for a moment
            return True
        try:
            # A store through a mapping that comes after this look is to be seen by the next one.
            fixed = file_lease.is_quiet(fd) is not False or writeback.clean_now(fd)
            return not fixed or differs(inode, os.fstat(fd))
        finally:
            os.close(fd)

    def handle(self, fh: int) -> Handle:
        """Raises Stale for a number that was never given out or is released."""
        try:
            return self._handles[fh]
        except KeyError:
            raise Stale(_BAD_HANDLE) from None

    def __len__(self) -> int:
        return len(self._handles)

    async def open(
        self, ino: int, flags: int, owner: int | None, opener: InodeOpener | None = None
    ) -> Handle:
        """Opens a regular file. O_TRUNC truncates it to nothing. Missing data are fetched first;
        those of a large file that is only read arrive while it is read. `owner`: the user among
        whose open files it counts; None: the node opens it for a moment. `opener`: the kernel's
        inode that is opened; None: the one that has the newest content.

        Raises Stale (removed, or a cache file whose data have gone: a miss; or that inode has a
        former content open and is to be looked up again), NotFound (a miss that other nodes may
        have had), Corrupt (a durable file whose data have gone), Busy (it is being written on
        another node), TooManyOpenFiles, Unavailable, NoSpace, OSError.
        """
        writable = flags & os.O_ACCMODE != os.O_RDONLY or bool(flags & os.O_TRUNC)
        while (waiting := self._making.get(ino)) is not None:
            await turn(waiting)
        if self._former_writers is not None and ino in self._former_writers:
            await self._former_writers.parted(ino)
        former = None if opener is None else opener.former()
        if former is not None and opener is not None:
            await self._formers.rejoin(former, opener, writable=writable)
        file = self._files.get(ino) if former is None else former
        if file is None and ino in self._table.idle:
            file = self._table.revive(ino, owner)
        elif file is not None and file.owner is None and owner is not None:
            self.shares.take(owner)
            file.owner = owner
        if file is not None and ino in self.unrecorded and not file.writers:
            file = await self._recorded(file)
        if file is not None and file is not former and self._transfers.is_shared:
            file = await self._formers.renewed(file, opener)
        if file is None:
            file = await self._open_counted(ino, flags, writable, owner)
        file.users += 1
        is_shared = self._transfers.is_shared
        if is_shared:  # else its data file may go when others replace its content meanwhile
            self._volume.holders.opened(ino)
        try:
            if writable and file.writers == 0:
                # Before its seal is taken away: one that another node puts on it later is heard of.
                self._volume.holders.writing(ino, file.fd)
                await self.publishing.begin_writing(file)
                if file.set_ids:
                    self._begin_taking(file)
            if writable and file.is_former:
                raise Stale(FORMER)
            if opener is not None and opener.opens(file):
                self.replaced.add(ino)
            if flags & os.O_TRUNC:
                await self.cut(file, 0)
            return self._add(file, flags, writable)
        finally:
            file.users -= 1
            if not file.writers:
                self._volume.holders.not_writing(ino)
            if is_shared:
                self._volume.holders.released(ino)
            if not file.handles:
                self._table.close_unused(file)

    def is_plain(self, ino: int) -> bool:
        """Returns whether an open of the file for reading waits for nothing, on a lone node: the
        file is not being made, and no write to it is still to be recorded or copied."""
        former = self._former_writers
        return not (
            ino in self._making
            or ino in self.unrecorded.files
            or (former is not None and ino in former.left)
        )

    def open_kept(self, ino: int, flags: int, owner: int) -> Handle | None:
        """Like `open`, for a plain file that is only read and whose data file is open here; None if
        it is not. Raises TooManyOpenFiles."""
        file = self._files.get(ino)
        if file is None:
            if ino not in self._table.idle:
                return None
            file = self._table.revive(ino, owner)
        elif file.owner is None:
            self.shares.take(owner)
            file.owner = owner
        return self._add(file, flags, False)

    def open_first(self, ino: int, inode: Inode, flags: int, owner: int) -> Handle | None:
        """Like `open`, for a plain file that is only read and not open, by its record; None if its
        data file is missing or differs from the record. Raises TooManyOpenFiles, OSError."""
        if inode.mode & 0o170000 != 0o100000:
            return None
        self.shares.take(owner)
        file = None
        try:
            file = self._opener.open_whole(ino, inode, flags)
        finally:
            if file is None:
                self.shares.give(owner)
        if file is None:
            return None
        file.owner = owner
        return self._add(file, flags, False)

    def open_descriptor(
        self, ino: int, inode: Inode, fd: int, flags: int, owner: int | None
    ) -> Handle:
        """Like `open`, of a file that is only read, by a descriptor of its data file, which it
        takes, and its record, which may have gone. Raises TooManyOpenFiles."""
        file = self._files.get(ino)
        try:
            if owner is not None and (file is None or file.owner is None):
                self.shares.take(owner)
        except BaseException:
            os.close(fd)
            raise
        if file is None:
            try:
                file = self._opener.by_descriptor(ino, inode, fd)
            except BaseException:
                if owner is not None:
                    self.shares.give(owner)
                raise
            file.owner = owner
        else:
            os.close(fd)
            file.owner = owner if file.owner is None else file.owner
        return self._add(file, flags, False)

    def number(self, ino: int) -> int:
        """Returns the number by which the mount's kernel knows the file."""
        return self.kernels[0].number(ino) if self.kernels else ino

    def forget(self, ino: int) -> None:
        """Notes that no kernel knows the inode any more."""
        self.replaced.discard(ino)
        for each in self.kernels:
            each.forget(ino)

    def is_leased(self, ino: int, flags: int) -> bool:
        """Returns whether an open with these flags appends to a file to which other nodes may
        append too."""
        if self._appends is None or not flags & os.O_APPEND:
            return False
        is_writable = flags & os.O_ACCMODE != os.O_RDONLY or bool(flags & os.O_TRUNC)
        return is_writable and self._appends.is_strict(ino)

    async def open_to_append(
        self, ino: int, flags: int, owner: int | None, thread: int, opener: InodeOpener | None
    ) -> Handle:
        """Like `open`, for a thread of this host, once this node has the file's append lease. Where
        the daemon writes, the kernel decides where the file ends: after others have appended it has
        to look that up, which it does after ESTALE. Raises Busy, Stale, and what `open` raises."""
        appends = self._appends
        assert appends is not None
        await appends.take(ino)
        try:
            handle = await self.open(ino, flags, owner, opener)
        except BaseException:
            appends.give_back(ino)
            raise
        if not appends.knows_end(ino, thread) and not self._registrations.may_pass(handle.file):
            appends.give_back_later(ino, thread)
            await self.release(handle.fh)
            raise Stale("other nodes have appended to the file: look it up again")
        handle.appends = handle.file.is_appended = True
        return handle

    def begin_making(self, ino: int, owner: int) -> None:
        """Begins to make an inode's record and then its data file: until `end_making` its openers
        wait. `owner`: the user among whose open files it counts. Raises TooManyOpenFiles."""
        self.shares.take(owner)
        self._making[ino] = []

    def end_making(self, ino: int, owner: int) -> None:
        """Notes that the inode has a data file, or will have none."""
        if ino not in self._files:
            self.shares.give(owner)
        for each in self._making.pop(ino, ()):
            each.set()

    async def cut(self, file: OpenFile, size: int) -> None:
        """Sets the data file's size. Runs in a thread where giving back the blocks takes long, or
        an earlier sync of the file failed: a file that is cut to nothing is rid of that failure."""
        file.rewritten = True
        if not size and not file.replaces:
            file.replaces = True
            self._registrations.cut(file, True)
        if size == 0 and file_sync.is_lost(file.fd):
            await detach.aside()
            await trio.to_thread.run_sync(file_sync.truncate, file.fd, size)
        elif is_large(file.fd):
            await trio.to_thread.run_sync(os.ftruncate, file.fd, size)
        else:
            os.ftruncate(file.fd, size)

    def created(self, ino: int, inode: Inode, fd: int, flags: int, owner: int) -> Handle:
        """Returns the first handle of a file just made, whose data file is open at `fd`."""
        file = OpenFile(ino, 0, fd, True, inode)
        file.is_new, file.owner = True, owner
        file.replaces = bool(flags & os.O_TRUNC)
        if self._volume.lapses is not None:
            file.lapses = self._volume.lapses()
        self._files[ino] = file
        handle = self._add(file, flags, flags & os.O_ACCMODE != os.O_RDONLY)
        handle.creating = True
        if self._appends is not None and self.is_leased(ino, flags):
            self._appends.made(ino)
            handle.appends = file.is_appended = True
        return handle

    def _renamed(self, file: OpenFile) -> None:
        """Notes that an open file's data file has another version."""
        self._registrations.renamed(file)
        self.orphans.renamed(file.ino, file.version)

    def _add(self, file: OpenFile, flags: int, writable: bool) -> Handle:
        handle = Handle(self._next, file, flags, writable)
        self._next += 1
        if self.replaced and file.ino in self.replaced:
            # The kernel is told so already, but may not have heard it: the look-up that led here
            # may have said the size of before.
            self.forget_attributes(file.ino)
            self.replaced.remove(file.ino)
            handle.replaced = True
        self._handles[handle.fh] = handle
        file.handles += 1
        self._volume.holders.opened(file.ino)
        if writable:
            self._add_writer(handle)
        return handle

    def _add_writer(self, handle: Handle) -> None:
        file = handle.file
        file.writers += 1
        self._volume.holders.writing(file.ino, file.fd)
        if handle.overwrites:
            file.overwriters += 1
            file.rewritten = True
        if handle.maps:
            file.is_mappable = True

    async def _open_counted(
        self, ino: int, flags: int, writable: bool, owner: int | None
    ) -> OpenFile:
        """Opens the data file, which counts as the owner's from the beginning: fetching its data
        takes descriptors too."""
        if owner is None:
            return await self._opener.open(ino, flags, writable)
        self.shares.take(owner)
        file = None
        try:
            file = await self._opener.open(ino, flags, writable)
        finally:
            if file is None or file.owner is not None:  # somebody else opened it meanwhile
                self.shares.give(owner)
            else:
                file.owner = owner
        return file

    async def _recorded(self, file: OpenFile) -> OpenFile | None:
        """Returns the open file, recorded; None if it is to be opened anew, as others see it.
        Raises NoSpace, Unavailable."""
        with contextlib.suppress(Stale):
            await self._table.in_use(file, self.unrecorded.record)
        return self._files.get(file.ino)

    def mode_changed(self, ino: int, mode: int) -> None:
        """Notes a chmod of a file that may be open. Not every write of a program that has it open
        is seen, so from here on the data file is watched for the write that clears set-id bits."""
        self.let_go(ino)
        file = self._files.get(ino)
        if file is not None:
            file.set_ids = inodes.without_set_ids(mode) != mode
            watch = file.set_ids and file.writers
            file.armed = signature_of(os.fstat(file.fd)) if watch else None

    def _begin_taking(self, file: OpenFile) -> None:
        """Has writes from here on clear the file's set-id bits."""
        self.forget_attributes(file.ino)
        if file.backing_id:  # of somebody who had it open before it had them
            file.armed = signature_of(os.fstat(file.fd))

    async def release(self, fh: int) -> int:
        """Closes a handle. Returns the inode if it was its last handle, else 0. Cancelled: what was
        written is recorded later (`Unrecorded`)."""
        handle = self._handles.pop(fh, None)
        if handle is None:
            raise Stale(_BAD_HANDLE)
        file = handle.file
        holders = self._volume.holders
        file.handles -= 1
        file.users += 1
        holders.released(file.ino)
        if handle.overwrites:
            file.overwriters -= 1
        try:
            if handle.writable:
                file.writers -= 1
                if file.writers == 0:
                    holders.not_writing(file.ino)
                if file.writers == 0 or handle.maps:  # which may have stored after its last FLUSH
                    await self.publishing.publish(file)
        except KvfsError as error:
            if file.writers == 0:
                self.unrecorded.add(file, error)
            raise
        except trio.Cancelled:  # a view goes, or the mount
            if file.writers == 0:
                self.unrecorded.keep(file)
            raise
        finally:
            file.users -= 1
            if handle.appends and self._appends is not None:
                self._appends.give_back(file.ino)
            if not file.handles and not file.users:
                self._note_atime(file)
                self._table.close_unused(file)
            elif file.handles and file.backing_id and file.handles == file.viewed:
                # The mount's kernel may know the next content by the same number.
                self._registrations.closed(file)
        return 0 if file.handles or file.users else file.ino

    def release_now(self, fh: int, *, only_read: bool) -> bool:
        """Like `release`, at once, of a handle with which nothing was written that is not
        recorded, or nothing could be; False: it is another one, or there is none."""
        handle = self._handles.get(fh)
        if handle is None:
            return False
        file, st = handle.file, None
        if handle.writable:
            if only_read or file.armed or file.publishing is not None or file.refused:
                return False
            if handle.appends or signature_of(st := os.fstat(file.fd)) != file.published:
                return False
            self._end_writer(handle)
        del self._handles[fh]
        file.handles -= 1
        self._volume.holders.released(file.ino)
        if not file.handles and not file.users:
            self._note_atime(file, st)
            self._table.close_unused(file, st)
        return True

    def _end_writer(self, handle: Handle) -> None:
        """Nothing is written with the handle any more; what was is recorded."""
        file = handle.file
        file.overwriters -= handle.overwrites
        file.rewritten = file.overwriters > 0
        file.writers -= 1
        if file.writers == 0:
            self._volume.holders.not_writing(file.ino)

    def _note_atime(self, file: OpenFile, st: os.stat_result | None = None) -> None:
        """Records the access time of the data file: reads by passthrough are not seen here, but
        they set it. `st`: the data file, looked at just now; None: it was not."""
        if file.is_former or (file.incoming is not None and file.is_partial):
            return
        atime_ns = (st or os.fstat(file.fd)).st_atime_ns
        if atime_ns != file.atime_ns:
            self._volume.atimes[file.ino] = file.atime_ns = atime_ns

    async def release_all(self) -> None:
        """Closes every handle and publishes what was written: the mount has gone."""
        for fh, handle in list(self._handles.items()):
            try:
                await self.release(fh)
            except (KvfsError, OSError) as error:
                log.error("inode %x: its last changes are not recorded: %s", handle.file.ino, error)
        await self.unrecorded.close()
        self._table.let_all_go()
