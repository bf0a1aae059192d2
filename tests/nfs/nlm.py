"""The network lock manager, version 4 (X/Open XNFS): locks of NFS version 3, that are not waited
for and that no status monitor hears of."""

from dataclasses import dataclass
from typing import Final

from tests.nfs.rpc import Connection
from tests.nfs.status import NfsError
from tests.nfs.xdr import Packer, Unpacker

PROGRAM: Final = 100021
VERSION: Final = 4

_TEST, _LOCK, _UNLOCK, _LOCK_UNMONITORED = 1, 2, 4, 22
_STATUSES: Final = (
    "GRANTED",
    "DENIED",
    "DENIED_NOLOCKS",
    "BLOCKED",
    "DENIED_GRACE_PERIOD",
    "DEADLCK",
    "ROFS",
    "STALE_FH",
    "FBIG",
    "FAILED",
)
_LONGEST_OBJECT: Final = 1024


@dataclass(frozen=True)
class Holder:
    """The lock that stands in another's way."""

    exclusive: bool
    process: int
    owner: bytes
    offset: int
    length: int


@dataclass(frozen=True)
class Range:
    """Bytes of a file, as an owner asks for them; a length of 0 is to the end."""

    handle: bytes
    offset: int = 0
    length: int = 0
    exclusive: bool = True


@dataclass(frozen=True)
class Locker:
    """An owner: a process of a host. A status that is not GRANTED is an NfsError (`NLM4_...`)."""

    connection: Connection
    host: str
    process: int

    def null(self) -> None:
        self._call(0, Packer()).done()

    def lock(self, wanted: Range, monitored: bool = True) -> None:
        """`monitored`: the server has its status monitor watch this host."""
        packer = Packer().opaque(b"").boolean(False).boolean(wanted.exclusive)
        self._pack(packer, wanted).boolean(False).int32(0)
        reply = self._call(_LOCK if monitored else _LOCK_UNMONITORED, packer)
        _check(reply, "LOCK")
        reply.done()

    def unlock(self, held: Range) -> None:
        reply = self._call(_UNLOCK, self._pack(Packer().opaque(b""), held))
        _check(reply, "UNLOCK")
        reply.done()

    def test(self, wanted: Range) -> Holder | None:
        """None where the lock could be had."""
        packer = Packer().opaque(b"").boolean(wanted.exclusive)
        reply = self._call(_TEST, self._pack(packer, wanted))
        try:
            _check(reply, "TEST")
        except NfsError as error:
            if error.name != "NLM4_DENIED":
                raise
            return _unpack_holder(reply)
        return None

    def _pack(self, packer: Packer, wanted: Range) -> Packer:
        packer.string(self.host).opaque(wanted.handle).opaque(f"{self.process}".encode())
        return packer.int32(self.process).uint64(wanted.offset).uint64(wanted.length)

    def _call(self, procedure: int, arguments: Packer) -> Unpacker:
        return self.connection.call(PROGRAM, VERSION, procedure, bytes(arguments))


def _check(reply: Unpacker, operation: str) -> None:
    reply.opaque(_LONGEST_OBJECT)
    status = reply.uint()
    if status:
        name = _STATUSES[status] if status < len(_STATUSES) else str(status)
        raise NfsError(f"NLM4_{name}", operation)


def _unpack_holder(reply: Unpacker) -> Holder:
    return Holder(
        exclusive=reply.boolean(),
        process=reply.int32(),
        owner=reply.opaque(_LONGEST_OBJECT),
        offset=reply.uint64(),
        length=reply.uint64(),
    )
