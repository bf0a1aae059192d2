"""New inodes of the mount: directories, links, devices, and files with their first handle."""

import os
import stat
from collections.abc import Callable, Coroutine
from typing import Any, Final

import msgspec

from gateway.fuse.codec.caller import Caller
from gateway.fuse.files.open_file import Handle
from gateway.fuse.files.open_files import OpenFiles
from gateway.fuse.files.orphans import Orphans
from gateway.fuse.names import noted_changes
from gateway.holder.mount_journal import MountJournal
from kvfs.base.clock import file_time_ns
from kvfs.base.errors import NameTooLong
from kvfs.meta.engine import Transaction
from kvfs.meta.records import ROOT_INODE, Flag, Inode, namespace_of
from kvfs.node import Node
from kvfs.tree import tree
from kvfs.vfs.names.visible_files import VisibleFiles
from kvfs.vfs.stage_records import new_record

_TARGET_MAX: Final = 4095


class NewInodes:
    """Makes the inodes of one mount. All methods raise what `tree.add` raises, NoSpace, ReadOnly,
    Unavailable."""

    def __init__(
        self,
        node: Node,
        open_files: OpenFiles,
        orphans: Orphans,
        undo: Callable[[int, bytes], Coroutine[Any, Any, object]],
    ) -> None:
        """`undo` removes a name."""
        self._engine = node.engine
        self._volume = node.volume
        self._known = node.known
        self._appends = node.appends
        self._boot = node.boot
        self._open_files = open_files
        self._shares = open_files.shares
        self._orphans = orphans
        self._files = files = VisibleFiles(node.engine, node.local, node.near, node.files, undo)
        self._put, self._make_now, self._make_nameless = (
            tree.add,
            files.make_now,
            files.make_nameless,
        )

    def keep(self, journal: MountJournal) -> None:
        """Notes in a mount's journal, before each commit, the inode that is made."""
        self._put = noted_changes.after(self._put, journal, lambda made: made)
        self._make_now = noted_changes.before(self._make_now, journal, 2)
        self._make_nameless = noted_changes.before(self._make_nameless, journal, 1)

    async def make_directory(
        self, parent: int, name: bytes, mode: int, caller: Caller
    ) -> tuple[int, Inode]:
        """Makes a directory; at the top level a durable namespace."""
        return await self._add(parent, name, _record(stat.S_IFDIR | stat.S_IMODE(mode), caller))

    async def make_device(
        self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller
    ) -> tuple[int, Inode]:
        """Makes a fifo, socket or device."""
        record = _record(mode, caller)
        record.rdev = rdev
        return await self._add(parent, name, record)

    async def make_symlink(
        self, parent: int, name: bytes, target: bytes, caller: Caller
    ) -> tuple[int, Inode]:
        """Makes a symbolic link."""
        if len(target) > _TARGET_MAX:
            raise NameTooLong("a symbolic link's target holds at most 4,095 bytes")
        record = _record(stat.S_IFLNK | 0o777, caller)
        record.size, record.target = len(target), target
        return await self._add(parent, name, record)

    async def _add(self, parent: int, name: bytes, record: Inode) -> tuple[int, Inode]:
        top = parent == ROOT_INODE  # a new namespace numbers its directory itself
        ino = 0 if top else await self._volume.allocate(namespace_of(parent))

        def fn(t: Transaction) -> tuple[int, Inode]:
            inode = msgspec.structs.replace(record)
            made = self._put(t, parent, name, ino, inode)
            if stat.S_ISDIR(inode.mode):
                self._known.add(made)
            return made, tree.read_inode(t, made) if top else inode

        return await self._engine.transact(fn)

    def make_file_now(
        self,
        parent: int,
        name: bytes,
        mode: int,
        flags: int,
        ino: int,
        uid: int,
        gid: int,
        *,
        is_kept: bool = False,
    ) -> tuple[Handle, Inode] | None:
        """Makes and opens a file at once; None, and nothing is done, if other nodes have to be
        asked. `is_kept`: it stays after a kill though it was never closed. Raises TooManyOpenFiles,
        NoDataFile."""
        inode = new_record(mode, uid, gid, file_time_ns())
        inode.boot = self._boot
        if is_kept:
            inode.flags = Flag.RESERVED
        self._shares.take(uid)
        fd = None
        try:
            fd = self._make_now(parent, name, ino, inode)
        finally:
            if fd is None:
                self._shares.give(uid)
        if fd is None:
            return None
        return self._open_files.created(ino, inode, fd, flags, uid), inode

    async def make_file(
        self, parent: int, name: bytes, mode: int, flags: int, ino: int, caller: Caller
    ) -> tuple[Handle, Inode]:
        """Makes and opens a file in a cluster; its openers wait until it has its data file."""
        appends = self._appends if flags & os.O_APPEND else None
        if appends is not None and not self._open_files.is_leased(parent, flags):
            appends = None

        def noted(t: Transaction) -> None:
            if appends is not None:
                appends.put(t, ino)

        self._open_files.begin_making(ino, caller.uid)
        try:
            fd, inode = await self._files.make(
                *(parent, name, ino, self._file_record(mode, caller)),
                reserves=bool(flags & os.O_EXCL) or appends is not None,
                noted=noted,
            )
            return self._open_files.created(ino, inode, fd, flags, caller.uid), inode
        finally:
            self._open_files.end_making(ino, caller.uid)

    async def make_nameless(
        self, parent: int, mode: int, flags: int, caller: Caller
    ) -> tuple[Handle, int, Inode]:
        """O_TMPFILE: makes a file without a name, which link may give one."""
        ino = await self._volume.allocate(namespace_of(parent))
        inode = self._file_record(stat.S_IFREG | stat.S_IMODE(mode), caller)
        self._open_files.begin_making(ino, caller.uid)
        try:
            fd = await self._make_nameless(parent, ino, inode, self._orphans.made)
            return self._open_files.created(ino, inode, fd, flags, caller.uid), ino, inode
        finally:
            self._open_files.end_making(ino, caller.uid)

    def _file_record(self, mode: int, caller: Caller) -> Inode:
        record = _record(mode, caller)
        record.boot = self._boot
        return record


def _record(mode: int, caller: Caller) -> Inode:
    return new_record(mode, caller.uid, caller.gid, file_time_ns())
