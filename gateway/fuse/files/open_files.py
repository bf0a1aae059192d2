"""Open files of the mount: the table of them, how a file is opened, and when it is closed.

All handles of an inode share one `OpenFile`: while a kernel inode is open, its data file is fixed,
and so is whether it is read and written by passthrough. `publish` publishes what was written.
Content that others have published since is opened beside it, as another inode of the kernel
(`kernel_inodes`): the former content stays with the programs that have it open. Where that is
impossible, the new content is copied into the data file that is open (`content_renewal`).

With an engine on another host these methods wait for it, and other requests of the same file come
in between. A task in the middle of something with an `OpenFile` counts among its `users`: the last
of its handles and users closes it.
"""

import contextlib
import logging
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from gateway.fuse.files.content_renewal import Renewing
from gateway.fuse.files.kernel_inodes import InodeOpener, KernelInodes, Outdated
from gateway.fuse.files.open_file import Handle, OpenFile, signature_of, turn
from gateway.fuse.files.publish import Publishing, differs, unsealed_here
from gateway.fuse.files.unrecorded_closes import Unrecorded
from kvfs.base import detach
from kvfs.base.descriptors import OpenFileShares
from kvfs.base.errors import Conflict, IsADirectory, KvfsError, Stale
from kvfs.datastore import file_lease, file_sync
from kvfs.datastore.kernel import writeback
from kvfs.meta.records import Flag, Inode
from kvfs.node.append_leases import AppendLeases
from kvfs.node.former_writers import FormerWriters
from kvfs.transfer.transfer import SMALL_BYTES, Transfer
from kvfs.transfer.transfers import Transfers
from kvfs.tree import inodes, tree
from kvfs.vfs.missing_data import Missing, is_torn
from kvfs.vfs.volume import Volume

if TYPE_CHECKING:
    from outcome import Outcome

log = logging.getLogger(__name__)
_ATTEMPTS: Final = 20
_PAUSE_S: Final = 0.1
"""Pause before a file that changed while it was fetched is looked at again."""
LARGE_BLOCKS: Final = (256 << 20) // 512
"""From this many blocks on, giving them back takes some 4 ms on ext4: longer than the event loop
may be blocked."""
_FORMER: Final = "other nodes have replaced what is open: look its name up again"
_BAD_HANDLE: Final = "no such open file: the daemon was restarted, or the handle was closed"


def _nothing(_: int) -> None:
    """Stands in where the kernel was told nothing that it believes for long."""


class OpenFiles:
    """The table of open files and handles of one mount. Used from the event loop."""

    def __init__(
        self,
        volume: Volume,
        transfers: Transfers,
        missing: Missing,
        boot: int,
        shares: OpenFileShares,
        on_closed: Callable[[OpenFile], None],
    ) -> None:
        self._volume = volume
        self._transfers = transfers
        self._missing = missing
        self.shares = shares
        self._on_closed = on_closed
        self.publishing = Publishing(volume, transfers, boot)
        self.renewing = Renewing(volume, transfers)
        self.unrecorded = Unrecorded(self.publishing.publish, self._close_unused)
        self._files: dict[int, OpenFile] = {}
        self._formers: dict[int, list[OpenFile]] = {}
        """By inode, former contents that programs have open."""
        self._handles: dict[int, Handle] = {}
        self._idle: OrderedDict[int, OpenFile] = OrderedDict()
        self._making: dict[int, list[trio.Event]] = {}
        """By inode, events of the tasks that wait for its data file; it may have its record
        already."""
        self._next = 1
        self.kernels: list[KernelInodes] = []
        """The inodes of all connections to the kernel, the mount's first; empty where each inode is
        one to the kernel for good."""
        self.replaced: set[int] = set()
        """Inodes whose content others replaced and of which the kernel may keep pages."""
        self.forget_attributes: Callable[[int], None] = _nothing
        """Makes the kernel ask again for attributes that it was to believe for long."""
        self.forget_content: Callable[[int], None] = _nothing
        """Makes the kernel forget, soon, a file's content and attributes."""
        self.appends: AppendLeases | None = None
        """The append leases of a cluster."""
        self.former_writers: FormerWriters | None = None
        """Former writers of the store: files that they write are not opened."""
        self.may_pass: Callable[[OpenFile], bool] = lambda _file: False
        """Returns whether the kernel reads and writes an open file's data file itself."""
        volume.holders.let_go = self.let_go
        volume.holders.is_changed = self.is_changed
        volume.holders.has_content = self.has_content

    def get(self, ino: int) -> OpenFile | None:
        """Returns the open file of this inode, if any handle is open."""
        return self._files.get(ino)

    def has_content(self, ino: int, version: int) -> bool:
        """Returns whether the data file of this version is open, or an open file may need it."""
        opened = [*self._formers.get(ino, ())]
        if ino in self._files:
            opened.append(self._files[ino])
        return any(file.version == version or file.users for file in opened)

    def is_changed(self, ino: int) -> bool:
        """Returns whether published content of a file may be overwritten by now: others must wait
        until the file is closed, or until the failed record of its last close is made up for."""
        if self.former_writers is not None and ino in self.former_writers:
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
        if self.former_writers is not None and ino in self.former_writers:
            await self.former_writers.parted(ino)
        former = None if opener is None else opener.former()
        if former is not None and opener is not None:
            await self._rejoin(former, opener, writable)
        file = self._files.get(ino) if former is None else former
        if file is None and ino in self._idle:
            file = self._revive(ino, owner)
        elif file is not None and file.owner is None and owner is not None:
            self.shares.take(owner)
            file.owner = owner
        if file is not None and ino in self.unrecorded and not file.writers:
            file = await self._recorded(file)
        if file is not None and file is not former and self._transfers.is_shared:
            file = await self._renewed(file, opener)
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
                raise Stale(_FORMER)
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
                self._close_unused(file)

    def is_plain(self, ino: int) -> bool:
        """Returns whether an open of the file for reading waits for nothing, on a lone node: the
        file is not being made, and no write to it is still to be recorded or copied."""
        former = self.former_writers
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
            if ino not in self._idle:
                return None
            file = self._revive(ino, owner)
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
            file = self._open_whole(ino, inode, flags)
        finally:
            if file is None:
                self.shares.give(owner)
        if file is None:
            return None
        file.owner = owner
        return self._add(file, flags, False)

    def _open_whole(self, ino: int, inode: Inode, flags: int) -> OpenFile | None:
        try:
            fd = self._volume.files.open(ino, inode.version, os.O_RDONLY | flags & os.O_NOATIME)
        except FileNotFoundError:
            return None
        stat = os.fstat(fd)
        if is_torn(inode, stat):
            os.close(fd)
            return None
        return self._opened(ino, inode, fd, stat, False)

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
        if self.appends is None or not flags & os.O_APPEND:
            return False
        is_writable = flags & os.O_ACCMODE != os.O_RDONLY or bool(flags & os.O_TRUNC)
        return is_writable and self.appends.is_strict(ino)

    async def open_to_append(
        self, ino: int, flags: int, owner: int | None, thread: int, opener: InodeOpener | None
    ) -> Handle:
        """Like `open`, for a thread of this host, once this node has the file's append lease. Where
        the daemon writes, the kernel decides where the file ends: after others have appended it has
        to look that up, which it does after ESTALE. Raises Busy, Stale, and what `open` raises."""
        appends = self.appends
        assert appends is not None
        await appends.take(ino)
        try:
            handle = await self.open(ino, flags, owner, opener)
        except BaseException:
            appends.give_back(ino)
            raise
        if not appends.knows_end(ino, thread) and not self.may_pass(handle.file):
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
        file.replaces = file.replaces or not size
        if size == 0 and file_sync.is_lost(file.fd):
            await detach.aside()
            await trio.to_thread.run_sync(file_sync.truncate, file.fd, size)
        elif _is_large(file.fd):
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
        if self.appends is not None and self.is_leased(ino, flags):
            self.appends.made(ino)
            handle.appends = file.is_appended = True
        return handle

    def _revive(self, ino: int, owner: int | None) -> OpenFile:
        if owner is not None:
            self.shares.take(owner)
        file = self._files[ino] = self._idle.pop(ino)
        file.owner = owner
        self._volume.index.touch(ino)
        return file

    def let_go(self, ino: int) -> None:
        """Closes the data file if it is kept open without a handle: it is to go, or its record
        changed."""
        file = self._idle.pop(ino, None)
        if file is not None:
            self._close(file)

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
            return await self._open_file(ino, flags, writable)
        self.shares.take(owner)
        file = None
        try:
            file = await self._open_file(ino, flags, writable)
        finally:
            if file is None or file.owner is not None:  # somebody else opened it meanwhile
                self.shares.give(owner)
            else:
                file.owner = owner
        return file

    async def _open_file(self, ino: int, flags: int, writable: bool) -> OpenFile:
        volume = self._volume
        access = os.O_RDWR if writable else os.O_RDONLY
        for _ in range(_ATTEMPTS):
            inode: Inode = await volume.engine.read(lambda t: tree.read_inode(t, ino))
            if inode.mode & 0o170000 != 0o100000:
                raise IsADirectory(f"inode {ino:x} is not a regular file")
            try:
                fd = volume.files.open(ino, inode.version, access | flags & os.O_NOATIME)
            except FileNotFoundError:
                file = await self._bring(ino, inode, flags, writable)
                if file is not None:
                    return file
                continue  # its data are here by now, or its record is another
            stat = os.fstat(fd)
            if is_torn(inode, stat) and not flags & os.O_TRUNC:
                os.close(fd)
                if not inode.nlink:
                    await self._lost(ino, inode)
                await detach.aside()
                await self._missing.settle(ino)
                continue
            file = self._opened(ino, inode, fd, stat, writable)
            if self._transfers.is_shared and differs(inode, stat):
                await self._publish_left(file)
            return file
        raise Conflict(f"{os.fsdecode(inode.name)}: it is written on other nodes all the time")

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
        self._files[ino] = file
        return file

    async def _publish_left(self, file: OpenFile) -> None:
        """Records what the last close could not; nobody gets the file before. Raises what
        `Publishing.publish` raises."""
        if await self._volume.engine.read(lambda t: unsealed_here(t, file.ino)) is None:
            return
        file.published, file.rewritten = None, True
        file.users += 1
        try:
            await self.publishing.publish(file)
        except BaseException:
            file.users -= 1
            if not file.handles and not file.users:
                self._drop(file)
                self._close(file)
            raise
        file.users -= 1

    # ---- what is not here

    async def _bring(self, ino: int, inode: Inode, flags: int, writable: bool) -> OpenFile | None:
        """Fetches a data file that is not here. Returns the file if it can be opened meanwhile, or
        another task opened it; None: look again."""
        if not self._transfers.is_possible or not inode.nlink:
            await self._lost(ino, inode)
        if flags & os.O_TRUNC and self._transfers.is_shared:
            return self._begin_anew(ino, inode)
        await detach.aside()
        incoming = self._transfers.begin(ino, inode)
        try:
            if writable or flags & os.O_NOATIME:
                await incoming.whole()
            elif inode.size <= SMALL_BYTES:
                return self._open_whole_transfer(ino, inode, await incoming.opened())
            else:
                await incoming.begun()
        except Conflict:  # it was written elsewhere meanwhile
            await trio.sleep(_PAUSE_S)
        file = self._files.get(ino)
        if file is not None or incoming.is_whole or writable:
            return file
        return self._open_incoming(ino, incoming, inode)

    def _open_whole_transfer(self, ino: int, inode: Inode, fd: int) -> OpenFile:
        """Opens a file by the descriptor that its transfer gave."""
        file = self._files.get(ino)
        if file is not None:
            os.close(fd)
            return file
        return self._opened(ino, inode, fd, os.fstat(fd), False)

    async def _bring_on(self, file: OpenFile) -> None:
        """Fetches the missing bytes of an open file. If the rest of that content is gone, it comes
        from whichever node has the file by now, and programs that had it open read on. Raises what
        `open` raises."""
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

    async def _recorded(self, file: OpenFile) -> OpenFile | None:
        """Returns the open file, recorded; None if it is to be opened anew, as others see it.
        Raises NoSpace, Unavailable."""
        with contextlib.suppress(Stale):
            await self._in_use(file, self.unrecorded.record)
        return self._files.get(file.ino)

    def part(self, ino: int, version: int) -> None:
        """Makes look-ups of a file whose record has this version lead to no former content."""
        file = self._files.get(ino)
        if file is None or file.version >= version or not file.handles:
            return
        if not file.writers and not file.is_draft:
            self._part(file)

    def _part(self, file: OpenFile) -> bool:
        """Leaves a former content to the programs that have it open. Returns False if it has to be
        renewed instead."""
        able = (each.can_part(file) for each in self.kernels)
        if not self.kernels or file.ino in self.unrecorded or not all(able):
            return False
        for each in self.kernels:
            each.part(file)
        del self._files[file.ino]
        self._formers.setdefault(file.ino, []).append(file)
        file.is_former = True
        return True

    def _end_former(self, file: OpenFile) -> None:
        formers = self._formers[file.ino]
        formers.remove(file)
        if not formers:
            del self._formers[file.ino]

    async def _rejoin(self, former: OpenFile, opener: InodeOpener, writable: bool) -> None:
        """Gives the newest content to a program that opens an inode of a former content by a
        descriptor. Raises Stale if the name is to be looked up."""
        is_beside = former.ino in self._files
        outdated = opener.outdated()
        if outdated is Outdated.TAKE and not writable:
            return
        if outdated is not Outdated.RENEW or (is_beside and writable):
            raise Stale(_FORMER)
        if not is_beside:
            self.let_go(former.ino)
            for each in self.kernels:
                each.rejoin(former)
            self._end_former(former)
            former.is_former = False
            self._files[former.ino] = former
        await self._in_use(former, self.renewing.renew)

    async def _renewed(self, file: OpenFile, opener: InodeOpener | None) -> OpenFile | None:
        """Returns the open file with the content that other nodes have published since; None if it
        is to be opened anew. Raises Stale if its name is to be looked up."""
        ino = file.ino
        inode = await self._volume.engine.read(lambda t: tree.read_inode(t, ino))
        if inode.version <= file.version or file.writers or file.is_draft:
            if file.is_partial:
                await self._in_use(file, self._bring_on)
            if file.is_remembered:
                await self._in_use(file, self.renewing.forgotten)
            return file
        if not file.handles and not file.users:
            self._drop(file)
            self._close(file)
            return None
        if opener is None or not opener.holds(file):
            if self._part(file):
                return None
        elif self.kernels and (outdated := opener.outdated()) is not Outdated.RENEW:
            if outdated is Outdated.LOOK_UP:
                raise Stale(_FORMER)
            return file
        await self._in_use(file, self.renewing.renew)
        return file

    async def _in_use(self, file: OpenFile, work: Callable[[OpenFile], Awaitable[None]]) -> None:
        """Does work that others have to wait for; the file stays open meanwhile."""
        await detach.aside()
        file.users += 1
        try:
            await work(file)
        except BaseException:
            file.users -= 1
            self._close_unused(file)
            raise
        file.users -= 1

    async def _lost(self, ino: int, inode: Inode) -> None:
        """A record whose data nobody has. What is forgotten is Stale: the kernel looks the name up
        again."""
        lost = await self._volume.give_up(ino, inode)
        raise Stale(f"{lost.error}; it is forgotten") if lost.forgets else lost.error

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
            if handle.appends and self.appends is not None:
                self.appends.give_back(file.ino)
            if not file.handles and not file.users:
                self._note_atime(file)
                self._close_unused(file)
        return 0 if file.handles or file.users else file.ino

    def release_now(self, fh: int, *, only_read: bool) -> bool:
        """Like `release`, on a lone node, of a handle with which nothing was written that is not
        recorded, or nothing could be; False: it is another one, or there is none."""
        handle = self._handles.get(fh)
        if handle is None:
            return False
        file = handle.file
        if handle.writable:
            if only_read or file.armed or file.publishing is not None or file.refused:
                return False
            if handle.appends or signature_of(os.fstat(file.fd)) != file.published:
                return False
            self._end_writer(handle)
        del self._handles[fh]
        file.handles -= 1
        self._volume.holders.released(file.ino)
        if not file.handles and not file.users:
            self._note_atime(file)
            self._close_unused(file)
        return True

    def _end_writer(self, handle: Handle) -> None:
        """Nothing is written with the handle any more; what was is recorded."""
        file = handle.file
        file.overwriters -= handle.overwrites
        file.rewritten = file.overwriters > 0
        file.writers -= 1
        if file.writers == 0:
            self._volume.holders.not_writing(file.ino)

    def _note_atime(self, file: OpenFile) -> None:
        """Records the access time of the data file: reads by passthrough are not seen here, but
        they set it."""
        if file.is_former or (file.incoming is not None and file.is_partial):
            return
        atime_ns = os.fstat(file.fd).st_atime_ns
        if atime_ns != file.atime_ns:
            self._volume.atimes[file.ino] = file.atime_ns = atime_ns

    def _close_unused(self, file: OpenFile) -> None:
        """Closes a file without a handle, unless it was only read. That one stays open for a while:
        a file that is read once is read again, and its next open takes half as long."""
        if file.handles or file.users:
            return
        self._drop(file)
        outdated = self._transfers.outdated.has(file.ino)
        if file.writable or file.incoming is not None or outdated or file.is_former:
            self._close(file)
            return
        self._idle[file.ino] = file
        if len(self._idle) > self.shares.idle_most:
            self._close(self._idle.popitem(last=False)[1])

    def _drop(self, file: OpenFile) -> None:
        """Closes a file that nobody holds any more."""
        if self._files.get(file.ino) is file:
            del self._files[file.ino]
        elif file.is_former:
            self._end_former(file)
        else:
            return
        if file.owner is not None:
            self.shares.give(file.owner)
            file.owner = None

    def _close(self, file: OpenFile) -> None:
        self._on_closed(file)
        for each in self.kernels:
            each.closed(file)
        if self._transfers.is_shared:
            self._transfers.outdated.closed(file.ino)
        if file.is_draft:
            self._volume.files.drop_draft(file.ino, file.version)
        if _is_large(file.fd):  # the last close of an unlinked file gives its blocks back
            trio.lowlevel.start_thread_soon(partial(os.close, file.fd), _closed)
        else:
            os.close(file.fd)

    async def release_all(self) -> None:
        """Closes every handle and publishes what was written: the mount has gone."""
        for fh, handle in list(self._handles.items()):
            try:
                await self.release(fh)
            except (KvfsError, OSError) as error:
                log.error("inode %x: its last changes are not recorded: %s", handle.file.ino, error)
        await self.unrecorded.close()
        for ino in list(self._idle):
            self.let_go(ino)


def _is_large(fd: int) -> bool:
    return os.fstat(fd).st_blocks > LARGE_BLOCKS


def _closed(_: "Outcome[None]") -> None:
    """Ignores the outcome: nobody waits for a close."""
