"""A client of NFS version 3 (RFC 1813): a method for each procedure.

It caches nothing and repeats nothing: a test sees each reply of the server. A status that is not
OK is an NfsError (`NFS3ERR_...`).
"""

from collections.abc import Iterator
from typing import Final

from tests.nfs.rpc import Connection
from tests.nfs.status import check_v3
from tests.nfs.v3_types import (
    VERIFIER_BYTES,
    Access,
    Attributes,
    Data,
    Entry,
    Found,
    Limits,
    Listing,
    PathLimits,
    SetAttributes,
    Space,
    Stability,
    Time,
    Wcc,
    Written,
    pack_attributes,
    pack_time,
    unpack_attributes,
    unpack_entry,
    unpack_entry_plus,
    unpack_handle,
    unpack_limits,
    unpack_maybe,
    unpack_path_limits,
    unpack_space,
    unpack_wcc,
)
from tests.nfs.xdr import Packer, Unpacker

PROGRAM: Final = 100003
VERSION: Final = 3

_PROCEDURES: Final = (
    "NULL",
    "GETATTR",
    "SETATTR",
    "LOOKUP",
    "ACCESS",
    "READLINK",
    "READ",
    "WRITE",
    "CREATE",
    "MKDIR",
    "SYMLINK",
    "MKNOD",
    "REMOVE",
    "RMDIR",
    "RENAME",
    "LINK",
    "READDIR",
    "READDIRPLUS",
    "FSSTAT",
    "FSINFO",
    "PATHCONF",
    "COMMIT",
)
_UNCHECKED, _GUARDED, _EXCLUSIVE = 0, 1, 2
_PAGE_BYTES: Final = 32 << 10
_NO_VERIFIER: Final = bytes(VERIFIER_BYTES)
_NOTHING_SET: Final = SetAttributes()


class Client:
    """`connection` may be used for calls of another kind too, such as one that is sent twice."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    # ---- names

    def lookup(self, directory: bytes, name: str) -> Found:
        reply = self._call("LOOKUP", _entry(directory, name))
        found = Found(unpack_handle(reply), unpack_maybe(reply))
        unpack_maybe(reply)
        reply.done()
        return found

    def walk(self, root: bytes, path: str) -> bytes:
        """The handle of a path below a root."""
        for name in filter(None, path.split("/")):
            root = self.lookup(root, name).handle
        return root

    def create(
        self,
        directory: bytes,
        name: str,
        attributes: SetAttributes = _NOTHING_SET,
        guarded: bool = False,
    ) -> Found:
        how = _entry(directory, name).uint(_GUARDED if guarded else _UNCHECKED)
        pack_attributes(how, attributes)
        return _made(self._call("CREATE", how))

    def create_exclusive(
        self, directory: bytes, name: str, verifier: bytes, xid: int | None = None
    ) -> Found:
        """A file that another create has not made: the same verifier says it is the same create."""
        how = _entry(directory, name).uint(_EXCLUSIVE).fixed(verifier)
        return _made(self._call("CREATE", how, xid))

    def mkdir(self, directory: bytes, name: str, attributes: SetAttributes = _NOTHING_SET) -> Found:
        arguments = _entry(directory, name)
        pack_attributes(arguments, attributes)
        return _made(self._call("MKDIR", arguments))

    def symlink(self, directory: bytes, name: str, target: str) -> Found:
        arguments = _entry(directory, name)
        pack_attributes(arguments, _NOTHING_SET)
        return _made(self._call("SYMLINK", arguments.string(target)))

    def remove(self, directory: bytes, name: str) -> Wcc:
        return _wcc(self._call("REMOVE", _entry(directory, name)))

    def rmdir(self, directory: bytes, name: str) -> Wcc:
        return _wcc(self._call("RMDIR", _entry(directory, name)))

    def rename(
        self, source: bytes, name: str, destination: bytes, new_name: str
    ) -> tuple[Wcc, Wcc]:
        arguments = _entry(source, name).opaque(destination).string(new_name)
        reply = self._call("RENAME", arguments)
        both = unpack_wcc(reply), unpack_wcc(reply)
        reply.done()
        return both

    def link(self, handle: bytes, directory: bytes, name: str) -> Attributes | None:
        """The file's attributes after it."""
        reply = self._call("LINK", Packer().opaque(handle).opaque(directory).string(name))
        attributes = unpack_maybe(reply)
        unpack_wcc(reply)
        reply.done()
        return attributes

    # ---- files

    def null(self) -> None:
        self.connection.call(PROGRAM, VERSION, 0).done()

    def getattr(self, handle: bytes) -> Attributes:
        reply = self._call("GETATTR", Packer().opaque(handle))
        attributes = unpack_attributes(reply)
        reply.done()
        return attributes

    def setattr(self, handle: bytes, wanted: SetAttributes, guard: Time | None = None) -> Wcc:
        """`guard`: only where the file's ctime is that, else NFS3ERR_NOT_SYNC."""
        arguments = Packer().opaque(handle)
        pack_attributes(arguments, wanted)
        return _wcc(self._call("SETATTR", arguments.optional(guard, pack_time)))

    def access(self, handle: bytes, wanted: Access = Access.ALL) -> Access:
        reply = self._call("ACCESS", Packer().opaque(handle).uint(wanted))
        unpack_maybe(reply)
        allowed = Access(reply.uint())
        reply.done()
        return allowed

    def readlink(self, handle: bytes) -> str:
        reply = self._call("READLINK", Packer().opaque(handle))
        unpack_maybe(reply)
        target = reply.string()
        reply.done()
        return target

    def read(self, handle: bytes, offset: int, count: int) -> Data:
        reply = self._call("READ", Packer().opaque(handle).uint64(offset).uint(count))
        attributes = unpack_maybe(reply)
        count, eof = reply.uint(), reply.boolean()
        data = reply.opaque()
        assert count == len(data), (count, len(data))
        reply.done()
        return Data(data, eof, attributes)

    def write(
        self,
        handle: bytes,
        offset: int,
        data: bytes,
        stable: Stability = Stability.FILE_SYNC,
        xid: int | None = None,
    ) -> Written:
        arguments = Packer().opaque(handle).uint64(offset).uint(len(data)).uint(stable)
        reply = self._call("WRITE", arguments.opaque(data), xid)
        wcc = unpack_wcc(reply)
        count, committed = reply.uint(), Stability(reply.uint())
        written = Written(count, committed, reply.fixed(VERIFIER_BYTES), wcc)
        reply.done()
        return written

    def commit(self, handle: bytes, offset: int = 0, count: int = 0) -> bytes:
        """The verifier; a count of 0 is to the end."""
        reply = self._call("COMMIT", Packer().opaque(handle).uint64(offset).uint(count))
        unpack_wcc(reply)
        verifier = reply.fixed(VERIFIER_BYTES)
        reply.done()
        return verifier

    # ---- directories

    def readdir(
        self,
        directory: bytes,
        cookie: int = 0,
        verifier: bytes = _NO_VERIFIER,
        count: int = _PAGE_BYTES,
    ) -> Listing:
        """What follows the cookie, as much as fits in so many bytes."""
        arguments = Packer().opaque(directory).uint64(cookie).fixed(verifier).uint(count)
        reply = self._call("READDIR", arguments)
        unpack_maybe(reply)
        verifier = reply.fixed(VERIFIER_BYTES)
        listing = Listing(reply.chain(unpack_entry), verifier, reply.boolean())
        reply.done()
        return listing

    def readdirplus(
        self,
        directory: bytes,
        cookie: int = 0,
        verifier: bytes = _NO_VERIFIER,
        name_bytes: int = _PAGE_BYTES,
        count: int = 4 * _PAGE_BYTES,
    ) -> Listing:
        arguments = Packer().opaque(directory).uint64(cookie).fixed(verifier)
        reply = self._call("READDIRPLUS", arguments.uint(name_bytes).uint(count))
        unpack_maybe(reply)
        verifier = reply.fixed(VERIFIER_BYTES)
        listing = Listing(reply.chain(unpack_entry_plus), verifier, reply.boolean())
        reply.done()
        return listing

    def entries(self, directory: bytes, plus: bool = False) -> Iterator[Entry]:
        """All of a directory, page by page, with `.` and `..` where the server tells them."""
        cookie, verifier = 0, _NO_VERIFIER
        while True:
            ask = self.readdirplus if plus else self.readdir
            page = ask(directory, cookie, verifier)
            yield from page.entries
            if page.eof:
                return
            assert page.entries, "a page without entries that is not the last one"
            cookie, verifier = page.entries[-1].cookie, page.verifier

    def names(self, directory: bytes) -> list[str]:
        return [each.name for each in self.entries(directory) if each.name not in (".", "..")]

    # ---- the filesystem

    def fsstat(self, root: bytes) -> Space:
        reply = self._call("FSSTAT", Packer().opaque(root))
        unpack_maybe(reply)
        return unpack_space(reply)

    def fsinfo(self, root: bytes) -> Limits:
        reply = self._call("FSINFO", Packer().opaque(root))
        unpack_maybe(reply)
        return unpack_limits(reply)

    def pathconf(self, handle: bytes) -> PathLimits:
        reply = self._call("PATHCONF", Packer().opaque(handle))
        unpack_maybe(reply)
        return unpack_path_limits(reply)

    def _call(self, procedure: str, arguments: Packer, xid: int | None = None) -> Unpacker:
        number = _PROCEDURES.index(procedure)
        reply = self.connection.call(PROGRAM, VERSION, number, bytes(arguments), xid)
        check_v3(reply.uint(), procedure)
        return reply


def _entry(directory: bytes, name: str) -> Packer:
    return Packer().opaque(directory).string(name)


def _made(reply: Unpacker) -> Found:
    handle = reply.optional(unpack_handle)
    found = Found(handle or b"", unpack_maybe(reply))
    unpack_wcc(reply)
    reply.done()
    return found


def _wcc(reply: Unpacker) -> Wcc:
    wcc = unpack_wcc(reply)
    reply.done()
    return wcc
