"""A connection of the load generators: HTTP/1.1 as far as S3 servers answer it, with little work
per request, so that the server is what is measured.
"""

import re
import socket
from collections.abc import Callable
from typing import Any, Final, NamedTuple

_TIMEOUT_S: Final = 60.0
_RECEIVE: Final = 1 << 18
_JOINED: Final = 64 << 10
_PIECE: Final = 1 << 20
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED: Final = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_CLOSE: Final = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)


class Refused(Exception):
    """The server answered with an error; the text says which."""


class Answer(NamedTuple):
    """Of a server."""

    status: int
    body: bytes
    closes: bool
    """The connection, after this."""


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
        answer = read_answer(self._receive)
        if answer.closes:
            self.close()
            self._connect()
        if not 200 <= answer.status < 300:
            raise Refused(f"{answer.status} {answer.body[:300].decode(errors='replace')}")
        return answer.body

    def _receive(self) -> bytes:
        received = self._socket.recv(_RECEIVE)
        if not received:
            raise ConnectionResetError("the server closed the connection before its answer ended")
        return received


def read_answer(receive: Callable[[], bytes]) -> Answer:
    """To any request but HEAD. `receive` gives what has come, at least a byte."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += receive()
    head, _, body = received.partition(b"\r\n\r\n")
    if _CHUNKED.search(head):
        body = _chunks(body, receive)
    else:
        found = _LENGTH.search(head)
        body = _at_least(int(found[1]) if found else 0, body, receive)
    return Answer(int(head[9:12]), body, _CLOSE.search(head) is not None)


def _at_least(length: int, received: bytes, receive: Callable[[], bytes]) -> bytes:
    pieces, missing = [received], length - len(received)
    while missing > 0:
        pieces.append(receive())
        missing -= len(pieces[-1])
    return b"".join(pieces)


def _chunks(received: bytes, receive: Callable[[], bytes]) -> bytes:
    """Without trailers."""
    body = b""
    while True:
        while b"\r\n" not in received:
            received += receive()
        size, _, received = received.partition(b"\r\n")
        length = int(size.split(b";")[0], 16)
        received = _at_least(length + 2, received, receive)
        if length == 0:
            return body
        body, received = body + received[:length], received[length + 2 :]
