"""Operations of NFS version 4.0 (RFC 7530) and 4.1 (RFC 8881), each as a value: its arguments
encoded, and how its result is read. A compound is a list of them (`v4.py`)."""

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from tests.nfs.v3_types import VERIFIER_BYTES, Kind, Stability, Time
from tests.nfs.v4_attributes import (
    USUAL,
    Attribute,
    Attributes,
    Setting,
    pack_settings,
    pack_wanted,
    unpack_attributes,
    unpack_bitmap,
    unpack_time,
)
from tests.nfs.xdr import Packer, Unpacker, XdrError

T = TypeVar("T")

LONGEST_HANDLE: Final = 128
SESSION_BYTES: Final = 16
WHOLE_FILE: Final = (1 << 64) - 1
"""The length of a lock to the end, whatever it will be."""

_OTHER_BYTES: Final = 12
_LONGEST_OWNER: Final = 1024
_LONGEST_NAME: Final = 1024
_SP4_NONE: Final = 0
_RPCSEC_GSS: Final = 6


@dataclass(frozen=True, eq=False)
class Operation(Generic[T]):
    """`unpack` reads what follows the status OK."""

    number: int
    name: str
    arguments: bytes
    unpack: Callable[[Unpacker], T]


# ---- what operations take and tell


@dataclass(frozen=True)
class Stateid:
    seqid: int
    other: bytes


ANONYMOUS: Final = Stateid(0, bytes(_OTHER_BYTES))
BYPASS: Final = Stateid(0xFFFF_FFFF, b"\xff" * _OTHER_BYTES)


class Share(enum.IntFlag):
    """What an open is for, and what it denies others."""

    NONE = 0
    READ = 1
    WRITE = 2
    BOTH = 3
    WANT_READ_DELEGATION = 0x100
    WANT_NO_DELEGATION = 0x400


class LockKind(enum.IntEnum):
    READ = 1
    WRITE = 2
    READ_WAITING = 3
    WRITE_WAITING = 4


@dataclass(frozen=True)
class Unchecked:
    """Makes the file where it is not there."""

    settings: Sequence[Setting] = ()


@dataclass(frozen=True)
class Guarded:
    """Makes the file, which must not be there."""

    settings: Sequence[Setting] = ()


@dataclass(frozen=True)
class Exclusive:
    """Makes the file; the same verifier says that it is the same create."""

    verifier: bytes


@dataclass(frozen=True)
class ExclusiveWith:
    """The same with attributes: EXCLUSIVE4_1."""

    verifier: bytes
    settings: Sequence[Setting] = ()


Creation = Unchecked | Guarded | Exclusive | ExclusiveWith


@dataclass(frozen=True)
class Change:
    """A directory before and after."""

    atomic: bool
    before: int
    after: int


@dataclass(frozen=True)
class OpenResult:
    stateid: Stateid
    change: Change
    must_confirm: bool
    attributes_set: list[int]


@dataclass(frozen=True)
class ReadResult:
    data: bytes
    eof: bool


@dataclass(frozen=True)
class WriteResult:
    count: int
    committed: Stability
    verifier: bytes


@dataclass(frozen=True)
class DirectoryEntry:
    cookie: int
    name: str
    attributes: Attributes


@dataclass(frozen=True)
class Page:
    entries: list[DirectoryEntry]
    verifier: bytes
    eof: bool


@dataclass(frozen=True)
class Held:
    """The lock that stands in another's way."""

    offset: int
    length: int
    kind: LockKind
    clientid: int
    owner: bytes


@dataclass(frozen=True)
class Identity:
    """Of SETCLIENTID, not confirmed yet."""

    clientid: int
    verifier: bytes


@dataclass(frozen=True)
class Exchanged:
    """Of EXCHANGE_ID."""

    clientid: int
    sequence: int
    flags: int
    owner: bytes
    scope: bytes
    server: list[tuple[str, str, Time]]


@dataclass(frozen=True)
class Channel:
    header_pad: int = 0
    request_bytes: int = 1 << 20
    reply_bytes: int = 1 << 20
    cached_reply_bytes: int = 8 << 10
    operations: int = 16
    requests: int = 16


@dataclass(frozen=True)
class SessionResult:
    session: bytes
    sequence: int
    flags: int
    fore: Channel
    back: Channel


@dataclass(frozen=True)
class Sequenced:
    sequence: int
    slot: int
    highest_slot: int
    target_highest_slot: int
    status_flags: int


# ---- handles


def putfh(handle: bytes) -> Operation[None]:
    return _plain(22, "PUTFH", Packer().opaque(handle))


def putrootfh() -> Operation[None]:
    return _plain(24, "PUTROOTFH")


def getfh() -> Operation[bytes]:
    return _made(10, "GETFH", Packer(), lambda reply: reply.opaque(LONGEST_HANDLE))


def savefh() -> Operation[None]:
    return _plain(32, "SAVEFH")


def restorefh() -> Operation[None]:
    return _plain(31, "RESTOREFH")


def lookup(name: str) -> Operation[None]:
    return _plain(15, "LOOKUP", Packer().string(name))


def lookupp() -> Operation[None]:
    return _plain(16, "LOOKUPP")


# ---- attributes and permissions


def get_attributes(wanted: Iterable[Attribute[Any]] = USUAL) -> Operation[Attributes]:
    packer = Packer()
    pack_wanted(packer, wanted)
    return _made(9, "GETATTR", packer, unpack_attributes)


def set_attributes(
    settings: Iterable[Setting], stateid: Stateid = ANONYMOUS
) -> Operation[list[int]]:
    """The result: numbers of those that were set."""
    packer = _stateid(Packer(), stateid)
    pack_settings(packer, settings)
    return _made(34, "SETATTR", packer, unpack_bitmap)


def verify(settings: Iterable[Setting]) -> Operation[None]:
    """Fails with NOT_SAME."""
    packer = Packer()
    pack_settings(packer, settings)
    return _plain(37, "VERIFY", packer)


def nverify(settings: Iterable[Setting]) -> Operation[None]:
    """Fails with SAME."""
    packer = Packer()
    pack_settings(packer, settings)
    return _plain(17, "NVERIFY", packer)


def access(wanted: int) -> Operation[tuple[int, int]]:
    """The result: what the server can tell of what was asked, and what is allowed."""
    packer = Packer().uint(wanted)
    return _made(3, "ACCESS", packer, lambda reply: (reply.uint(), reply.uint()))


def secinfo(name: str) -> Operation[list[int]]:
    """The result: flavors of credentials."""
    return _made(33, "SECINFO", Packer().string(name), lambda reply: reply.array(_flavor))


# ---- names


def create(
    kind: Kind, name: str, settings: Iterable[Setting] = (), target: str = ""
) -> Operation[Change]:
    """Anything but a regular file; `target`: a symbolic link's."""
    packer = Packer().uint(kind)
    if kind is Kind.SYMLINK:
        packer.string(target)
    pack_settings(packer.string(name), settings)
    return _made(6, "CREATE", packer, _unpack_created)


def readlink() -> Operation[str]:
    return _made(27, "READLINK", Packer(), Unpacker.string)


def remove(name: str) -> Operation[Change]:
    return _made(28, "REMOVE", Packer().string(name), _unpack_change)


def rename(name: str, new_name: str) -> Operation[tuple[Change, Change]]:
    """From the saved directory to the current one."""
    packer = Packer().string(name).string(new_name)
    return _made(29, "RENAME", packer, lambda reply: (_unpack_change(reply), _unpack_change(reply)))


def link(name: str) -> Operation[Change]:
    """Of the saved file, in the current directory."""
    return _made(11, "LINK", Packer().string(name), _unpack_change)


def readdir(
    cookie: int = 0,
    verifier: bytes = bytes(VERIFIER_BYTES),
    wanted: Iterable[Attribute[Any]] = (),
    name_bytes: int = 32 << 10,
    count: int = 128 << 10,
) -> Operation[Page]:
    packer = Packer().uint64(cookie).fixed(verifier).uint(name_bytes).uint(count)
    pack_wanted(packer, wanted)
    return _made(26, "READDIR", packer, _unpack_page)


# ---- opens


def open_file(
    name: str,
    owner: tuple[int, bytes],
    seqid: int,
    share_access: Share,
    share_deny: Share = Share.NONE,
    creation: Creation | None = None,
) -> Operation[OpenResult]:
    """`owner`: a client's number and a name that the client chose."""
    packer = Packer().uint(seqid).uint(share_access).uint(share_deny)
    _pack_owner(packer, owner)
    _pack_creation(packer, creation)
    packer.uint(_CLAIM_NULL).string(name)
    return _made(18, "OPEN", packer, _unpack_open)


def open_again(
    owner: tuple[int, bytes], seqid: int, share_access: Share, share_deny: Share = Share.NONE
) -> Operation[OpenResult]:
    """Of the current file, which was open so before the server was started anew."""
    packer = Packer().uint(seqid).uint(share_access).uint(share_deny)
    _pack_owner(packer, owner)
    _pack_creation(packer, None)
    packer.uint(_CLAIM_PREVIOUS).uint(_NO_DELEGATION)
    return _made(18, "OPEN", packer, _unpack_open)


def open_confirm(stateid: Stateid, seqid: int) -> Operation[Stateid]:
    return _made(20, "OPEN_CONFIRM", _stateid(Packer(), stateid).uint(seqid), _unpack_stateid)


def close(stateid: Stateid, seqid: int) -> Operation[Stateid]:
    return _made(4, "CLOSE", _stateid(Packer().uint(seqid), stateid), _unpack_stateid)


def read(stateid: Stateid, offset: int, count: int) -> Operation[ReadResult]:
    packer = _stateid(Packer(), stateid).uint64(offset).uint(count)
    return _made(25, "READ", packer, _unpack_read)


def write(
    stateid: Stateid, offset: int, data: bytes, stable: Stability = Stability.FILE_SYNC
) -> Operation[WriteResult]:
    packer = _stateid(Packer(), stateid).uint64(offset).uint(stable).opaque(data)
    return _made(38, "WRITE", packer, _unpack_write)


def commit(offset: int = 0, count: int = 0) -> Operation[bytes]:
    packer = Packer().uint64(offset).uint(count)
    return _made(5, "COMMIT", packer, _unpack_verifier)


# ---- locks


def lock_first(
    kind: LockKind,
    offset: int,
    length: int,
    opened: tuple[int, Stateid],
    owner: tuple[int, bytes],
    reclaim: bool = False,
) -> Operation[Stateid]:
    """An owner's first lock on a file; `opened`: the seqid and the state of the open; `reclaim`: it
    was locked so before the server was started anew."""
    packer = Packer().uint(kind).boolean(reclaim).uint64(offset).uint64(length).boolean(True)
    _stateid(packer.uint(opened[0]), opened[1]).uint(0)
    _pack_owner(packer, owner)
    return _made(LOCK, "LOCK", packer, _unpack_stateid)


def lock_again(
    kind: LockKind, offset: int, length: int, stateid: Stateid, seqid: int
) -> Operation[Stateid]:
    packer = Packer().uint(kind).boolean(False).uint64(offset).uint64(length).boolean(False)
    return _made(LOCK, "LOCK", _stateid(packer, stateid).uint(seqid), _unpack_stateid)


def lock_test(
    kind: LockKind, offset: int, length: int, owner: tuple[int, bytes]
) -> Operation[None]:
    packer = Packer().uint(kind).uint64(offset).uint64(length)
    _pack_owner(packer, owner)
    return _plain(LOCKT, "LOCKT", packer)


def unlock(
    kind: LockKind, offset: int, length: int, stateid: Stateid, seqid: int
) -> Operation[Stateid]:
    packer = _stateid(Packer().uint(kind).uint(seqid), stateid).uint64(offset).uint64(length)
    return _made(14, "LOCKU", packer, _unpack_stateid)


def unpack_held(reply: Unpacker) -> Held:
    return Held(
        offset=reply.uint64(),
        length=reply.uint64(),
        kind=LockKind(reply.uint()),
        clientid=reply.uint64(),
        owner=reply.opaque(_LONGEST_OWNER),
    )


# ---- clients of 4.0


def setclientid(verifier: bytes, name: bytes) -> Operation[Identity]:
    """A client that nobody can call back."""
    packer = Packer().fixed(verifier).opaque(name)
    packer.uint(0x4000_0000).string("tcp").string("0.0.0.0.0.0").uint(0)
    return _made(
        35, "SETCLIENTID", packer, lambda reply: Identity(reply.uint64(), _unpack_verifier(reply))
    )


def setclientid_confirm(identity: Identity) -> Operation[None]:
    packer = Packer().uint64(identity.clientid).fixed(identity.verifier)
    return _plain(36, "SETCLIENTID_CONFIRM", packer)


def renew(clientid: int) -> Operation[None]:
    return _plain(30, "RENEW", Packer().uint64(clientid))


def release_lockowner(owner: tuple[int, bytes]) -> Operation[None]:
    packer = Packer()
    _pack_owner(packer, owner)
    return _plain(39, "RELEASE_LOCKOWNER", packer)


# ---- clients and sessions of 4.1


def exchange_id(verifier: bytes, name: bytes, flags: int = 0) -> Operation[Exchanged]:
    packer = Packer().fixed(verifier).opaque(name).uint(flags).uint(_SP4_NONE).uint(0)
    return _made(42, "EXCHANGE_ID", packer, _unpack_exchanged)


def create_session(
    clientid: int, sequence: int, fore: Channel | None = None
) -> Operation[SessionResult]:
    packer = Packer().uint64(clientid).uint(sequence).uint(0)
    _pack_channel(packer, fore or Channel())
    _pack_channel(packer, Channel(0, 4096, 4096, 0, 2, 1))
    packer.uint(0x4000_0000).array([0], Packer.uint)
    return _made(43, "CREATE_SESSION", packer, _unpack_session)


def destroy_session(session: bytes) -> Operation[None]:
    return _plain(44, "DESTROY_SESSION", Packer().fixed(session))


def destroy_clientid(clientid: int) -> Operation[None]:
    return _plain(57, "DESTROY_CLIENTID", Packer().uint64(clientid))


def reclaim_complete(one_filesystem: bool = False) -> Operation[None]:
    return _plain(58, "RECLAIM_COMPLETE", Packer().boolean(one_filesystem))


def sequence(
    session: bytes, number: int, slot: int = 0, cache: bool = False
) -> Operation[Sequenced]:
    packer = Packer().fixed(session).uint(number).uint(slot).uint(slot).boolean(cache)
    return _made(53, "SEQUENCE", packer, _unpack_sequenced)


def free_stateid(stateid: Stateid) -> Operation[None]:
    return _plain(45, "FREE_STATEID", _stateid(Packer(), stateid))


# ---- to bytes

LOCK: Final = 12
LOCKT: Final = 13
_CLAIM_NULL, _CLAIM_PREVIOUS, _NO_DELEGATION = 0, 1, 0


def _made(number: int, name: str, packer: Packer, unpack: Callable[[Unpacker], T]) -> Operation[T]:
    return Operation(number, name, bytes(packer), unpack)


def _plain(number: int, name: str, packer: Packer | None = None) -> Operation[None]:
    return Operation(number, name, bytes(packer or Packer()), lambda _: None)


def _stateid(packer: Packer, stateid: Stateid) -> Packer:
    return packer.uint(stateid.seqid).fixed(stateid.other)


def _pack_owner(packer: Packer, owner: tuple[int, bytes]) -> None:
    packer.uint64(owner[0]).opaque(owner[1])


def _pack_creation(packer: Packer, creation: Creation | None) -> None:
    packer.boolean(creation is not None)
    match creation:
        case Unchecked(settings):
            pack_settings(packer.uint(0), settings)
        case Guarded(settings):
            pack_settings(packer.uint(1), settings)
        case Exclusive(verifier):
            packer.uint(2).fixed(verifier)
        case ExclusiveWith(verifier, settings):
            pack_settings(packer.uint(3).fixed(verifier), settings)


def _pack_channel(packer: Packer, channel: Channel) -> None:
    packer.uint(channel.header_pad).uint(channel.request_bytes).uint(channel.reply_bytes)
    packer.uint(channel.cached_reply_bytes).uint(channel.operations).uint(channel.requests)
    packer.uint(0)


# ---- from bytes


def _unpack_stateid(reply: Unpacker) -> Stateid:
    return Stateid(reply.uint(), reply.fixed(_OTHER_BYTES))


def _unpack_verifier(reply: Unpacker) -> bytes:
    return reply.fixed(VERIFIER_BYTES)


def _unpack_change(reply: Unpacker) -> Change:
    return Change(reply.boolean(), reply.uint64(), reply.uint64())


def _unpack_created(reply: Unpacker) -> Change:
    change = _unpack_change(reply)
    unpack_bitmap(reply)
    return change


def _unpack_open(reply: Unpacker) -> OpenResult:
    stateid, change, flags = _unpack_stateid(reply), _unpack_change(reply), reply.uint()
    result = OpenResult(stateid, change, bool(flags & 2), unpack_bitmap(reply))
    _pass_no_delegation(reply)
    return result


def _pass_no_delegation(reply: Unpacker) -> None:
    """None (0), or none with a reason (3)."""
    kind = reply.uint()
    if kind not in (0, 3):
        raise XdrError(f"a delegation of kind {kind}, which nobody asked for")
    if kind == 3 and reply.uint() in (1, 2):
        reply.boolean()


def _unpack_read(reply: Unpacker) -> ReadResult:
    eof = reply.boolean()
    return ReadResult(reply.opaque(), eof)


def _unpack_write(reply: Unpacker) -> WriteResult:
    return WriteResult(reply.uint(), Stability(reply.uint()), _unpack_verifier(reply))


def _unpack_page(reply: Unpacker) -> Page:
    verifier = _unpack_verifier(reply)
    return Page(reply.chain(_unpack_entry), verifier, reply.boolean())


def _unpack_entry(reply: Unpacker) -> DirectoryEntry:
    return DirectoryEntry(reply.uint64(), reply.string(_LONGEST_NAME), unpack_attributes(reply))


def _flavor(reply: Unpacker) -> int:
    flavor = reply.uint()
    if flavor == _RPCSEC_GSS:
        reply.opaque()
        reply.uint()
        reply.uint()
    return flavor


def _unpack_exchanged(reply: Unpacker) -> Exchanged:
    clientid, sequence_id, flags = reply.uint64(), reply.uint(), reply.uint()
    if reply.uint() != _SP4_NONE:
        raise XdrError("a protection of state, which nobody asked for")
    reply.uint64()
    return Exchanged(
        clientid,
        sequence_id,
        flags,
        owner=reply.opaque(_LONGEST_OWNER),
        scope=reply.opaque(_LONGEST_OWNER),
        server=reply.array(lambda each: (each.string(), each.string(), unpack_time(each)), most=1),
    )


def _unpack_channel(reply: Unpacker) -> Channel:
    channel = Channel(
        header_pad=reply.uint(),
        request_bytes=reply.uint(),
        reply_bytes=reply.uint(),
        cached_reply_bytes=reply.uint(),
        operations=reply.uint(),
        requests=reply.uint(),
    )
    reply.array(Unpacker.uint, most=1)
    return channel


def _unpack_session(reply: Unpacker) -> SessionResult:
    return SessionResult(
        session=reply.fixed(SESSION_BYTES),
        sequence=reply.uint(),
        flags=reply.uint(),
        fore=_unpack_channel(reply),
        back=_unpack_channel(reply),
    )


def _unpack_sequenced(reply: Unpacker) -> Sequenced:
    reply.fixed(SESSION_BYTES)
    return Sequenced(
        sequence=reply.uint(),
        slot=reply.uint(),
        highest_slot=reply.uint(),
        target_highest_slot=reply.uint(),
        status_flags=reply.uint(),
    )
