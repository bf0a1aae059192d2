"""The requests by which a block is stored, answered by plain functions.

A create, a close and a rename change the engine, in memory, and wait for nothing in the common
case: on a lone node, and in a cluster where other nodes hear of them later (a cache) or not at all
(a peer namespace). As with `plain_answers`, a coroutine for each would cost more than the work;
whatever has to wait goes the general way, by `Handlers`, which does the same and more.

Invariants
- Nothing is changed before it is known that the answer is given here. Where other connections of
  the node have to hear of a change (`Neighbour.others`), it is given there.
- An error of the work itself is the request's: it is raised here as there.
"""

import os
import stat
from collections.abc import Coroutine
from typing import Any, Final

from gateway.fuse.channel.handlers import Handlers, Registrar
from gateway.fuse.channel.plain_answers import Answer
from gateway.fuse.codec import protocol
from gateway.fuse.codec.protocol import Op
from gateway.fuse.operations import Operations
from kvfs.base.errors import Exists
from kvfs.meta.records import NAMESPACE_SHIFT, ROOT_INODE
from kvfs.vfs.names.visible_files import NoDataFile

_CREATE: Final = protocol.CREATE_IN.size
_RENAME: Final = protocol.RENAME_IN.size


class PlainChanges:
    """The plain functions of one mount."""

    def __init__(
        self,
        operations: Operations,
        registrar: Registrar,
        handlers: Handlers,
    ) -> None:
        self._handlers = handlers
        self._coherence = operations.coherence
        self._is_one = handlers.inodes.is_one
        self._forget_attributes = operations.open_files.forget_attributes
        self._has_locks = operations.locks is not None
        self._check_locks = operations.check_locks
        self._may_lag = operations.volume.may_lag
        self._is_local = operations.engine.is_local
        self._admission = operations.node.evictor
        self._allocate = operations.volume.allocate_now
        self._make_file = operations.new_inodes.make_file_now
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

    def create(
        self, parent: int, body: memoryview, uid: int, gid: int
    ) -> bytes | Coroutine[Any, Any, bytes] | None:
        namespace_id = parent >> NAMESPACE_SHIFT
        admission, beside = self._admission, self._handlers.beside
        if parent == ROOT_INODE or admission.must_wait(namespace_id):
            return None
        if beside is not None and beside.others:
            return None
        flags, mode, _, _ = protocol.CREATE_IN.unpack_from(body)
        coherence = self._coherence
        if coherence is not None and not self._is_made_alone(parent, flags):
            return None
        ino = self._allocate(namespace_id)
        if not ino or admission.pressed(namespace_id):
            return None
        name = bytes(body[_CREATE:-1])
        mode = stat.S_IFREG | stat.S_IMODE(mode)
        try:
            is_reserved = coherence is not None and bool(flags & os.O_EXCL)
            made = self._make_file(parent, name, mode, flags, ino, uid, gid, is_kept=is_reserved)
        except NoDataFile as failed:
            return failed.undo()
        except Exists:
            if flags & os.O_EXCL:
                raise
            return None
        if made is None:
            return None
        handle, inode = made
        self._looked_up(ino)
        opened = protocol.OPEN_OUT.pack(handle.fh, *self._flags(handle))
        if coherence is None:
            return protocol.entry(ino, inode) + opened
        seconds = coherence.attributes_s(ino)  # a file's names may be believed for as long
        return protocol.entry_for(ino, inode, seconds, seconds) + opened

    def _is_made_alone(self, parent: int, flags: int) -> bool:
        """Returns whether this node may make a file without asking other nodes. Raises NoLocks."""
        self._check_locks(parent)
        if not self._may_lag(parent):
            return False
        return not flags & os.O_EXCL or self._is_local(parent >> NAMESPACE_SHIFT)

    def flush(self, ino: int, body: memoryview, _uid: int, _gid: int) -> bytes | None:
        handle = self._handle(protocol.FLUSH_IN.unpack_from(body)[0])
        beside = self._handlers.beside
        if (beside is not None and beside.others) or self._has_locks:
            return None
        if self._coherence is not None and not self._is_one(ino):
            return None
        if handle.writable and not self._publish(handle.file):
            return None
        return b""

    def rename(self, parent: int, body: memoryview, _uid: int, _gid: int) -> bytes | None:
        (target,) = protocol.RENAME_IN.unpack_from(body)
        beside = self._handlers.beside
        if beside is not None and beside.others:
            return None
        old, new, _ = bytes(body[_RENAME:]).split(b"\0", 2)
        replaced = self._rename((parent, old), (target, new))
        if replaced is None:
            return None
        if replaced and not self._is_one(replaced):
            self._forget_attributes(replaced)
        return b""

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
