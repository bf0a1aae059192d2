"""A connection of the load generators: HTTP/1.1 as far as S3 servers answer it, with little work
per request, so that the server is what is measured.
"""

import re
import socket
from collections.abc import Callable
from typing import Any, Final

_TIMEOUT_S: Final = 60.0
_RECEIVE: Final = 1 << 18
_JOINED: Final = 64 << 10
_PIECE: Final = 1 << 20
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED: Final = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_CLOSE: Final = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)


class Refused(Exception):
    """The server answered with an error; the text says which."""


class Connection:
    """To one server; connects again after an answer that closes the connection."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._connect()

    def _connect(self) -> None:
        self._socket = socket.create_connection(self._address, _TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        self._socket.close()

    def exchange(self, head: bytes, body: Any = b"", times: int = 1) -> bytes:
        """The body of the answer; the body is sent `times` times. Raises Refused, OSError."""
        if len(body) * times <= _JOINED:
            self._socket.sendall(head + bytes(body) * times)
        else:
            self._socket.sendall(head)
            for _ in range(times):
                self._socket.sendall(body)
        return self._answer()

    def send_while(self, head: bytes, body: Any, goes_on: Callable[[], bool]) -> bool:
        """As `exchange`, but gives up in the middle of the body, and says so with False, when
        `goes_on` says no; then the connection is of no more use.
        """
        self._socket.sendall(head)
        view = memoryview(body)
        for first in range(0, len(view), _PIECE):
            if not goes_on():
                return False
            self._socket.sendall(view[first : first + _PIECE])
        self._answer()
        return True

    def _answer(self) -> bytes:
        head, body = self._head()
        if _CHUNKED.search(head):
            body = self._chunks(body)
        else:
            found = _LENGTH.search(head)
            body = self._exactly(body, int(found[1]) if found else 0)
        if _CLOSE.search(head):
            self.close()
            self._connect()
        status = int(head[9:12])
        if not 200 <= status < 300:
            raise Refused(f"{status} {body[:300].decode(errors='replace')}")
        return body

    def _head(self) -> tuple[bytes, bytes]:
        """Of the answer, and what came behind it."""
        received = b""
        while b"\r\n\r\n" not in received:
            received += self._receive()
        head, _, rest = received.partition(b"\r\n\r\n")
        if head[9:12] == b"100":
            raise Refused("100 Continue, which was not asked for")
        return head, rest

    def _exactly(self, body: bytes, length: int) -> bytes:
        pieces, missing = [body], length - len(body)
        while missing > 0:
            pieces.append(self._receive())
            missing -= len(pieces[-1])
        return b"".join(pieces)

    def _chunks(self, received: bytes) -> bytes:
        body = b""
        while True:
            while b"\r\n" not in received:
                received += self._receive()
            size, _, received = received.partition(b"\r\n")
            length = int(size.split(b";")[0], 16)
            received = self._exactly(received, length + 2)
            if length == 0:
                return body
            body, received = body + received[:length], received[length + 2 :]

    def _receive(self) -> bytes:
        received = self._socket.recv(_RECEIVE)
        if not received:
            raise ConnectionResetError("the server closed the connection before its answer ended")
        return received
