"""The FUSE kernel protocol, as far as the fast path speaks it.

Source of every layout and number: Linux include/uapi/linux/fuse.h, protocol 7.45. Little-endian
layouts stand for the native ones (the fast path refuses big-endian machines). Messages that the
server sends unasked are in `kvfs.vfs.kernel_notify`. Pure: no I/O, no state."""

import enum
import stat
import struct
from typing import Final

from kvfs.meta.records import Flag, Inode


class Op(enum.IntEnum):
    """Request opcodes."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    GETLK = 31
    SETLK = 32
    SETLKW = 33
    ACCESS = 34
    CREATE = 35
    INTERRUPT = 36
    BMAP = 37
    DESTROY = 38
    IOCTL = 39
    POLL = 40
    BATCH_FORGET = 42
    FALLOCATE = 43
    READDIRPLUS = 44
    RENAME2 = 45
    LSEEK = 46
    COPY_FILE_RANGE = 47
    SYNCFS = 50
    TMPFILE = 51
    STATX = 52


class Init:
    """INIT flags; bit 32 and above travel in `flags2`."""

    ASYNC_READ: Final = 1 << 0
    POSIX_LOCKS: Final = 1 << 1
    ATOMIC_O_TRUNC: Final = 1 << 3
    EXPORT_SUPPORT: Final = 1 << 4
    BIG_WRITES: Final = 1 << 5
    FLOCK_LOCKS: Final = 1 << 10
    DO_READDIRPLUS: Final = 1 << 13
    READDIRPLUS_AUTO: Final = 1 << 14
    ASYNC_DIO: Final = 1 << 15
    PARALLEL_DIROPS: Final = 1 << 18
    MAX_PAGES: Final = 1 << 22
    CACHE_SYMLINKS: Final = 1 << 23
    EXPLICIT_INVAL_DATA: Final = 1 << 25
    HANDLE_KILLPRIV_V2: Final = 1 << 28
    INIT_EXT: Final = 1 << 30
    DIRECT_IO_ALLOW_MMAP: Final = 1 << 36
    PASSTHROUGH: Final = 1 << 37


class Fopen:
    """Flags of an OPEN, CREATE or OPENDIR reply."""

    DIRECT_IO: Final = 1 << 0
    KEEP_CACHE: Final = 1 << 1
    CACHE_DIR: Final = 1 << 3
    NOFLUSH: Final = 1 << 5
    PASSTHROUGH: Final = 1 << 7


class Fattr:
    """The fields that a SETATTR request sets."""

    MODE: Final = 1 << 0
    UID: Final = 1 << 1
    GID: Final = 1 << 2
    SIZE: Final = 1 << 3
    ATIME: Final = 1 << 4
    MTIME: Final = 1 << 5
    FH: Final = 1 << 6
    ATIME_NOW: Final = 1 << 7
    MTIME_NOW: Final = 1 << 8
    CTIME: Final = 1 << 10
    KILL_SUIDGID: Final = 1 << 11


OPEN_KILL_SUIDGID: Final = 1
WRITE_KILL_SUIDGID: Final = 1 << 2
FSYNC_FDATASYNC: Final = 1
RELEASE_FLOCK_UNLOCK: Final = 1 << 1
LK_FLOCK: Final = 1

IN_HEADER: Final = struct.Struct("<IIQQIIIHH")
"""len, opcode, unique, nodeid, uid, gid, pid, extension length, padding."""
OUT_HEADER: Final = struct.Struct("<IiQ")
"""len, error, unique."""

INIT_IN: Final = struct.Struct("<IIIII")  # major minor max_readahead flags flags2
INIT_OUT: Final = struct.Struct("<IIIIHHIIHHIIH22x")
FORGET_IN: Final = struct.Struct("<Q")
BATCH_FORGET_IN: Final = struct.Struct("<II")
FORGET_ONE: Final = struct.Struct("<QQ")
SETATTR_IN: Final = struct.Struct("<IIQQQqqqIIIIIIII")
OPEN_IN: Final = struct.Struct("<II")
CREATE_IN: Final = struct.Struct("<IIII")
MKNOD_IN: Final = struct.Struct("<IIII")  # mode rdev umask padding
MKDIR_IN: Final = struct.Struct("<II")
RENAME_IN: Final = struct.Struct("<Q")
RENAME2_IN: Final = struct.Struct("<QII")
LINK_IN: Final = struct.Struct("<Q")
READ_IN: Final = struct.Struct("<QQIIQII")
WRITE_IN: Final = struct.Struct("<QQIIQII")
RELEASE_IN: Final = struct.Struct("<QIIQ")  # fh flags release_flags lock_owner
FLUSH_IN: Final = struct.Struct("<QIIQ")  # fh unused padding lock_owner
FSYNC_IN: Final = struct.Struct("<QII")
FALLOCATE_IN: Final = struct.Struct("<QQQII")
LSEEK_IN: Final = struct.Struct("<QQII")
LK_IN: Final = struct.Struct("<QQQQIIII")
"""fh, owner, then a LOCK, flags, padding."""
INTERRUPT_IN: Final = struct.Struct("<Q")
COPY_IN: Final = struct.Struct("<QQQQQQQ")

ENTRY_OUT: Final = struct.Struct("<QQQQII")
"""nodeid, generation, entry and attribute validity in seconds, the same in nanoseconds; an ATTR
follows."""
ATTR_OUT: Final = struct.Struct("<QII")
"""Attribute validity in seconds and nanoseconds, padding; an ATTR follows."""
ATTR: Final = struct.Struct("<QQQqqqIIIIIIIIII")
"""ino size blocks atime mtime ctime, their nanoseconds, mode nlink uid gid rdev blksize flags."""
STATX_OUT: Final = struct.Struct("<QII16x")
"""Attribute validity in seconds and nanoseconds, flags; a STATX follows."""
STATX: Final = struct.Struct("<IIQIIIHxxQQQQ" + "qIxxxx" * 4 + "IIII112x")
"""mask blksize attributes nlink uid gid mode ino size blocks attributes_mask, seconds and
nanoseconds of atime, btime, ctime, mtime, then rdev and dev, major and minor."""
OPEN_OUT: Final = struct.Struct("<QIi")
"""fh, open flags, backing id."""
SETXATTR_IN: Final = struct.Struct("<II")
"""Size of the value, flags; the name and the value follow (without SETXATTR_EXT)."""
WRITE_OUT: Final = struct.Struct("<II")
LSEEK_OUT: Final = struct.Struct("<Q")
STATFS_OUT: Final = struct.Struct("<QQQQQIIII24x")
LOCK: Final = struct.Struct("<QQII")
"""start, end (included), type, pid."""
DIRENT: Final = struct.Struct("<QQII")
"""ino, offset of the next entry, length of the name, type; the name follows, padded to 8 bytes."""

PAGE: Final = 4096
MAX_PAGES: Final = 256
MAX_WRITE: Final = MAX_PAGES * PAGE
BUFFER_BYTES: Final = MAX_WRITE + PAGE
MINOR: Final = 40
"""The protocol minor that the reply to INIT names: the first with passthrough."""
NO_OPENDIR_MINOR: Final = 29
"""The first whose kernel takes ENOSYS to OPENDIR for every directory (Linux 5.1)."""
NAME_MAX: Final = 255
BLOCK_SIZE: Final = 4096

LONG_S: Final = 3600
"""Validity of attributes, entries and absences that change only through KVFS, which then tells the
kernel."""
UNSEALED_S: Final = 1
"""Validity of the attributes of a file whose data may change without a request (a shared
mapping)."""

_SECOND = 1_000_000_000
_BASIC_STATS: Final = 0x7FF
_BTIME: Final = 0x800
_SET_IDS: Final = stat.S_ISUID | stat.S_ISGID
_pack_attr = ATTR.pack
_pack_entry = ENTRY_OUT.pack
_pack_attr_out = ATTR_OUT.pack
NO_ENTRY: Final = bytes(ENTRY_OUT.pack(0, 0, LONG_S, 0, 0, 0)) + bytes(ATTR.size)
"""The reply to a LOOKUP that found nothing, which the kernel may remember."""


def attr(ino: int, inode: Inode) -> bytes:
    """`struct fuse_attr`."""
    atime, atime_ns = divmod(inode.atime_ns, _SECOND)
    mtime, mtime_ns = divmod(inode.mtime_ns, _SECOND)
    ctime, ctime_ns = divmod(inode.ctime_ns, _SECOND)
    return _pack_attr(
        ino,
        inode.size,
        inode.blocks,
        atime,
        mtime,
        ctime,
        atime_ns,
        mtime_ns,
        ctime_ns,
        inode.mode,
        inode.nlink,
        inode.uid,
        inode.gid,
        inode.rdev,
        BLOCK_SIZE,
        0,
    )


def attr_seconds(inode: Inode) -> int:
    """Returns how long the kernel may believe these attributes: not at all if the next write, which
    the server may not see, clears set-id bits."""
    if stat.S_ISREG(inode.mode) and not inode.flags & Flag.SEALED:
        return 0 if inode.mode & _SET_IDS else UNSEALED_S
    return LONG_S


def entry(ino: int, inode: Inode) -> bytes:
    """`struct fuse_entry_out`."""
    return _pack_entry(ino, 0, LONG_S, attr_seconds(inode), 0, 0) + attr(ino, inode)


def absence(seconds: float) -> bytes:
    """Like `NO_ENTRY`, to be remembered for so many seconds."""
    whole = int(seconds)
    nanoseconds = int((seconds - whole) * _SECOND)
    return bytes(_pack_entry(0, 0, whole, 0, nanoseconds, 0)) + bytes(ATTR.size)


def entry_for(ino: int, inode: Inode, entry_s: float, attributes_s: float) -> bytes:
    """Like `entry`, to be believed for so many seconds."""
    attributes_s = min(attributes_s, attr_seconds(inode))
    whole, attributes_whole = int(entry_s), int(attributes_s)
    return _pack_entry(
        ino,
        0,
        whole,
        attributes_whole,
        int((entry_s - whole) * _SECOND),
        int((attributes_s - attributes_whole) * _SECOND),
    ) + attr(ino, inode)


def attr_reply_for(ino: int, inode: Inode, seconds: float) -> bytes:
    """Like `attr_reply`, to be believed for so many seconds."""
    seconds = min(seconds, attr_seconds(inode))
    whole = int(seconds)
    return _pack_attr_out(whole, int((seconds - whole) * _SECOND), 0) + attr(ino, inode)


def attr_reply(ino: int, inode: Inode) -> bytes:
    """`struct fuse_attr_out`."""
    return _pack_attr_out(attr_seconds(inode), 0, 0) + attr(ino, inode)


def statx_reply(ino: int, inode: Inode, seconds: float) -> bytes:
    """`struct fuse_statx_out`: like `attr_reply_for`, with the time at which the inode was made, if
    known."""
    seconds = min(seconds, attr_seconds(inode))
    whole = int(seconds)
    rdev = inode.rdev
    times = (inode.atime_ns, inode.btime_ns, inode.ctime_ns, inode.mtime_ns)
    return STATX_OUT.pack(whole, int((seconds - whole) * _SECOND), 0) + STATX.pack(
        _BASIC_STATS | (_BTIME if inode.btime_ns else 0),
        BLOCK_SIZE,
        0,
        inode.nlink,
        inode.uid,
        inode.gid,
        inode.mode,
        ino,
        inode.size,
        inode.blocks,
        0,
        *(part for each in times for part in divmod(each, _SECOND)),
        rdev >> 8 & 0xFFF,
        rdev & 0xFF | rdev >> 12 & 0xFFF00,
        0,
        0,
    )


def dirent(ino: int, offset: int, name: bytes, mode: int) -> bytes:
    """`struct fuse_dirent` with its name, padded."""
    return DIRENT.pack(ino, offset, len(name), mode >> 12) + name + bytes(-len(name) % 8)


ENTRY_BYTES: Final = ENTRY_OUT.size + ATTR.size
BARE_ENTRY: Final = bytes(ENTRY_BYTES)
"""An entry of READDIRPLUS that the kernel must not look up (nodeid 0)."""
