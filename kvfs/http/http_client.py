"""The client's side of HTTP/1.1, as far as nodes need it for each other.

One connection, one request at a time; the answer's body has a Content-Length, and goes from the
socket straight into buffers of the caller. Deadlines are the caller's: every wait here ends with
the scope that it stands in, and a connection whose exchange was cut short can only be closed.
"""

import re
import socket
import ssl
from collections.abc import Iterable
from typing import Final

import httptools
import msgspec
import trio

from kvfs.http.connection_errors import ConnectionLost
from kvfs.http.head import Field
from kvfs.http.limits import Limits
from kvfs.http.stream import NEVER
from kvfs.http.tls_stream import TlsStream, stream_of

_HEAD_BYTES: Final = 4 << 10
"""Bytes received at a time for a head: what comes along of the body is copied once more."""
_LIMITS: Final = Limits()
_TARGET: Final = re.compile(rb"/[\x21-\x7e]*")
_VALUE: Final = re.compile(rb"[\x20-\x7e]*")


class ResponseHead(msgspec.Struct, frozen=True):
    """The head of a response."""

    status: int
    fields: dict[bytes, bytes]
    """The fields, with names in lower case."""
    length: int
    """Bytes of the body."""
    persistent: bool
    """Whether the connection goes on after it."""


class ClientConnection:
    """A connection to a server. One task owns it; after an error only `close` may be called."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._stream = stream_of(sock, _LIMITS)
        self._data = b""
        self._left = 0
        self._persistent = True
        self._asking = False

    @property
    def is_reusable(self) -> bool:
        """Whether the last answer has come whole, and neither side has ended the connection."""
        if self._asking or self._left or self._data or not self._persistent:
            return False
        try:
            socket.socket.recv(self._sock, 1, socket.MSG_PEEK)  # also under TLS
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False  # closed, or what nobody asked for has come

    @property
    def remaining(self) -> int:
        """Bytes of the body still to come."""
        return self._left

    async def ask(
        self, method: str, target: bytes, fields: Iterable[Field] = (), body: bytes = b""
    ) -> ResponseHead:
        """Sends a request, and returns the head of its answer. Raises ConnectionLost; ValueError if
        a field or the target may not be sent as it is. Cancelled: the connection must be closed."""
        assert not self._asking and not self._left, "one request at a time"
        request = render_request(method, target, fields, body)
        self._asking = True
        await self._stream.send(request)
        answer = await self._head()
        self._left, self._persistent = answer.length, answer.persistent
        self._asking = False
        return answer

    async def _head(self) -> ResponseHead:
        while (end := self._data.find(b"\r\n\r\n") + 4) < 4:
            if len(self._data) > _LIMITS.head_bytes:
                raise ConnectionLost("the answer's head has no end")
            data = await self._stream.receive(_HEAD_BYTES, NEVER)
            if not data:
                raise ConnectionLost("the server closed the connection")
            self._data += data
        block, self._data = self._data[:end], self._data[end:]
        return parse_answer(block)

    async def receive_into(self, view: memoryview) -> int:
        """Receives payload into `view`, at least a byte if it has room; 0: the body has ended.

        Raises ConnectionLost. Cancelled: received bytes are in the buffer or still to come."""
        view = view[: self._left]
        if not len(view):
            return 0
        count = self._buffered(view) or await self._stream.receive_into(view)
        return self._received(count)

    def receive_soon(self, view: memoryview, patience_ms: int) -> int | None:
        """`receive_into` for a thread that the connection's task waits for; None: nothing has come
        within so many milliseconds. Raises ConnectionLost."""
        view = view[: self._left]
        if not len(view):
            return 0
        count = self._buffered(view)
        if count < len(view):
            more = self._stream.receive_soon(view[count:], 0 if count else patience_ms)
            if more is None and not count:
                return None
            count += more or 0
        return self._received(count)

    def _buffered(self, view: memoryview) -> int:
        """Copies the bytes that came along with the head."""
        count = min(len(view), len(self._data))
        if count:
            view[:count] = memoryview(self._data)[:count]
            self._data = self._data[count:]
        return count

    def _received(self, count: int) -> int:
        if not count:
            raise ConnectionLost("the connection ended before the body did")
        self._left -= count
        return count

    async def wait_readable(self) -> None:
        """Waits until more of the body has come, or the connection has ended."""
        if not self._data and not self._stream.has_more():
            await trio.lowlevel.wait_readable(self._sock)

    async def read(self, limit_bytes: int) -> bytes:
        """Returns the rest of a small body. Raises ConnectionLost, also if it is longer."""
        if self._left > limit_bytes:
            raise ConnectionLost(f"a body of {self._left} bytes where {limit_bytes} are allowed")
        buffer = memoryview(bytearray(self._left))
        done = 0
        while count := await self.receive_into(buffer[done:]):
            done += count
        return bytes(buffer)

    def close(self) -> None:
        """Closes it at once. Idempotent."""
        self._sock.close()


async def connect(
    host: str, port: int, tls: ssl.SSLContext | None = None, server_name: str | None = None
) -> ClientConnection:
    """Returns a connection to a server, with `tls` an encrypted one; the server is told that it is
    called `server_name`. Raises ConnectionLost if none can be made; Untrusted, which is one, if a
    certificate is not accepted. Cancelled: none is left open."""
    try:
        stream = await trio.open_tcp_stream(host, port)
    except (OSError, ValueError) as error:  # also a name that no resolver takes
        raise ConnectionLost(f"{host} port {port}: {error}") from error
    sock = socket.socket(fileno=stream.socket.detach())
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if tls is not None:
            sock = tls.wrap_socket(sock, do_handshake_on_connect=False, server_hostname=server_name)
            await TlsStream(sock, _LIMITS).handshake()
        return ClientConnection(sock)
    except OSError as error:
        sock.close()
        raise ConnectionLost(f"{host} port {port}: {error}") from error
    except BaseException:
        sock.close()
        raise


def render_request(method: str, target: bytes, fields: Iterable[Field], body: bytes) -> bytes:
    """Returns a request as it is sent. Raises ValueError if a part of it may not be sent."""
    if not _TARGET.fullmatch(target):
        raise ValueError(f"{target!r} is no target of a request")
    lines = [b"%b %b HTTP/1.1\r\nHost: kvfs\r\n" % (method.encode("ascii"), target)]
    for name, value in fields:
        if not _VALUE.fullmatch(value):
            raise ValueError(f"{value!r} is no value of a header field")
        lines.append(b"%b: %b\r\n" % (name, value))
    if body or method != "GET":
        lines.append(b"Content-Length: %d\r\n" % len(body))
    return b"".join((*lines, b"\r\n", body))


class _Collector:
    """The callbacks of llhttp."""

    def __init__(self) -> None:
        self.fields: dict[bytes, bytes] = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields[name.lower()] = value.strip()


def parse_answer(block: bytes) -> ResponseHead:
    """Returns the head that `block` holds, to its empty line. Raises ConnectionLost if it is no
    head of a whole HTTP/1.1 answer with a Content-Length."""
    collector = _Collector()
    parser = httptools.HttpResponseParser(collector)
    try:
        parser.feed_data(block)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
        raise ConnectionLost(f"this is no answer of HTTP: {error}") from error
    fields, status = collector.fields, parser.get_status_code()
    length = fields.get(b"content-length", b"")
    if status < 200 or parser.get_http_version() != "1.1" or not length.isdigit():
        raise ConnectionLost(
            "an answer that no node gives: HTTP/1.1 with a Content-Length is spoken here"
        )
    persistent = fields.get(b"connection", b"").lower() != b"close"
    return ResponseHead(status=status, fields=fields, length=int(length), persistent=persistent)
