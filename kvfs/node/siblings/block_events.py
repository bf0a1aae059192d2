"""The meaning of a change of a file's record for its copies. Pure.

| before | after | event |
|---|---|---|
| none, or not sealed | sealed | SEALED |
| sealed under another name | sealed | RENAMED |
| it had a name | evicted or lost | EVICTED |
| anything else | anything else | NONE: among others a removal, which takes all copies |
"""

from enum import Enum

from kvfs.meta.records import Flag, unpack_inode
from kvfs.tree import lifecycle


class BlockEvent(Enum):
    """An event in the life of a block."""

    NONE = 0
    SEALED = 1
    RENAMED = 2
    EVICTED = 3


def event_of(old: bytes | None, new: bytes) -> BlockEvent:
    """Returns the event of a change from one packed record (None: there was none) to another."""
    after = unpack_inode(new)
    before = None if old is None else unpack_inode(old)
    if not after.nlink:
        is_gone = before is not None and before.nlink and lifecycle.reason_of(after) is not None
        return BlockEvent.EVICTED if is_gone else BlockEvent.NONE
    if not after.flags & Flag.SEALED:
        return BlockEvent.NONE
    if before is None or not before.flags & Flag.SEALED or before.version != after.version:
        return BlockEvent.SEALED
    if (before.parent, before.name) != (after.parent, after.name):
        return BlockEvent.RENAMED
    return BlockEvent.NONE
