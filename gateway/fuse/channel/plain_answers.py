"""The hot requests of a lone node's mount, answered by plain functions.

Look-ups, attributes, opens for reading and the attribute that each write asks for need one look at
the engine, in memory, and wait for nothing; nor does the release of a handle that only read. A
coroutine, a transaction's object and an exception for each would cost more than the look. Every
uncommon case goes the general way, by `Handlers`, which gives the same answers and more.

Invariants
- Nothing is changed before it is known that the answer is given here.
- An expected result is a value: an absent name is a reply, an absent attribute its errno.
- It serves lone nodes only: other nodes' changes are the general way's subject.
"""

import errno
import os
import stat
from collections.abc import Callable, Coroutine
from typing import Any, Final

from gateway.fuse.channel.handlers import Registrar
from gateway.fuse.codec import protocol
from gateway.fuse.codec.protocol import Op
from gateway.fuse.operations import Operations
from kvfs.meta import keys
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.records import unpack_inode
from kvfs.tree.namespaces import MAX_NAME

Answer = Callable[[int, memoryview, int, int], bytes | int | Coroutine[Any, Any, bytes] | None]
"""A function of inode, body and user that returns a reply's body or an errno; a coroutine that does
the rest and returns a body; None: the general way answers."""
DOTS: Final = (b".", b"..")
_NEEDS_MORE: Final = os.O_ACCMODE | os.O_TRUNC
CAPABILITY: Final = b"security.capability"
"""The attribute that the kernel asks for before a write."""


def is_plain_name(name: bytes) -> bool:
    """Returns whether a name stands in the engine as it is looked up, if it is there."""
    return len(name) <= MAX_NAME and b"%" not in name and name not in DOTS


class PlainAnswers:
    """The plain answers of one mount."""

    def __init__(
        self, operations: Operations, engine: EmbeddedEngine, registrar: Registrar
    ) -> None:
        self._first = engine.first_now
        self._live = operations.attributes.live
        self._present = operations.attributes.present
        self._looked_up = operations.holders.looked_up
        self._missed = operations.misses.missed
        self._known = operations.known
        self._open_files = operations.open_files
        self._flags = registrar.flags

    def table(self) -> dict[int, Answer]:
        """Returns the answers by opcode."""
        return {
            Op.LOOKUP: self.lookup,
            Op.GETATTR: self.getattr,
            Op.OPEN: self.open,
            Op.GETXATTR: self.getxattr,
        }

    def lookup(self, parent: int, body: memoryview, _uid: int, _gid: int) -> bytes | None:
        name = bytes(body[:-1])
        if len(name) > MAX_NAME or b"%" in name or name in DOTS:  # `is_plain_name`, without a call
            return None
        entry = keys.ENTRY + keys.pack_u64(parent) + name
        packed = self._first(entry, entry + b"/")
        if packed is None:
            self._missed(entry)
            return protocol.NO_ENTRY
        value = self._first(keys.INODE + packed)
        if value is None:
            return None
        ino, inode = int.from_bytes(packed), unpack_inode(value)
        if not inode.nlink or (stat.S_ISDIR(inode.mode) and ino not in self._known):
            return None
        inode = self._live(ino, inode)
        self._looked_up(ino)
        return protocol.entry(ino, inode)

    def getattr(self, ino: int, _body: memoryview, _uid: int, _gid: int) -> bytes | None:
        value = self._first(keys.INODE + keys.pack_u64(ino))
        if value is None:
            return None
        inode = unpack_inode(value)
        if stat.S_ISREG(inode.mode):
            file = self._open_files.get(ino)
            if file is not None and file.armed:
                return None
            inode = self._present(ino, inode)
        return protocol.attr_reply(ino, inode)

    def open(self, ino: int, body: memoryview, uid: int, _gid: int) -> bytes | None:
        flags, fuse_flags = protocol.OPEN_IN.unpack_from(body)
        if flags & _NEEDS_MORE or fuse_flags:
            return None
        open_files = self._open_files
        if not open_files.is_plain(ino):
            return None
        handle = open_files.open_kept(ino, flags, uid)
        if handle is None:
            value = self._first(keys.INODE + keys.pack_u64(ino))
            if value is None:
                return None
            handle = open_files.open_first(ino, unpack_inode(value), flags, uid)
            if handle is None:
                return None
        return protocol.OPEN_OUT.pack(handle.fh, *self._flags(handle))

    def getxattr(self, ino: int, body: memoryview, _uid: int, _gid: int) -> int | None:
        """Answers the kernel's question before a write for a file without capabilities; None for
        any other."""
        if bytes(body[8:-1]) != CAPABILITY:
            return None
        is_there = self._first(keys.XATTR + keys.pack_u64(ino) + CAPABILITY) is not None
        return None if is_there else errno.ENODATA
