"""Clients of NFS version 4.0 and 4.1: compounds, and what most tests want as one method each.

`call` sends operations of `v4_operations` as one compound and gives their results by operation.
Nothing is cached and nothing is repeated, NFS4ERR_DELAY and NFS4ERR_GRACE included; a client keeps
only what the protocol makes it keep: its number, seqids of owners (4.0), its session (4.1).
"""

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, cast

from tests.nfs.rpc import Connection
from tests.nfs.status import NfsError, check_v4, v4_name
from tests.nfs.v3_types import VERIFIER_BYTES, Kind, Stability
from tests.nfs.v4_attributes import USUAL, Attribute, Attributes, Setting
from tests.nfs.v4_operations import (
    ANONYMOUS,
    LOCK,
    LOCKT,
    WHOLE_FILE,
    Change,
    Creation,
    DirectoryEntry,
    Held,
    LockKind,
    OpenResult,
    Operation,
    Page,
    ReadResult,
    Share,
    Stateid,
    WriteResult,
    access,
    close,
    commit,
    create,
    create_session,
    destroy_clientid,
    destroy_session,
    exchange_id,
    get_attributes,
    getfh,
    link,
    lock_again,
    lock_first,
    lock_test,
    lookup,
    lookupp,
    open_again,
    open_confirm,
    open_file,
    putfh,
    putrootfh,
    read,
    readdir,
    readlink,
    reclaim_complete,
    remove,
    rename,
    renew,
    savefh,
    sequence,
    set_attributes,
    setclientid,
    setclientid_confirm,
    unlock,
    unpack_held,
    write,
)
from tests.nfs.xdr import Packer, XdrError

T = TypeVar("T")

PROGRAM: Final = 100003
VERSION: Final = 4

_COMPOUND: Final = 1
_DENIED: Final = 10010
_COUNTED: Final = ("OPEN", "OPEN_CONFIRM", "CLOSE", "LOCK", "LOCKU")
"""Operations of 4.0 that carry an owner's seqid."""
_NOT_COUNTED: Final = tuple(
    f"NFS4ERR_{name}"
    for name in (
        "STALE_CLIENTID",
        "STALE_STATEID",
        "BAD_STATEID",
        "BAD_SEQID",
        "BADXDR",
        "RESOURCE",
        "NOFILEHANDLE",
        "MOVED",
    )
)
"""Errors after which the seqid is used again (RFC 7530, 9.1.7)."""


class LockDenied(NfsError):
    """`held` is the lock in the way."""

    def __init__(self, operation: str, held: Held) -> None:
        super().__init__(v4_name(_DENIED), operation)
        self.held = held


class Reply:
    """The results of a compound."""

    def __init__(self) -> None:
        self._results: dict[int, object] = {}

    def add(self, operation: Operation[T], result: T) -> None:
        self._results[id(operation)] = result

    def of(self, operation: Operation[T]) -> T:
        return cast(T, self._results[id(operation)])


def compound(connection: Connection, minor: int, operations: Iterable[Operation[Any]]) -> Reply:
    """All of them, or the NfsError of the first that fails."""
    asked = tuple(operations)
    packer = Packer().string("").uint(minor).uint(len(asked))
    for operation in asked:
        packer.uint(operation.number).raw(operation.arguments)
    told = connection.call(PROGRAM, VERSION, _COMPOUND, bytes(packer))
    status, _tag, count = told.uint(), told.string(), told.uint()
    reply = Reply()
    for operation in asked[:count]:
        number, result = told.uint(), told.uint()
        if result == _DENIED and number in (LOCK, LOCKT):
            raise LockDenied(operation.name, unpack_held(told))
        check_v4(result, operation.name)
        if number != operation.number:
            raise XdrError(f"the result of operation {number} for {operation.name}")
        reply.add(operation, operation.unpack(told))
    check_v4(status, "COMPOUND")
    told.done()
    return reply


@dataclass
class Owner:
    """Whose opens or locks they are: a process of the client's machine."""

    name: bytes = field(default_factory=lambda: secrets.token_bytes(8))
    seqid: int = 0


@dataclass
class Opened:
    handle: bytes
    stateid: Stateid
    owner: Owner


@dataclass
class Locked:
    handle: bytes
    stateid: Stateid
    owner: Owner


class Client:
    """What both minor versions have. Directories and files are named by their handles."""

    minor: int
    clientid: int

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def call(self, *operations: Operation[Any]) -> Reply:
        return compound(self.connection, self.minor, operations)

    def ask(self, handle: bytes, operation: Operation[T]) -> T:
        """The result of one operation on a file."""
        return self.call(putfh(handle), operation).of(operation)

    # ---- names

    def walk(self, path: str = "") -> bytes:
        """The handle of a path below the server's root."""
        handle = getfh()
        steps = (lookup(name) for name in path.split("/") if name)
        return self.call(putrootfh(), *steps, handle).of(handle)

    def lookup(self, directory: bytes, name: str) -> bytes:
        handle = getfh()
        return self.call(putfh(directory), lookup(name), handle).of(handle)

    def lookup_parent(self, directory: bytes) -> bytes:
        handle = getfh()
        return self.call(putfh(directory), lookupp(), handle).of(handle)

    def mkdir(self, directory: bytes, name: str, *settings: Setting) -> bytes:
        return self._make(directory, create(Kind.DIRECTORY, name, settings))

    def symlink(self, directory: bytes, name: str, target: str) -> bytes:
        return self._make(directory, create(Kind.SYMLINK, name, target=target))

    def readlink(self, handle: bytes) -> str:
        return self.ask(handle, readlink())

    def remove(self, directory: bytes, name: str) -> Change:
        return self.ask(directory, remove(name))

    def rename(
        self, source: bytes, name: str, destination: bytes, new_name: str
    ) -> tuple[Change, Change]:
        operation = rename(name, new_name)
        return self.call(putfh(source), savefh(), putfh(destination), operation).of(operation)

    def link(self, handle: bytes, directory: bytes, name: str) -> Change:
        operation = link(name)
        return self.call(putfh(handle), savefh(), putfh(directory), operation).of(operation)

    def page(
        self,
        directory: bytes,
        cookie: int = 0,
        verifier: bytes = bytes(VERIFIER_BYTES),
        wanted: Iterable[Attribute[Any]] = (),
    ) -> Page:
        return self.ask(directory, readdir(cookie, verifier, wanted))

    def entries(
        self, directory: bytes, wanted: Iterable[Attribute[Any]] = ()
    ) -> Iterator[DirectoryEntry]:
        """All of a directory, page by page."""
        wanted, cookie, verifier = tuple(wanted), 0, bytes(VERIFIER_BYTES)
        while True:
            page = self.page(directory, cookie, verifier, wanted)
            yield from page.entries
            if page.eof:
                return
            assert page.entries, "a page without entries that is not the last one"
            cookie, verifier = page.entries[-1].cookie, page.verifier

    def names(self, directory: bytes) -> list[str]:
        return [each.name for each in self.entries(directory)]

    def _make(self, directory: bytes, operation: Operation[Change]) -> bytes:
        handle = getfh()
        return self.call(putfh(directory), operation, handle).of(handle)

    # ---- files

    def getattr(self, handle: bytes, wanted: Iterable[Attribute[Any]] = USUAL) -> Attributes:
        return self.ask(handle, get_attributes(wanted))

    def setattr(self, handle: bytes, *settings: Setting, stateid: Stateid = ANONYMOUS) -> list[int]:
        """Numbers of the attributes that were set."""
        return self.ask(handle, set_attributes(settings, stateid))

    def access(self, handle: bytes, wanted: int = 63) -> int:
        _supported, allowed = self.ask(handle, access(wanted))
        return allowed

    def open(
        self,
        directory: bytes,
        name: str,
        owner: Owner,
        share: Share = Share.BOTH,
        deny: Share = Share.NONE,
        creation: Creation | None = None,
    ) -> Opened:
        """Confirmed, where the server wants an owner's first open to be."""
        who = (self.clientid, owner.name)
        operation = open_file(name, who, self._seqid(owner), share, deny, creation)
        return self._opened(directory, operation, owner)

    def open_again(self, handle: bytes, owner: Owner, share: Share = Share.BOTH) -> Opened:
        """A file that was open so before the server was started anew."""
        operation = open_again((self.clientid, owner.name), self._seqid(owner), share)
        return self._opened(handle, operation, owner)

    def _opened(self, at: bytes, operation: Operation[OpenResult], owner: Owner) -> Opened:
        handle = getfh()
        reply = self._counted(owner, putfh(at), operation, handle)
        opened = Opened(reply.of(handle), reply.of(operation).stateid, owner)
        if reply.of(operation).must_confirm:
            confirm = open_confirm(opened.stateid, self._seqid(owner))
            opened.stateid = self._counted(owner, putfh(opened.handle), confirm).of(confirm)
        return opened

    def close(self, opened: Opened) -> None:
        operation = close(opened.stateid, self._seqid(opened.owner))
        self._counted(opened.owner, putfh(opened.handle), operation)

    def read(
        self, handle: bytes, offset: int, count: int, stateid: Stateid = ANONYMOUS
    ) -> ReadResult:
        return self.ask(handle, read(stateid, offset, count))

    def write(
        self,
        handle: bytes,
        offset: int,
        data: bytes,
        stable: Stability = Stability.FILE_SYNC,
        stateid: Stateid = ANONYMOUS,
    ) -> WriteResult:
        return self.ask(handle, write(stateid, offset, data, stable))

    def commit(self, handle: bytes, offset: int = 0, count: int = 0) -> bytes:
        """The verifier."""
        return self.ask(handle, commit(offset, count))

    # ---- locks

    def lock(
        self,
        opened: Opened,
        owner: Owner,
        kind: LockKind = LockKind.WRITE,
        offset: int = 0,
        length: int = WHOLE_FILE,
        reclaim: bool = False,
    ) -> Locked:
        """The owner's first lock on this file. Raises LockDenied."""
        seqid = self._seqid(opened.owner)
        who = (self.clientid, owner.name)
        operation = lock_first(kind, offset, length, (seqid, opened.stateid), who, reclaim)
        reply = self._counted(opened.owner, putfh(opened.handle), operation)
        owner.seqid = 1
        return Locked(opened.handle, reply.of(operation), owner)

    def lock_more(
        self,
        locked: Locked,
        kind: LockKind = LockKind.WRITE,
        offset: int = 0,
        length: int = WHOLE_FILE,
    ) -> None:
        """Another lock of the same owner on the same file. Raises LockDenied."""
        operation = lock_again(kind, offset, length, locked.stateid, self._seqid(locked.owner))
        reply = self._counted(locked.owner, putfh(locked.handle), operation)
        locked.stateid = reply.of(operation)

    def lock_test(
        self,
        handle: bytes,
        owner: Owner,
        kind: LockKind = LockKind.WRITE,
        offset: int = 0,
        length: int = WHOLE_FILE,
    ) -> None:
        """Raises LockDenied where another has it."""
        self.ask(handle, lock_test(kind, offset, length, (self.clientid, owner.name)))

    def unlock(self, locked: Locked, offset: int = 0, length: int = WHOLE_FILE) -> None:
        seqid = self._seqid(locked.owner)
        operation = unlock(LockKind.WRITE, offset, length, locked.stateid, seqid)
        reply = self._counted(locked.owner, putfh(locked.handle), operation)
        locked.stateid = reply.of(operation)

    # ---- seqids

    def _seqid(self, owner: Owner) -> int:
        return owner.seqid

    def _counted(self, owner: Owner, *operations: Operation[Any]) -> Reply:
        try:
            reply = self.call(*operations)
        except NfsError as error:
            if error.operation in _COUNTED and error.name not in _NOT_COUNTED:
                owner.seqid += 1
            raise
        owner.seqid += 1
        return reply


class Client40(Client):
    """A client of 4.0, known to the server from the start; nobody can call it back."""

    minor = 0

    def __init__(
        self, connection: Connection, name: bytes | None = None, verifier: bytes | None = None
    ) -> None:
        """The same name with another verifier is the same client after a restart."""
        super().__init__(connection)
        self.name = name or secrets.token_bytes(16)
        asked = setclientid(verifier or secrets.token_bytes(VERIFIER_BYTES), self.name)
        identity = self.call(asked).of(asked)
        self.call(setclientid_confirm(identity))
        self.clientid = identity.clientid

    def renew(self) -> None:
        self.call(renew(self.clientid))


class Client41(Client):
    """A client of 4.1 with a session of one slot in use."""

    minor = 1

    def __init__(
        self,
        connection: Connection,
        name: bytes | None = None,
        verifier: bytes | None = None,
        reclaims: bool = False,
    ) -> None:
        """`reclaims`: it says itself when it has taken back what it had."""
        super().__init__(connection)
        self.name = name or secrets.token_bytes(16)
        asked = exchange_id(verifier or secrets.token_bytes(VERIFIER_BYTES), self.name)
        self.exchanged = compound(connection, self.minor, (asked,)).of(asked)
        self.clientid = self.exchanged.clientid
        made = create_session(self.clientid, self.exchanged.sequence)
        self.session = compound(connection, self.minor, (made,)).of(made)
        self.sequence = 1
        if not reclaims:
            self.call(reclaim_complete())

    def call(self, *operations: Operation[Any]) -> Reply:
        """The next request of the session's first slot."""
        return self.call_as(self.sequence, *operations)

    def call_as(self, number: int, *operations: Operation[Any], cache: bool = False) -> Reply:
        """A request with this number: the last one's is a retransmission of it."""
        first = sequence(self.session.session, number, cache=cache)
        try:
            reply = compound(self.connection, self.minor, (first, *operations))
        except NfsError as error:
            if error.operation != "SEQUENCE":
                self.sequence = number + 1
            raise
        self.sequence = number + 1
        return reply

    def renew(self) -> None:
        self.call()

    def end(self) -> None:
        """The session and the client are gone from the server."""
        compound(self.connection, self.minor, (destroy_session(self.session.session),))
        compound(self.connection, self.minor, (destroy_clientid(self.clientid),))

    def _seqid(self, _owner: Owner) -> int:
        """A slot's number says what a seqid would."""
        return 0
