"""Requests that come again (FUSE_NOTIFY_RESEND) after a death of the daemon: those that were done
and not answered are answered as the first time, and not done twice.

| request | was done if | answer |
|---|---|---|
| OPEN, CREATE, TMPFILE, OPENDIR | the journal has a handle by it | that handle |
| CREATE, TMPFILE without a handle | its inode has a record | the file's first handle |
| MKNOD, MKDIR, SYMLINK | its inode has a record | the entry |
| LINK | the name leads to the noted inode | the entry |
| UNLINK, RMDIR | the name does not lead to the noted inode | done |
| RENAME | the new name leads to the noted inode, the old one does not | done |
| all others | they may be done twice | |

An inode's number is one request's alone, and names can only have changed since by processes beside
the mount, whose changes may as well have come after.
"""

import contextlib
import os
import stat
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Final

from gateway.fuse.channel.backing_registry import BackingRegistry
from gateway.fuse.channel.handlers import Handler, Handlers, KernelRequest
from gateway.fuse.codec import protocol
from gateway.fuse.codec.protocol import Op
from gateway.fuse.files.open_file import Handle
from gateway.fuse.names.journaled_streams import JournaledStreams
from gateway.fuse.operations import Operations
from kvfs.meta.records import Inode
from kvfs.tree import inodes, tree

Way = Callable[[KernelRequest], Coroutine[Any, Any, bytes | None]]
"""Returns the reply to a request that was done; None: it was not."""
FROM: Final = 1 << 63
"""The bit by which the kernel marks the numbers of requests that it sent before."""


class ResentRequests:
    """The requests of daemons before, for one mount."""

    def __init__(
        self,
        operations: Operations,
        handlers: Handlers,
        registry: BackingRegistry,
        handles: Iterable[tuple[int, Handle]],
        notes: Mapping[int, int],
    ) -> None:
        """`handles`: those that daemons before gave out, each with the number of its request.
        `notes`: the inodes that requests were about, by request."""
        self._ops = operations
        self._handlers = handlers
        self._registry = registry
        self._handles = {_number(request): handle for request, handle in handles}
        self._notes = {_number(request): ino for request, ino in notes.items()}
        self._ways: Final[dict[int, Way]] = {
            Op.OPEN: self._open,
            Op.CREATE: self._create,
            Op.TMPFILE: self._create,
            Op.OPENDIR: self._opendir,
            Op.MKNOD: self._mknod,
            Op.MKDIR: self._made,
            Op.SYMLINK: self._made,
            Op.LINK: self._link,
            Op.UNLINK: self._removed,
            Op.RMDIR: self._removed,
            Op.RENAME: self._rename,
            Op.RENAME2: self._rename,
        }

    def handler(self, request: KernelRequest) -> Handler | None:
        """Returns what answers a request that came before; None: it is served like any other."""
        way = self._ways.get(request.opcode)
        if way is None:
            return None
        tables = self._handlers.inline, self._handlers.waiting
        usual = next((table[request.opcode] for table in tables if request.opcode in table), None)
        if usual is None:  # an OPENDIR of a kernel that need not ask
            return None

        async def answer(asked: KernelRequest) -> bytes:
            done = await way(asked)
            return await usual(asked) if done is None else done

        return answer

    def _note(self, r: KernelRequest) -> int:
        return self._notes.get(_number(r.unique), 0)

    async def _record(self, ino: int) -> Inode | None:
        if not ino:
            return None
        found = await self._ops.engine.read(lambda t: inodes.read_inodes(t, [ino]))
        return found[0]

    async def _leads(self, parent: int, name: bytes) -> int:
        """Returns the inode to which a name leads; 0: there is no such name."""
        found = await self._ops.engine.read(lambda t: tree.find(t, parent, name))
        return found[0] if found else 0

    # ---- opens

    async def _open(self, r: KernelRequest) -> bytes | None:
        handle = self._handles.get(_number(r.unique))
        return None if handle is None else self._opened_again(handle)

    def _opened_again(self, handle: Handle) -> bytes:
        return protocol.OPEN_OUT.pack(handle.fh, *self._registry.again(handle))

    async def _opendir(self, r: KernelRequest) -> bytes | None:
        streams = self._ops.directories
        assert isinstance(streams, JournaledStreams), "a mount with a journal has these"
        fh = streams.opened_by(r.unique)
        return protocol.OPEN_OUT.pack(fh, 0, 0) if fh else None

    async def _create(self, r: KernelRequest) -> bytes | None:
        handle = self._handles.get(_number(r.unique))
        ino = handle.file.ino if handle is not None else self._note(r)
        record = await self._record(ino)
        if record is None:
            return None
        if handle is not None:
            return self._handlers.entry(ino, record) + self._opened_again(handle)
        flags, _, _, _ = protocol.CREATE_IN.unpack_from(r.body)
        handle = self._first_handle(ino, record, flags, r.uid)
        return self._handlers.entry(ino, record) + self._handlers.opened(handle)

    def _first_handle(self, ino: int, record: Inode, flags: int, uid: int) -> Handle:
        """Opens a new file, whose data file is made if the kill came before."""
        open_files, files = self._ops.open_files, self._ops.node.files
        open_files.shares.take(uid)
        fd = -1
        try:
            with contextlib.suppress(FileNotFoundError):
                fd = files.open(ino, record.version, os.O_RDWR)
            if fd < 0:
                fd = files.create(ino, record.version)
        except BaseException:
            open_files.shares.give(uid)
            raise
        if not record.nlink:
            self._ops.orphans.made(ino)
        return open_files.created(ino, record, fd, flags, uid)

    # ---- names

    async def _made(self, r: KernelRequest) -> bytes | None:
        ino = self._note(r)
        record = await self._record(ino)
        return None if record is None else self._handlers.entry(ino, record)

    async def _mknod(self, r: KernelRequest) -> bytes | None:
        ino = self._note(r)
        record = await self._record(ino)
        if record is None:
            return None
        if stat.S_ISREG(record.mode):
            handle = self._first_handle(ino, record, os.O_RDWR, r.uid)
            await self._ops.publishing.publish(handle.file)
            await self._ops.release(handle.fh)
            record = await self._record(ino)
            assert record is not None, "it was published"
        return self._handlers.entry(ino, record)

    async def _link(self, r: KernelRequest) -> bytes | None:
        ino = self._note(r)
        if not ino or await self._leads(r.nodeid, r.name(protocol.LINK_IN.size)) != ino:
            return None
        return await self._made(r)

    async def _removed(self, r: KernelRequest) -> bytes | None:
        ino = self._note(r)
        return b"" if ino and await self._leads(r.nodeid, r.name()) != ino else None

    async def _rename(self, r: KernelRequest) -> bytes | None:
        ino = self._note(r)
        layout = protocol.RENAME_IN if r.opcode == Op.RENAME else protocol.RENAME2_IN
        target = layout.unpack_from(r.body)[0]
        old, new = r.names(layout.size)
        if not ino or await self._leads(self._handlers.node(target), new) != ino:
            return None
        return b"" if await self._leads(r.nodeid, old) != ino else None


def _number(unique: int) -> int:
    """Returns a request's number as it was the first time."""
    return unique & ~FROM
