"""Structures of NFS version 3 (RFC 1813): what calls take and replies tell."""

import enum
from dataclasses import dataclass
from typing import Final

from tests.nfs.xdr import Packer, Unpacker

LONGEST_HANDLE: Final = 64
VERIFIER_BYTES: Final = 8


class Kind(enum.IntEnum):
    REGULAR = 1
    DIRECTORY = 2
    BLOCK = 3
    CHARACTER = 4
    SYMLINK = 5
    SOCKET = 6
    FIFO = 7


class Stability(enum.IntEnum):
    UNSTABLE = 0
    DATA_SYNC = 1
    FILE_SYNC = 2


class Access(enum.IntFlag):
    READ = 1
    LOOKUP = 2
    MODIFY = 4
    EXTEND = 8
    DELETE = 16
    EXECUTE = 32
    ALL = 63


class Server:
    """A time that is the server's own (SERVER)."""


SERVER: Final = Server()


@dataclass(frozen=True, order=True)
class Time:
    seconds: int
    nanoseconds: int = 0

    @property
    def ns(self) -> int:
        return self.seconds * 1_000_000_000 + self.nanoseconds


@dataclass(frozen=True)
class Attributes:
    kind: Kind
    mode: int
    nlink: int
    uid: int
    gid: int
    size: int
    used: int
    rdev: tuple[int, int]
    fsid: int
    fileid: int
    atime: Time
    mtime: Time
    ctime: Time


@dataclass(frozen=True)
class Wcc:
    """A file before and after a call, as weak cache consistency wants it; either may be missing."""

    size_before: int | None
    mtime_before: Time | None
    ctime_before: Time | None
    after: Attributes | None


@dataclass(frozen=True)
class SetAttributes:
    """What stays None is left as it is."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime: Time | Server | None = None
    mtime: Time | Server | None = None


@dataclass(frozen=True)
class Found:
    """`attributes` are None where the server told none; so is the handle of a new file."""

    handle: bytes
    attributes: Attributes | None


@dataclass(frozen=True)
class Data:
    data: bytes
    eof: bool
    attributes: Attributes | None


@dataclass(frozen=True)
class Written:
    count: int
    committed: Stability
    verifier: bytes
    wcc: Wcc


@dataclass(frozen=True)
class Entry:
    """Of a READDIR; READDIRPLUS tells attributes and handle too."""

    fileid: int
    name: str
    cookie: int
    attributes: Attributes | None = None
    handle: bytes | None = None


@dataclass(frozen=True)
class Listing:
    entries: list[Entry]
    verifier: bytes
    eof: bool


@dataclass(frozen=True)
class Space:
    """FSSTAT."""

    total_bytes: int
    free_bytes: int
    available_bytes: int
    total_files: int
    free_files: int
    available_files: int
    invariant_s: int


@dataclass(frozen=True)
class Limits:
    """FSINFO."""

    read_max: int
    read_preferred: int
    read_multiple: int
    write_max: int
    write_preferred: int
    write_multiple: int
    readdir_preferred: int
    largest_file: int
    time_delta: Time
    properties: int


@dataclass(frozen=True)
class PathLimits:
    """PATHCONF."""

    link_max: int
    name_max: int
    no_trunc: bool
    chown_restricted: bool
    case_insensitive: bool
    case_preserving: bool


# ---- to bytes


def pack_time(packer: Packer, value: Time) -> None:
    packer.uint(value.seconds).uint(value.nanoseconds)


def pack_attributes(packer: Packer, wanted: SetAttributes) -> None:
    packer.optional(wanted.mode, Packer.uint)
    packer.optional(wanted.uid, Packer.uint)
    packer.optional(wanted.gid, Packer.uint)
    packer.optional(wanted.size, Packer.uint64)
    _pack_set_time(packer, wanted.atime)
    _pack_set_time(packer, wanted.mtime)


def _pack_set_time(packer: Packer, value: Time | Server | None) -> None:
    if value is None:
        packer.uint(0)
    elif isinstance(value, Server):
        packer.uint(1)
    else:
        pack_time(packer.uint(2), value)


# ---- from bytes


def unpack_time(reply: Unpacker) -> Time:
    return Time(reply.uint(), reply.uint())


def unpack_attributes(reply: Unpacker) -> Attributes:
    return Attributes(
        kind=Kind(reply.uint()),
        mode=reply.uint(),
        nlink=reply.uint(),
        uid=reply.uint(),
        gid=reply.uint(),
        size=reply.uint64(),
        used=reply.uint64(),
        rdev=(reply.uint(), reply.uint()),
        fsid=reply.uint64(),
        fileid=reply.uint64(),
        atime=unpack_time(reply),
        mtime=unpack_time(reply),
        ctime=unpack_time(reply),
    )


def unpack_maybe(reply: Unpacker) -> Attributes | None:
    return reply.optional(unpack_attributes)


def unpack_handle(reply: Unpacker) -> bytes:
    return reply.opaque(LONGEST_HANDLE)


def unpack_wcc(reply: Unpacker) -> Wcc:
    size, mtime, ctime = reply.optional(_before) or (None, None, None)
    return Wcc(size, mtime, ctime, unpack_maybe(reply))


def _before(reply: Unpacker) -> tuple[int, Time, Time]:
    return reply.uint64(), unpack_time(reply), unpack_time(reply)


def unpack_entry(reply: Unpacker) -> Entry:
    return Entry(reply.uint64(), reply.string(), reply.uint64())


def unpack_entry_plus(reply: Unpacker) -> Entry:
    return Entry(
        fileid=reply.uint64(),
        name=reply.string(),
        cookie=reply.uint64(),
        attributes=unpack_maybe(reply),
        handle=reply.optional(unpack_handle),
    )


def unpack_space(reply: Unpacker) -> Space:
    return Space(
        total_bytes=reply.uint64(),
        free_bytes=reply.uint64(),
        available_bytes=reply.uint64(),
        total_files=reply.uint64(),
        free_files=reply.uint64(),
        available_files=reply.uint64(),
        invariant_s=reply.uint(),
    )


def unpack_limits(reply: Unpacker) -> Limits:
    return Limits(
        read_max=reply.uint(),
        read_preferred=reply.uint(),
        read_multiple=reply.uint(),
        write_max=reply.uint(),
        write_preferred=reply.uint(),
        write_multiple=reply.uint(),
        readdir_preferred=reply.uint(),
        largest_file=reply.uint64(),
        time_delta=unpack_time(reply),
        properties=reply.uint(),
    )


def unpack_path_limits(reply: Unpacker) -> PathLimits:
    return PathLimits(
        link_max=reply.uint(),
        name_max=reply.uint(),
        no_trunc=reply.boolean(),
        chown_restricted=reply.boolean(),
        case_insensitive=reply.boolean(),
        case_preserving=reply.boolean(),
    )
