"""The facts about an object."""

import msgspec

from kvfs.meta.records import Inode


class Facts(msgspec.Struct, frozen=True):
    """One version of an object, as one transaction saw it."""

    key: bytes
    ino: int
    inode: Inode
    etag: str
    """The ETag without quotes; empty for a delete marker."""
    metadata: dict[str, str]
    """The metadata by the names of `object_attributes`."""
    version: str
    """Its id; "null" if it was written while the bucket kept no versions."""
    latest: bool
    delete_marker: bool
    data_mtime_ns: int = 0
    """The mtime of the data file, if that was read."""

    @property
    def size(self) -> int:
        return self.inode.size

    @property
    def mtime_ns(self) -> int:
        return self.inode.mtime_ns
