"""Attributes of NFS version 4 (RFC 7530, chapter 5): sets of them as bitmaps and lists of values.

An attribute is a value of this module (`SIZE`), and what is told is asked by it: `told[SIZE]` is a
number, `told[OWNER]` a text.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar, cast

from tests.nfs.v3_types import Kind, Server, Time
from tests.nfs.xdr import Packer, Unpacker, XdrError

T = TypeVar("T")

_LONGEST_HANDLE: Final = 128
_WORD: Final = 32


@dataclass(frozen=True)
class Setting:
    """A value to set or to compare with, encoded."""

    number: int
    value: bytes


@dataclass(frozen=True, eq=False)
class Attribute(Generic[T]):
    number: int
    name: str
    unpack: Callable[[Unpacker], T]
    pack: Callable[[Packer, T], object]

    def to(self, value: T) -> Setting:
        packer = Packer()
        self.pack(packer, value)
        return Setting(self.number, bytes(packer))


_KNOWN: Final[dict[int, Attribute[Any]]] = {}


class Attributes:
    """What a server told."""

    def __init__(self, values: dict[int, object]) -> None:
        self._values = values

    def __getitem__(self, attribute: Attribute[T]) -> T:
        """Raises KeyError where the server did not tell it."""
        return cast(T, self._values[attribute.number])

    def __contains__(self, attribute: Attribute[Any]) -> bool:
        return attribute.number in self._values

    def __repr__(self) -> str:
        told = {_KNOWN[number].name: value for number, value in self._values.items()}
        return f"Attributes({told})"


# ---- bitmaps and lists


def pack_bitmap(packer: Packer, numbers: Iterable[int]) -> None:
    wanted = sum(1 << number for number in set(numbers))
    words = [wanted >> at & 0xFFFF_FFFF for at in range(0, wanted.bit_length(), _WORD)]
    packer.array(words, Packer.uint)


def unpack_bitmap(reply: Unpacker) -> list[int]:
    """Numbers of attributes, rising."""
    words = reply.array(Unpacker.uint, most=8)
    return list(_bits(sum(word << _WORD * at for at, word in enumerate(words))))


def _bits(value: int) -> Iterator[int]:
    for number in range(value.bit_length()):
        if value >> number & 1:
            yield number


def pack_wanted(packer: Packer, wanted: Iterable[Attribute[Any]]) -> None:
    pack_bitmap(packer, (each.number for each in wanted))


def pack_settings(packer: Packer, settings: Iterable[Setting]) -> None:
    ordered = sorted(settings, key=lambda each: each.number)
    pack_bitmap(packer, (each.number for each in ordered))
    packer.opaque(b"".join(each.value for each in ordered))


def unpack_attributes(reply: Unpacker) -> Attributes:
    numbers = unpack_bitmap(reply)
    values = Unpacker(reply.opaque())
    told: dict[int, object] = {}
    for number in numbers:
        if number not in _KNOWN:
            raise XdrError(f"attribute {number}, which was not asked for")
        told[number] = _KNOWN[number].unpack(values)
    values.done()
    return Attributes(told)


# ---- kinds of values


def pack_time(packer: Packer, value: Time) -> None:
    packer.int64(value.seconds).uint(value.nanoseconds)


def unpack_time(reply: Unpacker) -> Time:
    return Time(reply.int64(), reply.uint())


def _pack_set_time(packer: Packer, value: Time | Server) -> None:
    if isinstance(value, Server):
        packer.uint(0)
    else:
        pack_time(packer.uint(1), value)


def _unpack_set_time(reply: Unpacker) -> Time | Server:
    return unpack_time(reply) if reply.uint() else Server()


def _pack_pair(packer: Packer, value: tuple[int, int]) -> None:
    packer.uint64(value[0]).uint64(value[1])


def _pack_device(packer: Packer, value: tuple[int, int]) -> None:
    packer.uint(value[0]).uint(value[1])


def _known(
    number: int,
    name: str,
    unpack: Callable[[Unpacker], T],
    pack: Callable[[Packer, T], object],
) -> Attribute[T]:
    """One that is read where a server tells it."""
    attribute = Attribute(number, name, unpack, pack)
    _KNOWN[number] = attribute
    return attribute


def _number(number: int, name: str) -> Attribute[int]:
    return _known(number, name, Unpacker.uint, Packer.uint)


def _long(number: int, name: str) -> Attribute[int]:
    return _known(number, name, Unpacker.uint64, Packer.uint64)


def _flag(number: int, name: str) -> Attribute[bool]:
    return _known(number, name, Unpacker.boolean, Packer.boolean)


def _text(number: int, name: str) -> Attribute[str]:
    return _known(number, name, Unpacker.string, Packer.string)


def _time(number: int, name: str) -> Attribute[Time]:
    return _known(number, name, unpack_time, pack_time)


def _set_time(number: int, name: str) -> Attribute[Time | Server]:
    return _known(number, name, _unpack_set_time, _pack_set_time)


def _bitmap(number: int, name: str) -> Attribute[list[int]]:
    return _known(number, name, unpack_bitmap, pack_bitmap)


# ---- the attributes

SUPPORTED: Final = _bitmap(0, "supported_attrs")
TYPE: Final = _known(1, "type", lambda reply: Kind(reply.uint()), Packer.uint)
FH_EXPIRE_TYPE: Final = _number(2, "fh_expire_type")
CHANGE: Final = _long(3, "change")
SIZE: Final = _long(4, "size")
LINK_SUPPORT: Final = _flag(5, "link_support")
SYMLINK_SUPPORT: Final = _flag(6, "symlink_support")
NAMED_ATTR: Final = _flag(7, "named_attr")
FSID: Final = _known(8, "fsid", lambda reply: (reply.uint64(), reply.uint64()), _pack_pair)
UNIQUE_HANDLES: Final = _flag(9, "unique_handles")
LEASE_TIME: Final = _number(10, "lease_time")
RDATTR_ERROR: Final = _number(11, "rdattr_error")
FILEHANDLE: Final = _known(
    19, "filehandle", lambda reply: reply.opaque(_LONGEST_HANDLE), Packer.opaque
)
FILEID: Final = _long(20, "fileid")
FILES_AVAIL: Final = _long(21, "files_avail")
FILES_FREE: Final = _long(22, "files_free")
FILES_TOTAL: Final = _long(23, "files_total")
MAXFILESIZE: Final = _long(27, "maxfilesize")
MAXLINK: Final = _number(28, "maxlink")
MAXNAME: Final = _number(29, "maxname")
MAXREAD: Final = _long(30, "maxread")
MAXWRITE: Final = _long(31, "maxwrite")
MODE: Final = _number(33, "mode")
NUMLINKS: Final = _number(35, "numlinks")
OWNER: Final = _text(36, "owner")
OWNER_GROUP: Final = _text(37, "owner_group")
QUOTA_AVAIL_HARD: Final = _long(38, "quota_avail_hard")
QUOTA_AVAIL_SOFT: Final = _long(39, "quota_avail_soft")
QUOTA_USED: Final = _long(40, "quota_used")
RAWDEV: Final = _known(41, "rawdev", lambda reply: (reply.uint(), reply.uint()), _pack_device)
SPACE_AVAIL: Final = _long(42, "space_avail")
SPACE_FREE: Final = _long(43, "space_free")
SPACE_TOTAL: Final = _long(44, "space_total")
SPACE_USED: Final = _long(45, "space_used")
TIME_ACCESS: Final = _time(47, "time_access")
TIME_ACCESS_SET: Final = _set_time(48, "time_access_set")
TIME_DELTA: Final = _time(51, "time_delta")
TIME_METADATA: Final = _time(52, "time_metadata")
TIME_MODIFY: Final = _time(53, "time_modify")
TIME_MODIFY_SET: Final = _set_time(54, "time_modify_set")
MOUNTED_ON_FILEID: Final = _long(55, "mounted_on_fileid")
SUPPATTR_EXCLCREAT: Final = _bitmap(75, "suppattr_exclcreat")

USUAL: Final[tuple[Attribute[Any], ...]] = (
    TYPE,
    CHANGE,
    SIZE,
    FSID,
    FILEID,
    MODE,
    NUMLINKS,
    OWNER,
    OWNER_GROUP,
    SPACE_USED,
    TIME_ACCESS,
    TIME_METADATA,
    TIME_MODIFY,
)
"""What stat(2) tells."""
