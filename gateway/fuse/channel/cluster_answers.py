"""The hot questions about names and directories that a mount of a cluster answers by plain
functions.

A block that is written costs three looks at its directory's attributes, two names that are not
there and one attribute that is not set. Like `plain_answers`, each needs one look at the metadata
replica; names of a strict namespace, what is there, and what the replica may be too old for go the
general way, by `Handlers`.
"""

import errno
import stat
from typing import Final

from gateway.fuse.channel.plain_answers import CAPABILITY, Answer, is_plain_name
from gateway.fuse.codec import protocol
from gateway.fuse.codec.protocol import Op
from gateway.fuse.operations import Operations
from kvfs.cluster.coherence import CACHE_S, Coherence
from kvfs.meta import keys
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.records import NAMESPACE_SHIFT, ROOT_INODE, unpack_inode
from kvfs.tree.inodes import later_times

_SHIFT: Final = NAMESPACE_SHIFT
_ABSENT: Final = protocol.absence(0.0)
"""No name here: other nodes may make one, and tell nobody first (`Coherence.absence_s`)."""
_NUMBER: Final = 8
"""Bytes of an entry's value; a record has more."""


class ClusterAnswers:
    """The plain answers of one mount."""

    def __init__(
        self, operations: Operations, engine: EmbeddedEngine, coherence: Coherence
    ) -> None:
        """`engine`: the metadata replica's file."""
        self._first = engine.first_now
        self._coherence = coherence
        self._is_local = coherence.is_local
        self._finder = None if operations.names is None else operations.names.finder
        self._missed = operations.misses.missed
        self._overtaken = operations.overtaken_opens

    def table(self) -> dict[int, Answer]:
        """Returns the answers by opcode."""
        return {Op.LOOKUP: self.lookup, Op.GETATTR: self.getattr, Op.GETXATTR: self.getxattr}

    def lookup(self, parent: int, body: memoryview, _uid: int, _gid: int) -> bytes | None:
        """Answers for a name that is not in a directory of a cache, nor said to be on another
        node."""
        name, space = bytes(body[:-1]), parent >> _SHIFT
        if parent == ROOT_INODE or not is_plain_name(name) or self._overtaken.is_any:
            return None
        is_own = self._is_local(space)
        if not is_own and not self._is_believed(space):
            return None
        entry = keys.ENTRY + keys.pack_u64(parent) + name
        found = self._first(entry, entry + b"/", keys.INODE + keys.pack_u64(parent))
        if found is None or len(found) == _NUMBER:  # the directory is gone, or it has the name
            return None
        if not is_own:
            self._missed(entry)
            return protocol.absence(self._coherence.absence_s(parent))
        if self._finder is None or self._finder.is_claimed(parent, name):
            return None
        self._missed(entry)
        return _ABSENT

    def _is_believed(self, namespace_id: int) -> bool:
        """Returns whether names of a shared namespace are those of the metadata replica now."""
        coherence = self._coherence
        return not coherence.is_strict(namespace_id) and coherence.is_believed(namespace_id)

    def getattr(self, ino: int, _body: memoryview, _uid: int, _gid: int) -> bytes | None:
        """Answers for a directory."""
        packed, seconds = keys.pack_u64(ino), CACHE_S
        if not self._is_local(ino >> _SHIFT):
            seconds = self._coherence.attributes_s(ino)
        value = self._first(keys.INODE + packed) if seconds else None
        if value is None:
            return None
        inode = unpack_inode(value)
        if not stat.S_ISDIR(inode.mode):
            return None
        later_times(inode, self._first(keys.TIMES + packed))
        return protocol.attr_reply_for(ino, inode, seconds)

    def getxattr(self, ino: int, body: memoryview, _uid: int, _gid: int) -> int | None:
        """Answers the kernel's question before a write for a file without capabilities."""
        if bytes(body[8:-1]) != CAPABILITY or not self._coherence.is_believed(ino >> _SHIFT):
            return None
        is_there = self._first(keys.XATTR + keys.pack_u64(ino) + CAPABILITY) is not None
        return None if is_there else errno.ENODATA
