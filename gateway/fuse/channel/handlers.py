"""Translates a request's bytes into an operation, and its result into a reply's bytes: one short
method per opcode.

`inline` handlers run where the engine reads at once, and continue as tasks where they must wait
(`kvfs.base.detach`); `waiting` handlers always run as tasks.
"""

import errno
import os
import stat
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

from gateway.fuse.codec import protocol
from gateway.fuse.codec.caller import Caller
from gateway.fuse.codec.protocol import Fattr, Fopen, Op
from gateway.fuse.codec.set_attributes import NO_ATTRIBUTES, Attributes
from gateway.fuse.files.kernel_inodes import OTHER, InodeOpener, KernelInodes, ino_of
from gateway.fuse.files.open_file import Handle, OpenFile
from gateway.fuse.names.directory_streams import ListingEntry
from gateway.fuse.notify.sibling_kernels import Neighbour
from gateway.fuse.operations import Operations
from kvfs.base import detach
from kvfs.base.errors import KvfsError, NotFound
from kvfs.cluster.cluster_locks import LockTarget
from kvfs.meta.records import ROOT_INODE, Inode, namespace_of
from kvfs.tree.changes import Change

_SECOND: Final = 1_000_000_000
_LEAST_DIRENT: Final = 32
_NO_RANGE: Final = errno.ERANGE
MAY_WAIT: Final = frozenset({Op.CREATE, Op.OPEN, Op.SETATTR})
"""Inline requests for which `Handlers.may_wait` is asked."""
Handler = Callable[["KernelRequest"], Coroutine[Any, Any, bytes]]


class Registrar(Protocol):
    """Gives an opened handle its flags and its backing id."""

    def flags(self, handle: Handle) -> tuple[int, int]:
        """Returns (open flags, backing id)."""

    def holds(self, file: OpenFile) -> bool:
        """Returns whether the kernel has the file open, or is about to."""


class LookupCounts(Protocol):
    """Counts the inode numbers that the kernel is given: see `kvfs.vfs.inode_holders.Holders`."""

    def looked_up(self, ino: int, count: int = 1) -> None:
        """Notes that the kernel was given this inode number in `count` replies."""


class Listings(Protocol):
    """Listings of directories: see `directory_streams.DirectoryStreams`."""

    async def read(self, at: int, offset: int, limit: int) -> list[ListingEntry]:
        """Returns a page of a listing. `at`: the result of `Handlers._listed`."""


class KernelRequest:
    """One request. `nodeid` is the file's own number, `number` that of the kernel's inode of it.
    `body` is a view of a buffer that is reused once the handler has returned or has become a
    task."""

    __slots__ = ("body", "gid", "nodeid", "number", "opcode", "pid", "uid", "unique")

    def __init__(
        self, opcode: int, unique: int, number: int, uid: int, gid: int, pid: int, body: memoryview
    ) -> None:
        self.opcode = opcode
        self.unique = unique
        self.nodeid = self.number = number
        if number & OTHER:
            self.nodeid = ino_of(number)
        self.uid = uid
        self.gid = gid
        self.pid = pid
        self.body = body

    def detach(self) -> None:
        """Makes the request own its body (names and numbers, never payload) from here on."""
        self.body = memoryview(bytes(self.body))

    def name(self, at: int = 0) -> bytes:
        """Returns the NUL-terminated name from `at` to the end."""
        return bytes(self.body[at:-1])

    def names(self, at: int = 0) -> tuple[bytes, bytes]:
        """Returns two NUL-terminated names."""
        first, second, _ = bytes(self.body[at:]).split(b"\0", 2)
        return first, second

    @property
    def caller(self) -> Caller:
        """The user and process that ask."""
        return Caller(self.uid, self.gid, self.pid)


class Handlers:
    """The opcode tables of one mount."""

    keeps_new = False
    """Whether a new file is acknowledged before its first close, and stays after a kill."""

    def __init__(
        self,
        operations: Operations,
        backing: Registrar,
        root: int = ROOT_INODE,
        inodes: KernelInodes | None = None,
    ) -> None:
        """`root`: the inode that the kernel knows as the root. `inodes`: those of its connection;
        None: the mount's."""
        self._ops = operations
        self.root = root
        self._holders: LookupCounts = operations.holders
        self._backing = backing
        self._coherence = operations.coherence
        self.inodes = operations.open_files.kernels[0] if inodes is None else inodes
        self._listings: Listings = operations.directories
        self.beside: Neighbour | None = None
        """Tells the node's other connections of changes made through this one."""
        self.inline: dict[int, Handler] = {
            Op.LOOKUP: self.lookup,
            Op.GETATTR: self.getattr,
            Op.SETATTR: self.setattr,
            Op.READLINK: self.readlink,
            Op.SYMLINK: self.symlink,
            Op.MKDIR: self.mkdir,
            Op.UNLINK: self.unlink,
            Op.RMDIR: self.rmdir,
            Op.RENAME: self.rename,
            Op.RENAME2: self.rename2,
            Op.LINK: self.link,
            Op.OPEN: self.open,
            Op.CREATE: self.create,
            Op.TMPFILE: self.tmpfile,
            Op.FLUSH: self.flush,
            Op.RELEASE: self.release,
            Op.GETXATTR: self.getxattr,
            Op.LISTXATTR: self.listxattr,
            Op.SETXATTR: self.setxattr,
            Op.REMOVEXATTR: self.removexattr,
            Op.OPENDIR: self.opendir,
            Op.READDIR: self.readdir,
            Op.READDIRPLUS: self.readdirplus,
            Op.RELEASEDIR: self.releasedir,
            Op.LSEEK: self.lseek,
            Op.STATFS: self.statfs,
            Op.STATX: self.statx,
        }
        self.waiting: dict[int, Handler] = {
            Op.MKNOD: self.mknod,
            Op.FSYNC: self.fsync,
            Op.FSYNCDIR: self.fsyncdir,
            Op.FALLOCATE: self.fallocate,
            Op.COPY_FILE_RANGE: self.copy_file_range,
        }

    def may_wait(self, opcode: int, request: KernelRequest) -> bool:
        """Returns whether this inline request has to run as a task from its beginning, since it
        waits for a thread or for space."""
        if opcode == Op.CREATE:
            return self._ops.node.evictor.must_wait(namespace_of(request.nodeid))
        if opcode == Op.OPEN:
            flags, _ = protocol.OPEN_IN.unpack_from(request.body)
            return bool(flags & os.O_TRUNC) and self._is_large(request.nodeid)
        if opcode == Op.SETATTR:
            valid = protocol.SETATTR_IN.unpack_from(request.body)[0]
            return bool(valid & Fattr.SIZE) and self._is_large(request.nodeid)
        return False

    def _is_large(self, ino: int) -> bool:
        try:
            return detach.finish(self._ops.attributes.is_large(ino)) is not False
        except KvfsError:  # the handler will say so
            return False

    def node(self, number: int) -> int:
        """Returns the inode that the kernel means by this number in a request's body."""
        if number & OTHER:
            return ino_of(number)
        return self.root if number == ROOT_INODE else number

    def _opener(self, r: KernelRequest) -> InodeOpener | None:
        """Returns None if nobody replaces the content of open files."""
        return None if self._coherence is None else InodeOpener(self.inodes, r.number, r.pid)

    def entry(self, ino: int, inode: Inode) -> bytes:
        """Returns an entry, which the kernel counts as a look-up."""
        self._holders.looked_up(ino)
        return self._shown(ino, inode)

    def _shown(self, ino: int, inode: Inode) -> bytes:
        coherence = self._coherence
        if coherence is None:
            return protocol.entry(ino, inode)
        body = protocol.entry_for(ino, inode, coherence.entry_s(ino), coherence.attributes_s(ino))
        return self._numbered(ino, inode, body)

    def _numbered(self, ino: int, inode: Inode, body: bytes) -> bytes:
        """Returns an entry with the number of the inode to which look-ups lead."""
        self._ops.open_files.part(ino, inode.version)
        number = self.inodes.number(ino)
        if number == ino:
            return body
        self.inodes.looked_up(number)
        return number.to_bytes(8, "little") + body[8:]

    def _attributes(self, ino: int, inode: Inode) -> bytes:
        coherence = self._coherence
        if coherence is None:
            return protocol.attr_reply(ino, inode)
        return protocol.attr_reply_for(ino, inode, coherence.attributes_s(ino))

    def _attributes_s(self, _inode: Inode) -> float:
        """Returns for how many seconds at most the kernel may believe attributes: see
        `protocol.attr_seconds`."""
        coherence = self._coherence
        return protocol.LONG_S if coherence is None else coherence.rest_s(0)

    def opened(self, handle: Handle, *, is_written: bool = True) -> bytes:
        """Returns the reply that opens a handle. `is_written`: False: nothing is ever written by
        it, so its closes ask nothing of the mount."""
        flags, backing = self._backing.flags(handle)
        if not is_written:
            flags |= Fopen.NOFLUSH
        return protocol.OPEN_OUT.pack(handle.fh, flags, backing)

    def _told(self, parent: int, name: bytes, ino: int = 0) -> None:
        """Tells that a caller has changed what this name stands for (`ino`: whose last link it may
        have been), or the inode alone (no name, parent 0)."""
        if (
            ino and self._coherence is not None and not self.inodes.is_one(ino)
        ):  # its kernel knows of one of them
            self._ops.open_files.forget_attributes(ino)
        beside = self.beside
        if beside is not None and beside.others:
            beside.tell(Change(parent, name, ino))

    def _tells_of(self, fh: int) -> bool:
        """Returns whether others are to be told of the end of this handle."""
        beside = self.beside
        if beside is None or not beside.others:
            return False
        return self._ops.open_files.handle(fh).writable

    def _told_of_data(self, ino: int) -> None:
        """Tells that a caller's writes are published. Others have no pages of them: they were read
        past the page cache."""
        self._told(0, b"", ino)

    # ---- names

    async def lookup(self, r: KernelRequest) -> bytes:
        try:
            ino, inode = await self._ops.lookup(r.nodeid, bytes(r.body[:-1]), r.pid)
        except NotFound:
            if self._coherence is None:
                return protocol.NO_ENTRY
            return protocol.absence(self._coherence.absence_s(r.nodeid))
        if self._coherence is not None and bytes(r.body) == b".\0":
            return self._same_entry(r, ino, inode)
        return self.entry(ino, inode)

    def _same_entry(self, r: KernelRequest, ino: int, inode: Inode) -> bytes:
        """Returns an entry for a file handle, which leads to the kernel's inode that it was made
        of."""
        body = self.entry(ino, inode)
        number = int.from_bytes(body[:8], "little")
        if number == r.number or ino_of(number) != ino:  # the latter is the root of a view
            return body
        if number != ino:
            self.inodes.forgotten(number, 1)
        if r.number != ino:
            self.inodes.looked_up(r.number)
        return r.number.to_bytes(8, "little") + body[8:]

    async def mkdir(self, r: KernelRequest) -> bytes:
        mode, _ = protocol.MKDIR_IN.unpack_from(r.body)
        name = r.name(protocol.MKDIR_IN.size)
        made = await self._ops.new_inodes.make_directory(r.nodeid, name, mode, r.caller)
        self._told(r.nodeid, name)
        return self.entry(*made)

    async def mknod(self, r: KernelRequest) -> bytes:
        mode, rdev, _, _ = protocol.MKNOD_IN.unpack_from(r.body)
        name = r.name(protocol.MKNOD_IN.size)
        made = await self._ops.make_node(r.nodeid, name, mode, rdev, r.caller)
        self._told(r.nodeid, name)
        return self.entry(*made)

    async def symlink(self, r: KernelRequest) -> bytes:
        name, target = r.names()
        made = await self._ops.new_inodes.make_symlink(r.nodeid, name, target, r.caller)
        self._told(r.nodeid, name)
        return self.entry(*made)

    async def readlink(self, r: KernelRequest) -> bytes:
        return await self._ops.readlink(r.nodeid)

    async def link(self, r: KernelRequest) -> bytes:
        ino = self.node(protocol.LINK_IN.unpack_from(r.body)[0])
        name = r.name(protocol.LINK_IN.size)
        inode = await self._ops.link(ino, r.nodeid, name)
        self._told(r.nodeid, name, ino)
        return self.entry(ino, inode)

    async def unlink(self, r: KernelRequest) -> bytes:
        name = r.name()
        self._told(r.nodeid, name, await self._ops.unlink(r.nodeid, name))
        return b""

    async def rmdir(self, r: KernelRequest) -> bytes:
        name = r.name()
        self._told(r.nodeid, name, await self._ops.rmdir(r.nodeid, name))
        return b""

    async def rename(self, r: KernelRequest) -> bytes:
        (target,) = protocol.RENAME_IN.unpack_from(r.body)
        old, new = r.names(protocol.RENAME_IN.size)
        await self._rename(r, old, target, new, 0)
        return b""

    async def rename2(self, r: KernelRequest) -> bytes:
        target, flags, _ = protocol.RENAME2_IN.unpack_from(r.body)
        old, new = r.names(protocol.RENAME2_IN.size)
        await self._rename(r, old, target, new, flags)
        return b""

    async def _rename(
        self, r: KernelRequest, old: bytes, target: int, new: bytes, flags: int
    ) -> None:
        target = self.node(target)
        replaced = await self._ops.rename(r.nodeid, old, target, new, flags, r.caller)
        self._told(r.nodeid, old)
        self._told(target, new, replaced)

    # ---- attributes

    async def getattr(self, r: KernelRequest) -> bytes:
        inode = await self._ops.attributes.getattr(r.nodeid, self._opener(r))
        return self._attributes(r.nodeid, inode)

    async def statx(self, r: KernelRequest) -> bytes:
        inode = await self._ops.attributes.getattr(r.nodeid, self._opener(r))
        return protocol.statx_reply(r.nodeid, inode, self._attributes_s(inode))

    async def setattr(self, r: KernelRequest) -> bytes:
        (valid, _, _, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, _, uid, gid, _) = (
            protocol.SETATTR_IN.unpack_from(r.body)
        )
        wanted = Attributes(
            mode, uid, gid, size, atime * _SECOND + atime_ns, mtime * _SECOND + mtime_ns
        )
        inode = await self._ops.attributes.setattr(r.nodeid, valid, wanted, self._opener(r))
        self._told(0, b"", r.nodeid)
        return self._attributes(r.nodeid, inode)

    async def getxattr(self, r: KernelRequest) -> bytes:
        size = int.from_bytes(r.body[:4], "little")
        return _sized(size, await self._ops.xattrs.getxattr(r.nodeid, r.name(8)))

    async def listxattr(self, r: KernelRequest) -> bytes:
        size = int.from_bytes(r.body[:4], "little")
        names = await self._ops.xattrs.listxattr(r.nodeid, r.caller)
        return _sized(size, b"".join(name + b"\0" for name in names))

    async def setxattr(self, r: KernelRequest) -> bytes:
        size, flags = protocol.SETXATTR_IN.unpack_from(r.body)
        name, value = bytes(r.body[protocol.SETXATTR_IN.size :]).split(b"\0", 1)
        await self._ops.xattrs.setxattr(r.nodeid, name, value[:size], flags)
        self._told(0, b"", r.nodeid)
        return b""

    async def removexattr(self, r: KernelRequest) -> bytes:
        await self._ops.xattrs.removexattr(r.nodeid, r.name())
        self._told(0, b"", r.nodeid)
        return b""

    # ---- files

    async def open(self, r: KernelRequest) -> bytes:
        flags, fuse_flags = protocol.OPEN_IN.unpack_from(r.body)
        handle = await self._ops.open(r.nodeid, flags, r.uid, r.pid, self._opener(r))
        if fuse_flags & protocol.OPEN_KILL_SUIDGID:
            await self._ops.attributes.setattr(r.nodeid, Fattr.KILL_SUIDGID, NO_ATTRIBUTES)
        handle.number = r.number
        if handle.writable and handle.file.writers == 1:
            # Others may believe for long what its seal said.
            self._told(0, b"", r.nodeid)
        return self.opened(handle, is_written=r.pid not in self._ops.lock_openers)

    async def create(self, r: KernelRequest) -> bytes:
        flags, mode, _, _ = protocol.CREATE_IN.unpack_from(r.body)
        name = r.name(protocol.CREATE_IN.size)
        handle, ino, inode = await self._ops.create(
            r.nodeid, name, mode, flags, r.caller, is_kept=self.keeps_new
        )
        if self._coherence is not None and not handle.creating:
            number = handle.number = self.inodes.number(ino)
            handle.replaced |= self.inodes.opens(r.pid, number, handle.file)
        self._told(r.nodeid, name)
        return self.entry(ino, inode) + self.opened(handle)

    async def tmpfile(self, r: KernelRequest) -> bytes:
        flags, mode, _, _ = protocol.CREATE_IN.unpack_from(r.body)
        handle, ino, inode = await self._ops.new_inodes.make_nameless(
            r.nodeid, mode, flags, r.caller
        )
        return self.entry(ino, inode) + self.opened(handle)

    async def flush(self, r: KernelRequest) -> bytes:
        fh, _, _, owner = protocol.FLUSH_IN.unpack_from(r.body)
        try:
            await self._ops.flush(fh)
            self._told_of_data(r.nodeid)
        finally:
            if self._ops.locks is not None:
                await self._ops.unlock(LockTarget(r.nodeid, False), owner)
        return b""

    async def release(self, r: KernelRequest) -> bytes:
        fh, _, flags, owner = protocol.RELEASE_IN.unpack_from(r.body)
        tells = self._tells_of(fh)
        try:
            await self._ops.release(fh)
            if tells:
                self._told_of_data(r.nodeid)
        finally:
            if flags & protocol.RELEASE_FLOCK_UNLOCK:
                await self._ops.unlock(LockTarget(r.nodeid, True), owner)
        return b""

    async def fsync(self, r: KernelRequest) -> bytes:
        fh, flags, _ = protocol.FSYNC_IN.unpack_from(r.body)
        await self._ops.fsync(fh, datasync=bool(flags & protocol.FSYNC_FDATASYNC))
        self._told_of_data(r.nodeid)
        return b""

    async def fallocate(self, r: KernelRequest) -> bytes:
        fh, offset, length, mode, _ = protocol.FALLOCATE_IN.unpack_from(r.body)
        await self._ops.ranges.fallocate(fh, mode, offset, length)
        self._told_of_data(r.nodeid)
        return b""

    async def lseek(self, r: KernelRequest) -> bytes:
        fh, offset, whence, _ = protocol.LSEEK_IN.unpack_from(r.body)
        return protocol.LSEEK_OUT.pack(self._ops.ranges.seek(fh, offset, whence))

    async def copy_file_range(self, r: KernelRequest) -> bytes:
        fh_in, at_in, _, fh_out, at_out, length, _ = protocol.COPY_IN.unpack_from(r.body)
        length = min(length, 0x7FFFF000)  # the reply holds 32 bits
        copied = await self._ops.ranges.copy(fh_in, at_in, fh_out, at_out, length)
        self._told_of_data(self._ops.file(fh_out).ino)
        return protocol.WRITE_OUT.pack(copied, 0)

    async def statfs(self, r: KernelRequest) -> bytes:
        space = await self._ops.statfs(r.nodeid)
        return protocol.STATFS_OUT.pack(
            space.f_blocks,
            space.f_bfree,
            space.f_bavail,
            space.f_files,
            space.f_ffree,
            space.f_bsize,
            protocol.NAME_MAX,
            space.f_frsize,
            0,
        )

    # ---- directories

    async def opendir(self, r: KernelRequest) -> bytes:
        fh = await self._ops.directories.open(r.nodeid)
        # What others change is in no listing that the kernel keeps.
        kept = Fopen.CACHE_DIR | Fopen.KEEP_CACHE if self._coherence is None else 0
        return protocol.OPEN_OUT.pack(fh, kept, 0)

    def relist(self) -> None:
        """Has the kernel ask anew for each directory that an earlier daemon has listed."""
        relisted: set[int] = set()

        async def opendir(r: KernelRequest) -> bytes:
            reply = await self.opendir(r)
            if r.nodeid in relisted:
                return reply
            relisted.add(r.nodeid)
            fh, kept, backing = protocol.OPEN_OUT.unpack(reply)
            return protocol.OPEN_OUT.pack(fh, kept & ~Fopen.KEEP_CACHE, backing)

        self.inline[Op.OPENDIR] = opendir

    async def releasedir(self, r: KernelRequest) -> bytes:
        self._ops.directories.close(protocol.RELEASE_IN.unpack_from(r.body)[0])
        return b""

    def _listed(self, _r: KernelRequest, fh: int) -> int:
        """Returns the number by which `_listings` knows the directory that is listed: that of the
        open directory."""
        return fh

    async def readdir(self, r: KernelRequest) -> bytes:
        fh, offset, size, _, _, _, _ = protocol.READ_IN.unpack_from(r.body)
        out = bytearray()
        at, limit = self._listed(r, fh), size // _LEAST_DIRENT
        for following, name, ino, inode, _ in await self._listings.read(at, offset, limit):
            one = protocol.dirent(ino, following, name, inode.mode)
            if len(out) + len(one) > size:
                break
            out += one
        return bytes(out)

    async def readdirplus(self, r: KernelRequest) -> bytes:
        fh, offset, size, _, _, _, _ = protocol.READ_IN.unpack_from(r.body)
        out = bytearray()
        listed = self._listed(r, fh)
        if not offset:
            return await self._first_entries(listed, size)
        live, looked_up = self._ops.attributes.live, self._holders.looked_up
        limit = size // (_LEAST_DIRENT + protocol.ENTRY_BYTES)
        page = await self._listings.read(listed, offset, limit)
        page = await self._ops.introduced(r.nodeid, page)
        for at, entry in enumerate(page):
            following, name, ino, inode, _ = entry
            one = protocol.dirent(ino, following, name, inode.mode)
            if len(out) + protocol.ENTRY_BYTES + len(one) > size:
                self._ops.introductions.unsaid(page[at:])
                break
            # The kernel takes no lookup count for the dots.
            is_strange = entry.is_elsewhere or self._ops.introductions.is_strange(entry)
            if name in (b".", b"..") or is_strange:
                out += protocol.BARE_ENTRY
            else:
                looked_up(ino)
                out += self._shown(ino, live(ino, inode))
            out += one
        return bytes(out)

    async def _first_entries(self, listed: int, size: int) -> bytes:
        """Returns the first reply of a READDIRPLUS: names and types alone, since the kernel does
        not know yet whether anybody wants more of them."""
        out = bytearray()
        limit = size // (_LEAST_DIRENT + protocol.ENTRY_BYTES)
        for following, name, ino, inode, _ in await self._listings.read(listed, 0, limit):
            one = protocol.dirent(ino, following, name, inode.mode)
            if len(out) + protocol.ENTRY_BYTES + len(one) > size:
                break
            out += protocol.BARE_ENTRY + one
        return bytes(out)

    async def fsyncdir(self, r: KernelRequest) -> bytes:
        await self._ops.sync_directory(r.nodeid)
        return b""


def _sized(size: int, value: bytes) -> bytes:
    """Returns an attribute's value, or with size 0 its length."""
    if size == 0:
        return protocol.WRITE_OUT.pack(len(value), 0)
    if len(value) > size:
        raise OSError(_NO_RANGE, os.strerror(_NO_RANGE))
    return value


assert stat.S_IFDIR >> 12 == 4, "dirent types are mode bits shifted right by 12"
