"""How much room there is: the disk, the store's limit, a namespace's capacity, whichever is least.

Pure: it is told the facts. Sizes are bytes.
"""

import os
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvfs.namespace.spaces import Listed
from kvfs.units import Capacity

BLOCK_SIZE: Final = 4096
"""What statvfs says of blocks: clients choose O_DIRECT by it."""
_NAME_MAX: Final = 255


class Space(NamedTuple):
    """Room in one place."""

    used_bytes: int
    free_bytes: int
    """What can still be written: never more than any of the limits leaves."""
    limit_bytes: int
    """What may be held at most, if the disk had the room."""
    inodes: int
    free_inodes: int

    def as_statvfs(self) -> os.statvfs_result:
        """For statvfs(2). The size is what is used and what is free: space that others on the disk
        have taken is neither."""
        used = -(-self.used_bytes // BLOCK_SIZE)
        free = self.free_bytes // BLOCK_SIZE
        files = self.inodes + self.free_inodes
        return os.statvfs_result(
            (
                BLOCK_SIZE, BLOCK_SIZE, used + free, free, free,
                files, self.free_inodes, self.free_inodes, 0, _NAME_MAX,
            )
        )  # fmt: skip


def space_of(
    disk: os.statvfs_result,
    capacity: Capacity,
    namespaces: Sequence[Listed],
    namespace_id: int = 0,
) -> Space:
    """The room in a namespace (0: in the store as a whole)."""
    limit = capacity.of(disk.f_blocks * disk.f_frsize)
    used = sum(each.usage.bytes for each in namespaces)
    inodes = sum(each.usage.inodes for each in namespaces)
    free = max(0, min(limit - used, disk.f_bavail * disk.f_frsize))
    for each in namespaces:
        if each.id == namespace_id:
            own, limit = each.namespace.capacity, each.namespace.capacity or limit
            used, inodes = each.usage.bytes, each.usage.inodes
            free = max(0, min(own - used, free)) if own else free
    return Space(used, free, limit, inodes, disk.f_favail)
