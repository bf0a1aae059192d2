"""A client's description of a file, directory or anything else with a name."""

import stat
from os import stat_result

import msgspec

from kvfs.meta.records import Flag, Inode


class Stat(msgspec.Struct, frozen=True, kw_only=True):
    """One inode. Times are nanoseconds since the epoch."""

    name: bytes
    """The last part of the path that led here; empty for the root."""
    ino: int
    mode: int
    """File type and permission bits, as in `os.stat_result.st_mode`."""
    nlink: int
    uid: int
    gid: int
    size: int
    """Bytes; of a symbolic link, the length of its target."""
    blocks: int
    """Blocks of 512 bytes that it takes on disk."""
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    target: bytes = b""
    """The target of a symbolic link."""
    checksum: bytes = b""
    """xxh3-128 over those of the chunks of 4 MiB; empty until computed, soon after the last
    write."""

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_symlink(self) -> bool:
        return stat.S_ISLNK(self.mode)

    @property
    def key(self) -> bytes:
        """Its place among the names of its directory: `Client.list` goes on after it."""
        return self.name + b"/" if self.is_directory else self.name


def describe(name: bytes, ino: int, inode: Inode, data: stat_result | None) -> Stat:
    """Returns the status from the record, and from the data file if that is the truth about size
    and times."""
    sealed = inode.flags & Flag.SEALED
    truth = data if data is not None and not sealed else None
    # The sealer changes the data file's ctime alone.
    is_written = truth and (truth.st_size, truth.st_mtime_ns) != (inode.size, inode.mtime_ns)
    return Stat(
        name=name,
        ino=ino,
        mode=inode.mode,
        nlink=inode.nlink,
        uid=inode.uid,
        gid=inode.gid,
        size=truth.st_size if truth else inode.size,
        blocks=truth.st_blocks if truth else inode.blocks,
        atime_ns=truth.st_atime_ns if truth else inode.atime_ns,
        mtime_ns=truth.st_mtime_ns if truth else inode.mtime_ns,
        ctime_ns=max(truth.st_ctime_ns, inode.ctime_ns) if truth and is_written else inode.ctime_ns,
        target=inode.target,
        checksum=inode.checksum,
    )
