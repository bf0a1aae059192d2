"""Open files of the mount, and the moment when what was written through them is published.

One `OpenFile` per inode, shared by all its handles: while a kernel inode is open its data file, and
whether it is read and written by passthrough, are fixed. Publishing happens at FLUSH of a writable
handle whose file has changed (its error reaches close), at fsync, and at RELEASE where no FLUSH
came."""

import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from kvfs.errors import Corrupt, IsADirectory, KvfsError, Stale
from kvfs.meta.interface import Transaction
from kvfs.meta.records import Flag, Inode
from kvfs.namespace import inodes, lifecycle, tree
from kvfs.volume import Volume

if TYPE_CHECKING:
    from outcome import Outcome

log = logging.getLogger(__name__)
_IDLE_FILES: Final = 512
LARGE_BLOCKS: Final = (256 << 20) // 512
"""From this many on, giving the blocks back takes some 4 ms on ext4: longer than the event loop may
be away."""
_BAD_HANDLE: Final = "no such open file: the daemon was restarted, or the handle was closed"


class OpenFile:
    """What all handles of one inode share."""

    __slots__ = (
        "armed",
        "atime_ns",
        "backing_id",
        "fd",
        "handles",
        "ino",
        "published",
        "set_ids",
        "version",
        "writable",
        "writers",
    )

    def __init__(self, ino: int, version: int, fd: int, writable: bool, mode: int) -> None:
        self.ino = ino
        self.version = version
        self.fd = fd
        self.writable = writable
        self.handles = 0
        self.writers = 0
        self.published: tuple[int, int, int] | None = None
        """(size, mtime, ctime) of the data file when it was last published; None: never, by this
        mount."""
        self.backing_id = 0
        """Of the kernel's registration; 0: none."""
        self.atime_ns = 0
        """As the record has it, or will soon."""
        self.set_ids = inodes.without_set_ids(mode) != mode
        """A write takes mode bits away, so the daemon must see each write: no passthrough."""
        self.armed: tuple[int, int, int] | None = None
        """Set-id bits came while the file was open for writing: the data file as it was then. Once
        it has changed, the bits go."""


class Handle:
    """One open of a file."""

    __slots__ = ("creating", "fh", "file", "flags", "writable")

    def __init__(self, fh: int, file: OpenFile, flags: int, writable: bool) -> None:
        self.fh = fh
        self.file = file
        self.flags = flags
        self.writable = writable
        self.creating = False
        """Whether it made the file."""


class OpenFiles:
    """The table of open files and handles of one mount. Used from the event loop."""

    def __init__(self, volume: Volume, boot: int, on_closed: Callable[[OpenFile], None]) -> None:
        self._volume = volume
        self._boot = boot
        self._on_closed = on_closed
        self._files: dict[int, OpenFile] = {}
        self._handles: dict[int, Handle] = {}
        self._idle: OrderedDict[int, OpenFile] = OrderedDict()
        self._next = 1
        volume.holders.let_go = self.let_go

    def get(self, ino: int) -> OpenFile | None:
        """The open file of this inode, if any handle is open."""
        return self._files.get(ino)

    def handle(self, fh: int) -> Handle:
        """Raises Stale for a number that was never given out or is released."""
        try:
            return self._handles[fh]
        except KeyError:
            raise Stale(_BAD_HANDLE) from None

    def __len__(self) -> int:
        return len(self._handles)

    async def open(self, ino: int, flags: int) -> Handle:
        """Open a regular file. O_TRUNC cuts it to nothing.

        Raises Stale (removed, or a cache file whose data have gone: a miss), Corrupt (a durable one
        whose data have gone), OSError.
        """
        writable = flags & os.O_ACCMODE != os.O_RDONLY or bool(flags & os.O_TRUNC)
        file = self._files.get(ino) or self._revive(ino)
        if file is None:
            file = await self._open_file(ino, writable, flags & os.O_NOATIME)
        try:
            if writable and file.writers == 0:
                await self.begin_writing(file)
            if flags & os.O_TRUNC:
                await self.cut(file, 0)
        except BaseException:
            self._close_unused(file)
            raise
        return self._add(file, flags, writable)

    async def cut(self, file: OpenFile, size: int) -> None:
        """Set the data file's size; in a thread where giving back the blocks takes long."""
        if _is_large(file.fd):
            await trio.to_thread.run_sync(os.ftruncate, file.fd, size)
        else:
            os.ftruncate(file.fd, size)

    def created(self, ino: int, inode: Inode, fd: int, flags: int) -> Handle:
        """The first handle of a file just made, whose data file is open at `fd`."""
        file = OpenFile(ino, 0, fd, True, inode.mode)
        self._files[ino] = file
        handle = self._add(file, flags, flags & os.O_ACCMODE != os.O_RDONLY)
        handle.creating = True
        return handle

    def _revive(self, ino: int) -> OpenFile | None:
        file = self._idle.pop(ino, None)
        if file is not None:
            self._files[ino] = file
            self._volume.index.touch(ino)
        return file

    def let_go(self, ino: int) -> None:
        """Close the data file if it is kept open without a handle: it is to go, or its record
        changed."""
        file = self._idle.pop(ino, None)
        if file is not None:
            self._close(file)

    def _add(self, file: OpenFile, flags: int, writable: bool) -> Handle:
        handle = Handle(self._next, file, flags, writable)
        self._next += 1
        self._handles[handle.fh] = handle
        file.handles += 1
        holders = self._volume.holders
        holders.opened(file.ino)
        if writable:
            file.writers += 1
            holders.writing(file.ino, file.fd)
        return handle

    async def _open_file(self, ino: int, writable: bool, noatime: int) -> OpenFile:
        volume = self._volume
        inode: Inode = await volume.engine.read(lambda t: tree.read_inode(t, ino))
        if inode.mode & 0o170000 != 0o100000:
            raise IsADirectory(f"inode {ino:x} is not a regular file")
        try:
            access = os.O_RDWR if writable else os.O_RDONLY
            fd = volume.files.open(ino, inode.version, access | noatime)
        except FileNotFoundError:
            await self._lost(ino, inode)
            raise
        file = OpenFile(ino, inode.version, fd, writable, inode.mode)
        file.atime_ns = inode.atime_ns
        if inode.flags & Flag.PUBLISHED:
            file.published = _signature(os.fstat(fd))
        self._files[ino] = file
        volume.index.touch(ino)
        return file

    async def _lost(self, ino: int, inode: Inode) -> None:
        """A record without its data file: evicted a moment ago, or lost; a miss in a cache
        namespace, an error in a durable one."""
        name = os.fsdecode(inode.name)
        if not inode.nlink:
            raise Stale(f"{name}: evicted or removed")  # the kernel looks the name up again
        if await self._volume.discard_lost(ino):
            raise Stale(f"{name}: its data have gone; it is forgotten")
        raise Corrupt(f"{name}: its data file is missing; run 'kvfs fsck'")

    async def begin_writing(self, file: OpenFile) -> None:
        """From here on the data file may change: the record says so before the first byte does."""
        volume = self._volume
        if not file.writable:
            fd = volume.files.open(file.ino, file.version, os.O_RDWR)
            os.dup2(fd, file.fd, inheritable=False)  # a worker may be reading from that number
            os.close(fd)
            file.writable = True
        if file.published is not None:
            await volume.engine.transact(lambda t: lifecycle.reopen(t, file.ino))

    async def publish(self, file: OpenFile, *, synced: bool = False) -> None:
        """Record size, times and blocks if the data file changed since they were last recorded.

        Raises NoSpace, ReadOnly, Corrupt; OSError of fstat.
        """
        if file.armed:
            await self.disarm(file)
        st = os.fstat(file.fd)
        signature = _signature(st)
        if signature == file.published and not synced:
            return
        boot = 0 if synced else self._boot

        def fn(t: Transaction) -> None:
            lifecycle.publish(
                t,
                file.ino,
                size=st.st_size,
                blocks=st.st_blocks,
                mtime_ns=st.st_mtime_ns,
                ctime_ns=st.st_ctime_ns,
                boot=boot,
            )

        await self._volume.engine.transact(fn)
        file.published = signature
        self._volume.on_published(file.ino, file.version)

    def mode_changed(self, ino: int, mode: int) -> None:
        """A chmod of a file that may be open: by passthrough no WRITE is seen that must take set-id
        bits away, so that from here on the data file is watched."""
        self.let_go(ino)
        file = self._files.get(ino)
        if file is not None and file.writers:
            watch = inodes.without_set_ids(mode) != mode
            file.armed = _signature(os.fstat(file.fd)) if watch else None

    async def disarm(self, file: OpenFile) -> bool:
        """Take the set-id bits away if the data file changed since they came; whether it did."""
        if file.armed is None or _signature(os.fstat(file.fd)) == file.armed:
            return False
        file.armed = None

        def fn(t: Transaction) -> None:
            inode = tree.read_inode(t, file.ino)
            inode.mode = inodes.without_set_ids(inode.mode)
            inodes.write_inode(t, file.ino, inode)

        await self._volume.engine.transact(fn)
        return True

    async def sync(self, file: OpenFile, *, datasync: bool) -> None:
        """What was written and recorded survives power loss when this returns."""
        fd = os.dup(file.fd)
        try:
            await trio.to_thread.run_sync(os.fdatasync if datasync else os.fsync, fd)
        finally:
            os.close(fd)
        if file.writable:
            await self.publish(file, synced=True)
        await self._volume.engine.sync()

    async def release(self, fh: int) -> int:
        """Close a handle; the inode, when it was the last one, else 0."""
        handle = self._handles.pop(fh, None)
        if handle is None:
            raise Stale(_BAD_HANDLE)
        file = handle.file
        holders = self._volume.holders
        file.handles -= 1
        holders.released(file.ino)
        try:
            if handle.writable:
                file.writers -= 1
                if file.writers == 0:
                    holders.not_writing(file.ino)
                    await self.publish(file)
        finally:
            if file.handles == 0:
                self._note_atime(file)
                self._close_unused(file)
        return 0 if file.handles else file.ino

    def _note_atime(self, file: OpenFile) -> None:
        """Reads by passthrough are not seen here, but they set the data file's access time."""
        atime_ns = os.fstat(file.fd).st_atime_ns
        if atime_ns != file.atime_ns:
            self._volume.atimes[file.ino] = file.atime_ns = atime_ns

    def _close_unused(self, file: OpenFile) -> None:
        """Without a handle, a file that was only read stays open for a while: what is read once is
        read again, and its next open is half as long. Others are closed."""
        if file.handles:
            return
        self._files.pop(file.ino, None)
        if file.writable:
            self._close(file)
            return
        self._idle[file.ino] = file
        if len(self._idle) > _IDLE_FILES:
            self._close(self._idle.popitem(last=False)[1])

    def _close(self, file: OpenFile) -> None:
        self._on_closed(file)
        if _is_large(file.fd):  # the last close of an unlinked file gives its blocks back
            trio.lowlevel.start_thread_soon(partial(os.close, file.fd), _closed)
        else:
            os.close(file.fd)

    async def release_all(self) -> None:
        """The mount has gone: close every handle, publishing what was written."""
        for fh, handle in list(self._handles.items()):
            try:
                await self.release(fh)
            except (KvfsError, OSError) as error:
                log.error("inode %x: its last changes are not recorded: %s", handle.file.ino, error)
        for ino in list(self._idle):
            self.let_go(ino)


def _signature(st: os.stat_result) -> tuple[int, int, int]:
    return st.st_size, st.st_mtime_ns, st.st_ctime_ns


def _is_large(fd: int) -> bool:
    return os.fstat(fd).st_blocks > LARGE_BLOCKS


def _closed(_: "Outcome[None]") -> None:
    """Nobody waits for a close."""
