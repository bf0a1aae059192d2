"""Requests that come again (FUSE_NOTIFY_RESEND) after a death of the daemon: those that were done
and not answered are answered as the first time, and not done twice.

| request | was done if | answer |
|---|---|---|
| OPEN, CREATE, TMPFILE, OPENDIR | the journal has a handle by it | that handle |
| CREATE, TMPFILE without a handle | its inode has a record | the file's first handle |
| MKNOD, MKDIR, SYMLINK | its inode has a record | the entry |
| these, of what another node removed since | the engine says so | an entry that leads nowhere |
| LINK | the name leads to the noted inode | the entry |
| UNLINK, RMDIR | the name does not lead to the noted inode | done |
| RENAME | the new name leads to the noted inode, the old one does not | done |
| SETXATTR of a new attribute | it was noted, and the attribute is there | done |
| REMOVEXATTR | it was noted, and there is no such attribute | done |
| a WRITE that appends, relayed in a cluster | its place was noted | it is written there (again) |
| all others | they may be done twice | |

An inode's number is one request's alone. Names can have changed since by processes beside the
mount, whose changes may as well have come after, and by other nodes, whose may not. So of a change
that a cluster's engine was asked for its answer counts, or what it says of the request now, in
place of the names (`kvfs.meta.asked_requests`); one in a strict namespace that it was not asked for
was not done.
"""

import contextlib
import logging
import os
import stat
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Final, NamedTuple

from gateway.fuse.channel.backing_registry import BackingRegistry
from gateway.fuse.channel.handlers import Handler, Handlers, KernelRequest
from gateway.fuse.codec import protocol
from gateway.fuse.codec.protocol import Op
from gateway.fuse.files.open_file import Handle
from gateway.fuse.names.journaled_streams import JournaledStreams
from gateway.fuse.operations import Operations
from gateway.holder.mount_journal import AGAIN, JournaledNote, State
from kvfs.base.clock import file_time_ns
from kvfs.base.errors import Stale, Unavailable
from kvfs.meta import keys
from kvfs.meta.records import ROOT_INODE, Inode
from kvfs.node import Node
from kvfs.tree import inodes, tree
from kvfs.vfs.stage_records import new_record

Way = Callable[[KernelRequest], Coroutine[Any, Any, bytes | None]]
"""Returns the reply to a request that was done; None: it was not."""
log = logging.getLogger(__name__)


class Became(NamedTuple):
    """The fate of a request that was noted."""

    ino: int
    is_done: bool | None = None
    """Whether it was done; None: names and records tell."""
    is_sent: bool = True
    """Whether a cluster's engine may have been asked for it."""
    place: int | None = None
    """The place of an append."""


_NOTHING: Final = Became(0)


async def done_requests(node: Node, notes: Mapping[int, JournaledNote]) -> dict[int, Became]:
    """Returns what became of the requests that daemons before noted, by request, as far as the
    cluster's engine says."""
    return {request: await _became(node, note) for request, note in notes.items()}


async def _became(node: Node, note: JournaledNote) -> Became:
    if note.state is State.PLACED:
        return Became(note.ino, place=note.ino)
    if note.state is State.DONE:
        return Became(note.ino, True)
    if note.state is State.NOTED or node.cluster is None:
        return Became(note.ino, is_sent=node.cluster is None)
    try:
        return Became(note.ino, await node.cluster.engine.became(note.sent))
    except Unavailable as error:
        log.warning("whether a request was done is told by its names alone: %s", error)
        return Became(note.ino)


class ResentRequests:
    """The requests of daemons before, for one mount."""

    def __init__(
        self,
        operations: Operations,
        handlers: Handlers,
        registry: BackingRegistry,
        handles: Iterable[tuple[int, Handle]],
        notes: Mapping[int, Became],
    ) -> None:
        """`handles`: those that daemons before gave out, each with the number of its request.
        `notes`: what became of requests, by request."""
        self._ops = operations
        self._handlers = handlers
        self._registry = registry
        self._handles = {_number(request): handle for request, handle in handles}
        self._notes = notes
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
            Op.SETXATTR: self._set_attribute,
            Op.REMOVEXATTR: self._removed_attribute,
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

    def place(self, unique: int) -> int | None:
        """Returns the place of an append that came before; None: it has none yet."""
        return self._notes.get(_number(unique), _NOTHING).place

    def _note(self, r: KernelRequest) -> Became:
        return self._notes.get(_number(r.unique), _NOTHING)

    def _is_done(self, r: KernelRequest) -> bool | None:
        """Returns whether a change of names was done; None: the names tell. Those of a strict
        namespace are changed by the engine alone."""
        note = self._note(r)
        if note.is_done is None and not note.is_sent and r.nodeid != ROOT_INODE:
            return False if self._ops.node.is_strict(r.nodeid) else None
        return note.is_done

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
        ino = handle.file.ino if handle is not None else self._note(r).ino
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
        note = self._note(r)
        record = await self._record(note.ino)
        if record is None and note.is_done:
            record = _removed_since(r)
        return None if record is None else self._handlers.entry(note.ino, record)

    async def _mknod(self, r: KernelRequest) -> bytes | None:
        ino = self._note(r).ino
        record = await self._record(ino)
        if record is not None and stat.S_ISREG(record.mode):
            handle = self._first_handle(ino, record, os.O_RDWR, r.uid)
            await self._ops.publishing.publish(handle.file)
            await self._ops.release(handle.fh)
        return await self._made(r)

    async def _link(self, r: KernelRequest) -> bytes | None:
        note, name = self._note(r), r.name(protocol.LINK_IN.size)
        done = self._is_done(r)
        if done is None:
            done = bool(note.ino) and await self._leads(r.nodeid, name) == note.ino
        return await self._made(r) if done else None

    async def _removed(self, r: KernelRequest) -> bytes | None:
        note = self._note(r)
        done = self._is_done(r)
        if done is None:
            done = bool(note.ino) and await self._leads(r.nodeid, r.name()) != note.ino
        return b"" if done else None

    async def _rename(self, r: KernelRequest) -> bytes | None:
        note, done = self._note(r), self._is_done(r)
        if done is not None:
            return b"" if done else None
        layout = protocol.RENAME_IN if r.opcode == Op.RENAME else protocol.RENAME2_IN
        target = layout.unpack_from(r.body)[0]
        old, new = r.names(layout.size)
        if not note.ino or await self._leads(self._handlers.node(target), new) != note.ino:
            return None
        return b"" if await self._leads(r.nodeid, old) != note.ino else None

    # ---- attributes

    async def _set_attribute(self, r: KernelRequest) -> bytes | None:
        _, flags = protocol.SETXATTR_IN.unpack_from(r.body)
        name = bytes(r.body[protocol.SETXATTR_IN.size :]).split(b"\0", 1)[0]
        note, done = self._note(r), self._is_done(r)
        if done is None:  # where it need not have been new, it may be set once more
            is_new = bool(flags & os.XATTR_CREATE)
            done = bool(note.ino) and is_new and await self._has_attribute(r.nodeid, name)
        return b"" if done else None

    async def _removed_attribute(self, r: KernelRequest) -> bytes | None:
        note, done = self._note(r), self._is_done(r)
        if done is None:
            done = bool(note.ino) and not await self._has_attribute(r.nodeid, r.name())
        return b"" if done else None

    async def _has_attribute(self, ino: int, name: bytes) -> bool:
        return await self._ops.engine.read(lambda t: t.get(keys.xattr(ino, name)) is not None)


def _removed_since(r: KernelRequest) -> Inode:
    """Returns the record of what a request made, and others have removed before it was answered:
    after an error the kernel would ask once more, and there would be another one. Raises Stale for
    a link, of which the kernel finds no name then."""
    if r.opcode == Op.LINK:
        raise Stale("others have removed what was linked before that was answered")
    mode, target, rdev = stat.S_IFLNK | 0o777, b"", 0
    if r.opcode == Op.MKDIR:
        mode = stat.S_IFDIR | stat.S_IMODE(protocol.MKDIR_IN.unpack_from(r.body)[0])
    elif r.opcode == Op.MKNOD:
        mode, rdev, _, _ = protocol.MKNOD_IN.unpack_from(r.body)
    else:
        _, target = r.names()
    record = new_record(mode, r.uid, r.gid, file_time_ns())
    record.size, record.target, record.rdev = len(target), target, rdev
    return record


def _number(unique: int) -> int:
    """Returns a request's number as it was the first time."""
    return unique & ~AGAIN
