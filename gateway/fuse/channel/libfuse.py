"""The adapter for pyfuse3: the same operations, spoken through libfuse.

In passthrough and relay mode it answers what the fast path leaves to it; in libfuse mode,
everything. There, and only there, payload passes through Python: that mode is for machines that
give no /dev/fuse descriptor."""

import functools
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, ParamSpec, TypeVar

import pyfuse3
from pyfuse3 import FileHandleT, FileNameT, FlagT, FUSEError, InodeT, ModeT, RequestContext

from gateway.fuse.codec import protocol
from gateway.fuse.codec.caller import Caller
from gateway.fuse.codec.errno_map import errno_of
from gateway.fuse.codec.protocol import Fattr
from gateway.fuse.codec.set_attributes import NO_ATTRIBUTES, Attributes
from gateway.fuse.operations import Operations
from kvfs.base.errors import KvfsError, Stale
from kvfs.meta.records import ROOT_INODE, Inode

log = logging.getLogger(__name__)
_PAGE: Final = 32
P = ParamSpec("P")
R = TypeVar("R")


def _translated(method: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Turns errors of the core into FUSEError."""

    @functools.wraps(method)
    async def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await method(*args, **kwargs)
        except FUSEError:
            raise
        except Exception as e:  # translated at this one point
            if not isinstance(e, KvfsError | OSError):
                log.error("request failed by a bug", exc_info=e)
            raise FUSEError(errno_of(e)) from e

    return wrapper


def _caller(ctx: RequestContext) -> Caller:
    return Caller(ctx.uid, ctx.gid, ctx.pid)


def attributes(ino: int, inode: Inode) -> pyfuse3.EntryAttributes:
    """Returns the record in libfuse's form."""
    e = pyfuse3.EntryAttributes()
    e.st_ino, e.st_mode, e.st_nlink = InodeT(ino), ModeT(inode.mode), inode.nlink
    e.st_uid, e.st_gid, e.st_rdev = inode.uid, inode.gid, inode.rdev
    e.st_size, e.st_blocks, e.st_blksize = inode.size, inode.blocks, protocol.BLOCK_SIZE
    e.st_atime_ns, e.st_mtime_ns, e.st_ctime_ns = inode.atime_ns, inode.mtime_ns, inode.ctime_ns
    e.generation = 0
    e.entry_timeout = protocol.LONG_S
    e.attr_timeout = protocol.attr_seconds(inode)
    return e


class LibfuseOperations(pyfuse3.Operations):
    """Operations in the form that pyfuse3 calls."""

    supports_dot_lookup = True
    enable_writeback_cache = False
    enable_acl = False

    def __init__(self, operations: Operations) -> None:
        super().__init__()
        self._ops = operations

    def _entry(self, ino: int, inode: Inode) -> pyfuse3.EntryAttributes:
        self._ops.holders.looked_up(ino)
        return self._attributes(ino, inode)

    def _attributes(self, ino: int, inode: Inode) -> pyfuse3.EntryAttributes:
        found = attributes(ino, inode)
        if (coherence := self._ops.coherence) is not None:
            found.entry_timeout = coherence.entry_s(ino)
            found.attr_timeout = min(found.attr_timeout, coherence.attributes_s(ino))
        return found

    @_translated
    async def lookup(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> Any:
        return self._entry(*await self._ops.lookup(parent_inode, name, ctx.pid))

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        for ino, count in inode_list:
            self._ops.forget(ino, count)

    @_translated
    async def getattr(self, inode: InodeT, ctx: RequestContext) -> Any:
        return self._attributes(inode, await self._ops.attributes.getattr(inode))

    @_translated
    async def setattr(
        self,
        inode: InodeT,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: FileHandleT | None,
        ctx: RequestContext,
    ) -> Any:
        valid = 0
        for wanted, flag in (
            (fields.update_mode, Fattr.MODE),
            (fields.update_uid, Fattr.UID),
            (fields.update_gid, Fattr.GID),
            (fields.update_size, Fattr.SIZE),
            (fields.update_atime, Fattr.ATIME),
            (fields.update_mtime, Fattr.MTIME),
        ):
            if wanted:
                valid |= flag
        if valid & (Fattr.UID | Fattr.GID) and not valid & Fattr.MODE:
            valid |= Fattr.KILL_SUIDGID
        values = Attributes(
            attr.st_mode, attr.st_uid, attr.st_gid, attr.st_size, attr.st_atime_ns, attr.st_mtime_ns
        )
        return self._attributes(inode, await self._ops.attributes.setattr(inode, valid, values))

    @_translated
    async def readlink(self, inode: InodeT, ctx: RequestContext) -> Any:
        return await self._ops.readlink(inode)

    @_translated
    async def mknod(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, rdev: int, ctx: RequestContext
    ) -> Any:
        made = await self._ops.make_node(parent_inode, name, mode, rdev, _caller(ctx))
        return self._entry(*made)

    @_translated
    async def mkdir(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, ctx: RequestContext
    ) -> Any:
        return self._entry(
            *await self._ops.new_inodes.make_directory(parent_inode, name, mode, _caller(ctx))
        )

    @_translated
    async def symlink(
        self, parent_inode: InodeT, name: FileNameT, target: FileNameT, ctx: RequestContext
    ) -> Any:
        made = await self._ops.new_inodes.make_symlink(parent_inode, name, target, _caller(ctx))
        return self._entry(*made)

    @_translated
    async def link(
        self, inode: InodeT, new_parent_inode: InodeT, new_name: FileNameT, ctx: RequestContext
    ) -> Any:
        return self._entry(inode, await self._ops.link(inode, new_parent_inode, new_name))

    @_translated
    async def unlink(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        await self._ops.unlink(parent_inode, name)

    @_translated
    async def rmdir(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        await self._ops.rmdir(parent_inode, name)

    @_translated
    async def rename(
        self,
        parent_inode_old: InodeT,
        name_old: FileNameT,
        parent_inode_new: InodeT,
        name_new: FileNameT,
        flags: FlagT,
        ctx: RequestContext,
    ) -> None:
        await self._ops.rename(
            parent_inode_old, name_old, parent_inode_new, name_new, flags, _caller(ctx)
        )

    @_translated
    async def open(self, inode: InodeT, flags: FlagT, ctx: RequestContext) -> Any:
        handle = await self._ops.open(inode, flags, ctx.uid, ctx.pid)
        if flags & os.O_TRUNC and ctx.uid != 0:
            # the kernel leaves it to the server, and libfuse does not pass on that it does
            await self._ops.attributes.setattr(inode, Fattr.KILL_SUIDGID, NO_ATTRIBUTES)
        return pyfuse3.FileInfo(fh=FileHandleT(handle.fh), keep_cache=not handle.replaced)

    @_translated
    async def create(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, flags: FlagT, ctx: RequestContext
    ) -> Any:
        made = await self._ops.create(parent_inode, name, mode, flags, _caller(ctx))
        handle, ino, inode = made
        info = pyfuse3.FileInfo(fh=FileHandleT(handle.fh), keep_cache=True)
        return info, self._entry(ino, inode)

    @_translated
    async def read(self, fh: FileHandleT, off: int, size: int) -> Any:
        coming = self._ops.ranges.coming(fh, off, size)
        if coming is not None:
            await coming.span(off, size)
        return os.pread(self._ops.file(fh).fd, size, off)

    @_translated
    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> Any:
        handle = self._ops.open_files.handle(fh)
        if handle.appends and off != self._ops.ranges.end(handle.file, off):
            raise Stale("other nodes have appended to the file: open it again")
        return os.pwrite(handle.file.fd, buf, off)

    @_translated
    async def flush(self, fh: FileHandleT) -> None:
        await self._ops.flush(fh)

    @_translated
    async def release(self, fh: FileHandleT) -> None:
        await self._ops.release(fh)

    @_translated
    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        await self._ops.fsync(fh, datasync=datasync)

    @_translated
    async def opendir(self, inode: InodeT, ctx: RequestContext) -> Any:
        return await self._ops.directories.open(inode)

    @_translated
    async def readdir(self, fh: FileHandleT, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        while True:
            page = await self._ops.directories.read(fh, start_id, _PAGE)
            page = await self._ops.introduced(self._ops.directories.directory(fh), page)
            for at, entry in enumerate(page):
                following, name, ino, inode, is_elsewhere = entry
                start_id = following
                if is_elsewhere or self._ops.introductions.is_strange(entry):
                    continue
                live = self._attributes(ino, self._ops.attributes.live(ino, inode))
                if not pyfuse3.readdir_reply(token, name, live, following):
                    self._ops.introductions.unsaid(page[at:])
                    return
                if name not in (b".", b".."):
                    self._ops.holders.looked_up(ino)
            if not page:
                return

    @_translated
    async def releasedir(self, fh: FileHandleT) -> None:
        self._ops.directories.close(fh)

    @_translated
    async def fsyncdir(self, fh: FileHandleT, datasync: bool) -> None:
        await self._ops.sync_directory(ROOT_INODE)  # which is everything

    @_translated
    async def statfs(self, ctx: RequestContext) -> Any:
        space = await self._ops.statfs(ROOT_INODE)
        data = pyfuse3.StatvfsData()
        data.f_bsize, data.f_frsize, data.f_namemax = (
            space.f_bsize,
            space.f_frsize,
            protocol.NAME_MAX,
        )
        data.f_blocks, data.f_bfree, data.f_bavail = space.f_blocks, space.f_bfree, space.f_bavail
        data.f_files, data.f_ffree, data.f_favail = space.f_files, space.f_ffree, space.f_favail
        return data

    @_translated
    async def setxattr(
        self, inode: InodeT, name: FileNameT, value: bytes, ctx: RequestContext
    ) -> None:
        await self._ops.xattrs.setxattr(inode, name, value, 0)

    @_translated
    async def getxattr(self, inode: InodeT, name: FileNameT, ctx: RequestContext) -> Any:
        return await self._ops.xattrs.getxattr(inode, name)

    @_translated
    async def listxattr(self, inode: InodeT, ctx: RequestContext) -> Any:
        return await self._ops.xattrs.listxattr(inode, _caller(ctx))

    @_translated
    async def removexattr(self, inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        await self._ops.xattrs.removexattr(inode, name)
