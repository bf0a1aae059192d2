"""The requests of a lone node's mount by which a block is stored, answered by plain functions.

A create, a close and a rename change the engine, in memory, and wait for nothing in the common
case. As with `plain_answers`, a coroutine for each would cost more than the work; whatever has to
wait goes the general way, by `Handlers`, which does the same and more.

Invariants
- Nothing is changed before it is known that the answer is given here. Where other connections of
  the node have to hear of a change (`Neighbour.others`), it is given there.
- An error of the work itself is the request's: it is raised here as there.
"""

import os
import stat
from typing import Final

from gateway.fuse.channel.handlers import Handlers, Registrar
from gateway.fuse.channel.plain_answers import Answer
from gateway.fuse.codec import protocol
from gateway.fuse.codec.caller import Caller
from gateway.fuse.codec.protocol import Op
from gateway.fuse.operations import Operations
from kvfs.base.errors import Exists
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.records import NAMESPACE_SHIFT, ROOT_INODE

_CREATE: Final = protocol.CREATE_IN.size
_RENAME: Final = protocol.RENAME_IN.size


class PlainChanges:
    """The plain functions of one mount."""

    def __init__(
        self,
        operations: Operations,
        engine: EmbeddedEngine,
        registrar: Registrar,
        handlers: Handlers,
    ) -> None:
        self._engine = engine
        self._handlers = handlers
        self._admission = operations.node.evictor
        self._allocate = operations.volume.allocate_now
        self._make_file = operations.make_file
        self._rename = operations.rename_now
        self._looked_up = operations.holders.looked_up
        self._handle = operations.open_files.handle
        self._release = operations.open_files.release_now
        self._publish = operations.publishing.publish_now
        self._orphans = operations.orphans
        self._flags = registrar.flags

    def table(self) -> dict[int, Answer]:
        """By opcode."""
        return {Op.CREATE: self.create, Op.FLUSH: self.flush, Op.RENAME: self.rename}

    def create(self, parent: int, body: memoryview, uid: int, gid: int) -> bytes | None:
        namespace_id = parent >> NAMESPACE_SHIFT
        admission, beside = self._admission, self._handlers.beside
        if parent == ROOT_INODE or admission.must_wait(namespace_id):
            return None
        if beside is not None and beside.others:
            return None
        ino = self._allocate(namespace_id)
        if not ino or admission.pressed(namespace_id):
            return None
        flags, mode, _, _ = protocol.CREATE_IN.unpack_from(body)
        name = bytes(body[_CREATE:-1])
        mode = stat.S_IFREG | stat.S_IMODE(mode)
        try:
            handle, _, inode = self._make_file(parent, name, mode, flags, ino, Caller(uid, gid, 0))
        except Exists:
            if flags & os.O_EXCL:
                raise
            return None
        self._looked_up(ino)
        opened = protocol.OPEN_OUT.pack(handle.fh, *self._flags(handle))
        return protocol.entry(ino, inode) + opened

    def flush(self, _ino: int, body: memoryview, _uid: int, _gid: int) -> bytes | None:
        handle = self._handle(protocol.FLUSH_IN.unpack_from(body)[0])
        beside = self._handlers.beside
        if beside is not None and beside.others:
            return None
        if handle.writable and not self._publish(handle.file, self._engine):
            return None
        return b""

    def rename(self, parent: int, body: memoryview, _uid: int, _gid: int) -> bytes | None:
        (target,) = protocol.RENAME_IN.unpack_from(body)
        beside = self._handlers.beside
        if beside is not None and beside.others:
            return None
        old, new, _ = bytes(body[_RENAME:]).split(b"\0", 2)
        return None if self._rename((parent, old), (target, new)) is None else b""

    def release(self, ino: int, body: memoryview) -> bool:
        """Returns whether it is done: by its handle nothing is locked, and nothing was written that
        is not recorded."""
        fh, _, flags, _ = protocol.RELEASE_IN.unpack_from(body)
        beside = self._handlers.beside
        is_told = beside is not None and bool(beside.others)
        if flags or not self._release(fh, only_read=is_told):
            return False
        if ino in self._orphans.held:
            self._orphans.let_go(ino)
        return True
