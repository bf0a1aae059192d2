"""A stream with TLS on its socket, in user space.

OpenSSL gives one record, 16 KiB at most, for each call: so received payload is gathered, and a
file's bytes are sent from a buffer, in as few turns as with a plain socket. Both release the GIL
for the ciphers and the copies. The plain stream's sendfile and splice have no place here.
"""

import os
import socket
import ssl
import time
from typing import Final

from kvfs.http.connection_errors import ConnectionLost, Untrusted
from kvfs.http.limits import Limits
from kvfs.http.stream import PAUSE_MS, READABLE, WRITABLE, Stream, is_ready

_COPY_BYTES: Final = 256 << 10
_IDLE_BUFFERS: Final = 16
_free: Final[list[bytearray]] = []
"""Buffers that stand in for sendfile, while no stream uses them."""
_REFUSALS: Final = frozenset(
    (
        "CALLBACK_FAILED",  # there is no certificate for the name that was asked for
        "CERTIFICATE_VERIFY_FAILED",
        "PEER_DID_NOT_RETURN_A_CERTIFICATE",
        "SSLV3_ALERT_BAD_CERTIFICATE",
        "SSLV3_ALERT_CERTIFICATE_EXPIRED",
        "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
        "TLSV13_ALERT_CERTIFICATE_REQUIRED",
        "TLSV1_ALERT_DECRYPT_ERROR",
        "TLSV1_ALERT_UNKNOWN_CA",
        "TLSV1_UNRECOGNIZED_NAME",
    )
)


class TlsStream(Stream):
    """See `Stream`."""

    __slots__ = ("_unsent",)
    _sock: ssl.SSLSocket

    def __init__(self, sock: ssl.SSLSocket, limits: Limits) -> None:
        super().__init__(sock, limits)
        self.secure = True
        self._unsent = memoryview(b"")
        """Bytes of a file that OpenSSL has been given: it insists on getting the same again."""

    async def handshake(self) -> None:
        """Does this side of the handshake. Raises Untrusted, ConnectionLost, Stalled."""
        deadline = time.monotonic() + self._limits.head_s
        while True:
            try:
                return self._sock.do_handshake()
            except ssl.SSLWantReadError:
                await self._wait(READABLE, deadline)
            except ssl.SSLWantWriteError:
                await self._wait(WRITABLE, deadline)
            except OSError as error:
                raise self._lost(error) from error

    def has_more(self) -> bool:
        return self._sock.pending() > 0

    def receive_soon(self, view: memoryview, patience_ms: int) -> int | None:
        """Fills `view` as far as bytes come without a pause."""
        done = 0
        try:
            while done < len(view):
                count = super().receive_soon(view[done:], 0 if done else patience_ms)
                if not count:
                    return done or count
                done += count
        except ConnectionLost:
            if not done:
                raise
        return done

    def _send_burst(self, fd: int, offset: int, end: int) -> int:
        buffer = _free.pop() if _free else bytearray(_COPY_BYTES)
        try:
            while offset < end:
                count = self._send_from(memoryview(buffer), fd, offset, end)
                if count:
                    offset += count
                elif not is_ready(self._fd, WRITABLE, PAUSE_MS):
                    break
        finally:
            self._give_back(buffer)
        return offset

    def _send_from(self, buffer: memoryview, fd: int, offset: int, end: int) -> int:
        """Returns how many bytes were taken at once, perhaps none."""
        if not self._unsent:
            count = _read(fd, buffer[: end - offset], offset)
            self._unsent = buffer[:count]
        try:
            count = self._sock.send(self._unsent)
        except ssl.SSLWantWriteError:
            return 0
        except OSError as error:
            raise self._lost(error) from error
        self._unsent = self._unsent[count:]
        self.sent_bytes += count
        self._moved(count)
        return count

    def _give_back(self, buffer: bytearray) -> None:
        """Keeps it for another stream, unless this one has still to send from it."""
        if not self._unsent and len(_free) < _IDLE_BUFFERS:
            _free.append(buffer)

    async def _sendfile(self, fd: int, offset: int, length: int) -> int:
        buffer = _free.pop() if _free else bytearray(_COPY_BYTES)
        with memoryview(buffer)[:length] as view:
            count = _read(fd, view, offset)
            await self.send(view[:count])
        self._give_back(buffer)
        return count

    def _receive_raw(self, buffer: bytearray) -> int:
        return socket.socket.recv_into(self._sock, buffer)

    def _lost(self, error: OSError) -> ConnectionLost:
        if not isinstance(error, ssl.SSLError):
            return super()._lost(error)
        if error.reason in _REFUSALS:
            return Untrusted(getattr(error, "verify_message", "") or _words(error))
        return ConnectionLost(f"TLS fails: {_words(error)}")

    def _end_tls(self) -> None:
        """Tells the peer that the data ended here and were not cut off; its answer is not
        awaited."""
        try:
            self._sock.unwrap()
        except (OSError, ValueError):
            pass


def stream_of(sock: socket.socket, limits: Limits) -> Stream:
    """Returns a stream on a socket that is connected."""
    return TlsStream(sock, limits) if isinstance(sock, ssl.SSLSocket) else Stream(sock, limits)


def over(stream: Stream, context: ssl.SSLContext) -> TlsStream:
    """Returns the server's side of TLS on the socket of `stream`, which it takes. Raises
    ConnectionLost."""
    try:
        sock = context.wrap_socket(stream._sock, server_side=True, do_handshake_on_connect=False)
    except OSError as error:
        raise ConnectionLost("the peer went away") from error
    return TlsStream(sock, stream._limits)


def _read(fd: int, buffer: memoryview, offset: int) -> int:
    """Raises ConnectionLost."""
    try:
        count = os.preadv(fd, [buffer], offset)
    except OSError as error:
        raise ConnectionLost("the file cannot be read") from error
    if count == 0:
        raise ConnectionLost("the file is shorter than was promised")
    return count


def _words(error: ssl.SSLError) -> str:
    """Returns OpenSSL's reason in words."""
    return (error.reason or "the peer ended it").lower().replace("_", " ")
