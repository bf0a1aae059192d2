"""ONC RPC version 2 over TCP (RFC 5531): one connection, one call at a time.

Messages stand in records: fragments, each behind a word of its length whose highest bit marks the
last one. Every wait has a deadline. What a server refuses is an RpcError that names the reason; a
connection that it closes is a ConnectionError, silence a TimeoutError.
"""

import random
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tests.nfs.xdr import Packer, Unpacker, XdrError

WAIT_S: Final = 60.0
MOST_GROUPS: Final = 16
"""AUTH_SYS tells no more."""
LONGEST_RECORD: Final = 80 << 20

_LAST: Final = 1 << 31
_LONGEST_FRAGMENT: Final = 1 << 20
_CALL: Final = 0
_REPLY: Final = 1
_VERSION: Final = 2
_AUTH_NONE: Final = 0
_AUTH_SYS: Final = 1

_ACCEPTED: Final = (
    "SUCCESS",
    "PROG_UNAVAIL",
    "PROG_MISMATCH",
    "PROC_UNAVAIL",
    "GARBAGE_ARGS",
    "SYSTEM_ERR",
)
_AUTH_ERRORS: Final = (
    "AUTH_OK",
    "AUTH_BADCRED",
    "AUTH_REJECTEDCRED",
    "AUTH_BADVERF",
    "AUTH_REJECTEDVERF",
    "AUTH_TOOWEAK",
    "AUTH_INVALIDRESP",
    "AUTH_FAILED",
)


class RpcError(Exception):
    """A call that the server did not carry out; `name` is the reason, as the RFC calls it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@dataclass(frozen=True)
class AuthSys:
    """Who calls, as the caller's machine says."""

    uid: int = 0
    gid: int = 0
    groups: Sequence[int] = ()
    machine: str = "raw"
    stamp: int = 0

    def packed(self) -> bytes:
        packer = Packer().uint(self.stamp).string(self.machine).uint(self.uid).uint(self.gid)
        return bytes(packer.array(self.groups, Packer.uint))


ROOT: Final = AuthSys()


class Connection:
    """`credentials` may be changed between calls; None is AUTH_NONE."""

    def __init__(
        self,
        host: str,
        port: int,
        credentials: AuthSys | None = ROOT,
        wait_s: float = WAIT_S,
        made: socket.socket | None = None,
    ) -> None:
        """`made`: a socket to connect with, such as one of another network namespace."""
        self.host, self.port = host, port
        self.credentials = credentials
        self.wait_s = wait_s
        self._socket = made or socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.settimeout(wait_s)
        self._next = random.getrandbits(31)
        try:
            self._socket.connect((host, port))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def fresh_xid(self) -> int:
        self._next = (self._next + 1) & 0xFFFF_FFFF
        return self._next

    def call(
        self,
        program: int,
        version: int,
        procedure: int,
        arguments: bytes = b"",
        xid: int | None = None,
    ) -> Unpacker:
        """The results. The same `xid` twice is a retransmission."""
        xid = self.send(program, version, procedure, arguments, xid)
        return self.receive(xid)

    def send(
        self,
        program: int,
        version: int,
        procedure: int,
        arguments: bytes = b"",
        xid: int | None = None,
    ) -> int:
        """The first half of `call`: the reply is `receive`'s, or nobody's."""
        xid = self.fresh_xid() if xid is None else xid
        body = call_message(xid, program, version, procedure, self.credentials) + arguments
        self._socket.settimeout(self.wait_s)
        self._socket.sendall(framed(body))
        return xid

    def receive(self, xid: int) -> Unpacker:
        """The results of the call with this number; replies to others are passed over."""
        deadline = time.monotonic() + self.wait_s
        while True:
            reply = Unpacker(self._record(deadline))
            if reply.uint() == xid:
                return results(reply)

    def _record(self, deadline: float) -> bytes:
        record = bytearray()
        while True:
            head = int.from_bytes(self._exactly(4, deadline), "big")
            length = head & ~_LAST
            if len(record) + length > LONGEST_RECORD:
                raise XdrError(f"a record of more than {LONGEST_RECORD} bytes")
            record += self._exactly(length, deadline)
            if head & _LAST:
                return bytes(record)

    def _exactly(self, length: int, deadline: float) -> bytes:
        data = bytearray(length)
        view, filled = memoryview(data), 0
        while filled < length:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"{self.host}:{self.port} does not answer")
            self._socket.settimeout(left_s)
            got = self._socket.recv_into(view[filled:])
            if not got:
                raise ConnectionResetError(f"{self.host}:{self.port} closed the connection")
            filled += got
        return bytes(data)


def call_message(
    xid: int, program: int, version: int, procedure: int, credentials: AuthSys | None
) -> bytes:
    """All of a call but its arguments."""
    packer = Packer().uint(xid).uint(_CALL).uint(_VERSION)
    packer.uint(program).uint(version).uint(procedure)
    if credentials is None:
        packer.uint(_AUTH_NONE).opaque(b"")
    else:
        packer.uint(_AUTH_SYS).opaque(credentials.packed())
    return bytes(packer.uint(_AUTH_NONE).opaque(b""))


def framed(message: bytes, longest: int = _LONGEST_FRAGMENT) -> bytes:
    """The message as a record."""
    parts = [message[at : at + longest] for at in range(0, len(message), longest)] or [b""]
    last = len(parts) - 1
    return b"".join(
        (len(part) | (_LAST if number == last else 0)).to_bytes(4, "big") + part
        for number, part in enumerate(parts)
    )


def results(reply: Unpacker) -> Unpacker:
    """What stands behind the head of a reply whose xid was taken off. Raises RpcError."""
    if reply.uint() != _REPLY:
        raise XdrError("a call where a reply should be")
    if reply.uint():
        raise RpcError(_denial(reply))
    reply.uint()
    reply.opaque(longest=400)
    status = reply.uint()
    if status:
        raise RpcError(_named(_ACCEPTED, status))
    return reply


def _denial(reply: Unpacker) -> str:
    if reply.uint() == 0:
        return "RPC_MISMATCH"
    return _named(_AUTH_ERRORS, reply.uint())


def _named(names: Sequence[str], status: int) -> str:
    return names[status] if status < len(names) else f"status {status}"
