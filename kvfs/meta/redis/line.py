"""A connection of our own to a server: one request at a time, answered in the task that asks.

Through a library (coredis) a request costs 288 us, here 80 to 155: one wait for the socket, and
no task between. TLS goes through trio's.
"""

import socket
import ssl
from collections.abc import Sequence
from typing import Any, Final, Protocol

import trio

from kvfs.base.errors import Invalid
from kvfs.meta.redis.location import EngineLocation, ServerAddress
from kvfs.meta.redis.scripts import Item, Script

_READ_BYTES: Final = 1 << 17
_LARGEST: Final = 512 << 20
_MANY: Final = 16
"""Strings of a list from which it pays to take them together."""
_PENDING: Final = object()
_STRING: Final = ord("$")


class ServerLost(Exception):
    """The connection ended, or could not be made."""


class ErrorReply(Exception):
    """The server's error, in its words."""


class RespParser:
    """Parses answers (RESP2) out of arriving bytes. An error within an answer is an `ErrorReply` in
    it."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._size = -1
        """The size of the awaited string; -1: a line is awaited."""
        self._open: list[tuple[int, list[Any]]] = []
        """Incomplete lists: how many items each is to have, and those it has."""

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def take(self) -> Any:
        """Returns the next answer; `RespParser.PENDING` while it is not complete. Raises ServerLost
        if it is none."""
        at = 0
        while True:
            if self._open and self._size < 0:
                at = self._strings(at)
            item, at = self._item(at)
            if item is _PENDING:
                break
            item = self._fold(item)
            if item is not _PENDING:
                break
        del self._buffer[:at]
        return item

    PENDING: Final = _PENDING

    def _item(self, at: int) -> tuple[Any, int]:
        """Returns one line or string, and where it ends."""
        buffer, size = self._buffer, self._size
        if size >= 0:
            end = at + size
            if len(buffer) < end + 2:
                return _PENDING, at
            self._size = -1
            return bytes(memoryview(buffer)[at:end]), end + 2
        end = buffer.find(b"\r\n", at)
        if end < 0:
            return _PENDING, at
        kind, line = buffer[at], bytes(memoryview(buffer)[at + 1 : end])
        if kind == _STRING:
            number = _number(line)
            if number < 0:
                return None, end + 2
            self._size = number
            return self._item(end + 2)
        if kind == 0x2A:  # *
            number = _number(line)
            if number <= 0:
                return ([] if number == 0 else None), end + 2
            self._open.append((number, []))
            return self._item(end + 2)
        return _simple(kind, line), end + 2

    def _strings(self, at: int) -> int:
        """Takes whole strings of the innermost incomplete list, but for its last item; returns
        where they end. Less than half of what they cost one by one: a page of a scan has 4,000."""
        count, items = self._open[-1]
        if count - len(items) < _MANY:
            return at
        data, begun = bytes(memoryview(self._buffer)[at:]), at
        find, take, at = data.find, items.append, 0
        for _ in range(count - len(items) - 1):
            end = find(b"\r\n", at)
            if end < 0 or data[at] != _STRING:
                break
            first = end + 2
            size = _number(data[at + 1 : end])
            if size < 0 or len(data) < first + size + 2:
                break
            take(data[first : first + size])
            at = first + size + 2
        return begun + at

    def _fold(self, item: Any) -> Any:
        """Puts an item into the list it belongs to; returns what is completed by it, or PENDING."""
        while self._open:
            count, items = self._open[-1]
            items.append(item)
            if len(items) < count:
                return _PENDING
            self._open.pop()
            item = items
        return item


class _Bytes(Protocol):
    """The transport of the bytes."""

    async def send(self, data: bytes) -> None: ...

    async def receive(self) -> bytes: ...

    def close(self) -> None: ...


class _Plain:
    """A socket, without trio's own wrapping of each call."""

    def __init__(self, stream: trio.SocketStream) -> None:
        family, kind = stream.socket.family, stream.socket.type
        self._socket = socket.socket(family, kind, fileno=stream.socket.detach())
        self._socket.setblocking(False)

    async def send(self, data: bytes) -> None:
        rest = memoryview(data)
        while True:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                pass
            if not rest:
                return
            await trio.lowlevel.wait_writable(self._socket)

    async def receive(self) -> bytes:
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            try:
                return self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                continue

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()


class _Tls:
    """An encrypted transport."""

    def __init__(self, stream: trio.SocketStream, location: EngineLocation, host: str) -> None:
        context = tls_context(location)
        self._raw = stream
        self._stream = trio.SSLStream(stream, context, server_hostname=host)

    async def send(self, data: bytes) -> None:
        await self._stream.send_all(data)

    async def receive(self) -> bytes:
        return bytes(await self._stream.receive_some(_READ_BYTES))

    def close(self) -> None:
        self._raw.socket.close()


class RespConnection:
    """A connection, made by `connect`; a failure closes it."""

    def __init__(self, stream: _Bytes, keys: Sequence[bytes]) -> None:
        self._bytes = stream
        self._keys = keys
        self._parser = RespParser()
        self.is_open = True
        self.is_asking = False
        """Whether a cluster's server should answer though it is only being given the keys."""

    async def ask(self, *command: Item) -> Any:
        """Returns the answer. Raises ErrorReply; ServerLost. Cancelled: it may have been done; the
        connection is closed."""
        if self.is_asking:
            await self._exchange((b"ASKING",))
        return await self._exchange(command)

    async def script(self, script: Script, *arguments: Item) -> Any:
        """Runs a script for the prefix's metadata; the server is sent it if it has forgotten it."""
        rest = (len(self._keys), *self._keys, *arguments)
        try:
            return await self.ask(b"EVALSHA", script.sha, *rest)
        except ErrorReply as refused:
            if not str(refused).startswith("NOSCRIPT"):
                raise
        return await self.ask(b"EVAL", script.text, *rest)

    def close(self) -> None:
        """Idempotent."""
        self.is_open = False
        self._bytes.close()

    async def _exchange(self, command: Sequence[Item]) -> Any:
        try:
            await self._bytes.send(packed(command))
            while (answer := self._parser.take()) is RespParser.PENDING:
                data = await self._bytes.receive()
                if not data:
                    raise ServerLost("the server closed the connection")
                self._parser.feed(data)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.close()
            raise ServerLost(str(error) or type(error).__name__) from error
        except BaseException:
            self.close()
            raise
        if isinstance(answer, ErrorReply):
            raise answer
        return answer


async def connect(
    address: ServerAddress, location: EngineLocation, keys: Sequence[bytes]
) -> RespConnection:
    """Returns a connection to one server, whose scripts get `keys`. Raises ServerLost, ErrorReply
    (our identity), Invalid (the file of certificates)."""
    try:
        if address.path:
            stream = await trio.open_unix_socket(address.path)
        else:
            stream = await trio.open_tcp_stream(address.host, address.port)
            stream.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        raise ServerLost(_reason(error)) from error
    try:
        through = _Tls(stream, location, address.host) if location.tls else _Plain(stream)
    except BaseException:
        stream.socket.close()
        raise
    line = RespConnection(through, keys)
    try:
        if location.password is not None:
            user = (location.username.encode(),) if location.username else ()
            await line.ask(b"AUTH", *user, location.password.encode())
        if location.db:
            await line.ask(b"SELECT", location.db)
    except BaseException:
        line.close()
        raise
    return line


def packed(command: Sequence[Item]) -> bytes:
    """Returns a request as it is sent."""
    texts = [item if isinstance(item, bytes) else b"%d" % item for item in command]
    parts = [b"$%d\r\n%b\r\n" % (len(text), text) for text in texts]
    return b"*%d\r\n%b" % (len(parts), b"".join(parts))


def tls_context(location: EngineLocation) -> ssl.SSLContext:
    """Returns a context. Raises Invalid if the file of certificates cannot be read."""
    try:
        return ssl.create_default_context(cafile=location.ca or None)
    except OSError as error:
        raise Invalid(f"{location.ca}, the certificates of {location.shown}: {error}") from error


def _number(line: bytes) -> int:
    try:
        number = int(line)
    except ValueError:
        number = _LARGEST + 1
    if number > _LARGEST:
        raise ServerLost(f"the server does not speak Redis' protocol: a length of {line[:32]!r}")
    return number


def _simple(kind: int, line: bytes) -> Any:
    if kind == 0x3A:  # :
        try:
            return int(line)
        except ValueError:
            raise _strange(kind, line) from None
    if kind == 0x2B:  # +
        return line
    if kind == 0x2D:  # -
        return ErrorReply(line.decode(errors="replace"))
    raise _strange(kind, line)


def _strange(kind: int, line: bytes) -> ServerLost:
    return ServerLost(
        f"the server does not speak Redis' protocol: it says {bytes([kind]) + line[:32]!r}"
    )


def _reason(error: OSError) -> str:
    """Returns the reason: trio reports several attempts in a group."""
    cause = error.__cause__
    if isinstance(cause, BaseExceptionGroup):
        return "; ".join(sorted({str(each) for each in cause.exceptions}))
    return str(error.__cause__ or error) or type(error).__name__
