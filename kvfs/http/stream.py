"""A non-blocking socket, or TLS on it, with deadlines.

Every operation is tried first and waits only if it must: a wait costs a turn of trio's loop, which
is several times the system call. So an operation is a checkpoint only now and then: after
TURN_BYTES moved without a wait the next one lets others run first, and a cancellation takes effect
there. Received bytes are never lost to a cancellation.

It waits for bytes with or without a task (`kvfs.base.detach`); before it waits for room, or lets
others run, it goes aside.

Deadlines cost an assignment: `deadline` stands while the stream waits, and its owner (the server's
clock task) calls `expire` once it has passed. A cancel scope each would cost more than the
operation.

While a body moves, `stall_s` seconds of waiting are granted for each `progress_bytes`.
"""

import fcntl
import math
import os
import select
import socket
import ssl
import struct
import termios
import time
from collections.abc import Callable
from typing import Final

import trio

from kvfs.base.detach import aside, until_readable
from kvfs.http.connection_errors import ConnectionLost, Stalled
from kvfs.http.limits import Limits

_INT: Final = struct.Struct("i")
NEVER: Final = math.inf
AT_ONCE: Final = -math.inf  # as a deadline: no wait at all
TURN_BYTES: Final = 4 << 20
_TURN_COST: Final = 64 << 10  # of an operation, however little it moves
_PIECE_BYTES: Final = 2 << 20  # of one sendfile; a socket holds 4 MiB at most by default
_BURST_BYTES: Final = 64 << 20  # sent in a thread before its loop is asked again
PAUSE_MS: Final = 20  # of the peer, after which the thread is given back
_SCRATCH: Final = bytearray(64 << 10)  # what is read into it is dropped, so all streams share it

READABLE: Final = select.POLLIN
WRITABLE: Final = select.POLLOUT
_READ_NEEDS_READABLE: Final = (BlockingIOError, ssl.SSLWantReadError)
_WRITE_NEEDS_WRITABLE: Final = (BlockingIOError, ssl.SSLWantWriteError)


class Stream:
    """One task owns it. After ConnectionLost (or Stalled, which is one) only `expire`, `linger` and
    `close` may be called."""

    __slots__ = (
        "_fd",
        "_is_full",
        "_limits",
        "_patience_s",
        "_progress",
        "_sock",
        "deadline",
        "receiver",
        "secure",
        "sent_bytes",
        "turn_bytes",
    )

    def __init__(self, sock: socket.socket, limits: Limits) -> None:
        self._sock = sock
        self._fd = sock.fileno()
        self._limits = limits
        self._patience_s = limits.stall_s
        self._progress = 0
        self.turn_bytes = TURN_BYTES
        """Bytes that may move before others are let run."""
        self.receiver: Final = sock.recv
        """Receives what has come, as `socket.recv`: for a stream that nobody waits for."""
        self._is_full = False
        """Whether the socket did not take all of the last piece: the next is not tried in vain."""
        self.deadline = NEVER
        self.sent_bytes = 0
        self.secure = False

    def expire(self) -> None:
        """Ends the wait in progress, which raises Stalled; does nothing if there is none."""
        trio.lowlevel.notify_closing(self._fd)

    def fileno(self) -> int:
        """Returns the socket's descriptor."""
        return self._fd

    async def peek(self, deadline: float) -> bytes:
        """Returns the first byte that has come, which stays; b"": the peer closed. Raises
        ConnectionLost, Stalled."""
        while True:
            try:
                return self._sock.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                await self._wait(READABLE, deadline)
            except OSError as error:
                raise self._lost(error) from error

    async def receive(self, size_bytes: int, deadline: float) -> bytes:
        """Receives up to `size_bytes`, waiting until `deadline` (of time.monotonic); b"": the peer
        closed.

        Raises ConnectionLost, Stalled."""
        self.turn_bytes -= _TURN_COST
        if self.turn_bytes <= 0:
            self.turn_bytes = TURN_BYTES
            await _let_others_run()
        while True:
            try:
                return self._sock.recv(size_bytes)
            except _READ_NEEDS_READABLE:
                await self._wait(READABLE, deadline)
            except ssl.SSLWantWriteError:
                await self._wait(WRITABLE, deadline)
            except OSError as error:
                raise self._lost(error) from error

    async def receive_paced(self, size_bytes: int) -> bytes:
        """Does `receive` for a part of a body."""
        began, patience_s = time.monotonic(), self._patience_s
        data = await self.receive(size_bytes, began + patience_s)
        self._patience_s = max(0.0, patience_s - (time.monotonic() - began))
        self._moved(len(data))
        return data

    async def receive_into(self, view: memoryview) -> int:
        """Receives payload from the socket into `view`; 0: the peer closed. Raises ConnectionLost,
        Stalled."""
        if self._is_turn_over():
            await _let_others_run()
        while True:
            try:
                count = self._sock.recv_into(view)
                break
            except _READ_NEEDS_READABLE:
                await self._wait_paced(READABLE)
            except ssl.SSLWantWriteError:
                await self._wait_to_send()
            except OSError as error:
                raise self._lost(error) from error
        self._moved(count)
        return count

    def receive_soon(self, view: memoryview, patience_ms: int) -> int | None:
        """`receive_into` for a thread that the stream's task waits for; None: nothing has come
        within so many milliseconds. Raises ConnectionLost."""
        waited = False
        while True:
            try:
                count = self._sock.recv_into(view)
                break
            except _READ_NEEDS_READABLE:
                if waited or not is_ready(self._fd, READABLE, patience_ms):
                    return None
                waited = True
            except ssl.SSLWantWriteError:
                return None
            except OSError as error:
                raise self._lost(error) from error
        self._moved(count)
        return count

    async def send(self, data: bytes | memoryview, more: bool = False) -> None:
        """Sends all of `data`. With `more` the kernel may hold it back for what follows at once.

        Raises ConnectionLost, Stalled; then, and when cancelled, a part may have gone."""
        flags = socket.MSG_MORE if more and not self.secure else 0
        rest = memoryview(data)
        if self._is_turn_over():
            await _let_others_run()
        while True:
            try:
                count = self._sock.send(rest, flags)
            except _WRITE_NEEDS_WRITABLE:
                await self._wait_to_send()
            except ssl.SSLWantReadError:
                await self._wait_paced(READABLE)
            except OSError as error:
                raise self._lost(error) from error
            else:
                self.sent_bytes += count
                self._moved(count)
                if count == len(rest):
                    return
                rest = rest[count:]

    def send_soon(self, data: bytes | memoryview) -> int:
        """Returns how much of `data` the socket took at once. Raises ConnectionLost."""
        self.turn_bytes -= _TURN_COST
        try:
            count = self._sock.send(data)
        except (*_WRITE_NEEDS_WRITABLE, ssl.SSLWantReadError):
            return 0
        except OSError as error:
            raise self._lost(error) from error
        self.sent_bytes += count
        self.turn_bytes -= count
        return count

    async def send_file(
        self, fd: int, offset: int, length: int, unchanged: Callable[[], bool] | None
    ) -> None:
        """Sends `length` bytes of the file `fd` from `offset`, by sendfile; under TLS through one
        buffer that the stream keeps. Each call is bounded, so that one stream does not starve the
        others.

        Raises ConnectionLost if the file is shorter, or `unchanged` says no between two pieces or
        at the end; Stalled. A part has gone then."""
        end = offset + length
        self._is_full = False
        while offset < end:
            asked = min(_PIECE_BYTES, end - offset)
            count = await self._sendfile(fd, offset, asked)
            offset += count
            self._is_full = count < asked and not self.secure
            if unchanged is not None and not unchanged():
                raise ConnectionLost("the file changed while it was sent")

    async def send_file_aside(
        self,
        fd: int,
        offset: int,
        length: int,
        unchanged: Callable[[], bool] | None,
        threads: trio.CapacityLimiter,
    ) -> None:
        """Like `send_file`, in a thread as long as the peer takes it without a pause,
        and waiting here when it does not. Cancelled: ends within a burst."""
        end = offset + length
        await aside()
        while offset < end:
            offset = await trio.to_thread.run_sync(
                self._send_burst, fd, offset, min(end, offset + _BURST_BYTES), limiter=threads
            )
            if unchanged is not None and not unchanged():
                raise ConnectionLost("the file changed while it was sent")
            if offset < end:
                await self._wait_to_send()

    def _send_burst(self, fd: int, offset: int, end: int) -> int:
        """Sends in a thread, and returns the offset that it reached."""
        while offset < end:
            try:
                count = os.sendfile(self._fd, fd, offset, end - offset)
            except BlockingIOError:
                if not is_ready(self._fd, WRITABLE, PAUSE_MS):
                    break
                continue
            except OSError as error:
                raise ConnectionLost("the peer went away, or the file cannot be read") from error
            if count == 0:
                raise ConnectionLost("the file is shorter than was promised")
            offset += count
            self.sent_bytes += count
            self._moved(count)
        return offset

    async def _sendfile(self, fd: int, offset: int, length: int) -> int:
        if self._is_full:
            await self._wait_to_send()
        elif self._is_turn_over():
            await _let_others_run()
        while True:
            try:
                count = os.sendfile(self._fd, fd, offset, length)
                break
            except BlockingIOError:
                await self._wait_to_send()
            except OSError as error:
                raise ConnectionLost("the peer went away, or the file cannot be read") from error
        if count == 0:
            raise ConnectionLost("the file is shorter than was promised")
        self.sent_bytes += count
        self._moved(count)
        return count

    async def linger(self) -> None:
        """Signals that nothing more is sent, then reads and drops what still comes, within the
        limits.

        Closing at once would reset the connection, and with it what the peer has not read yet."""
        deadline = time.monotonic() + self._limits.linger_s
        left = self._limits.linger_bytes
        self._end_tls()
        try:
            self._sock.shutdown(socket.SHUT_WR)
            while left > 0 and (count := await self._drop(deadline)):
                left -= count
        except (ConnectionLost, OSError):
            return

    async def _drop(self, deadline: float) -> int:
        if self._is_turn_over():
            await _let_others_run()
        while True:
            try:
                count = self._receive_raw(_SCRATCH)
                break
            except BlockingIOError:
                await self._wait(READABLE, deadline)
        return count if time.monotonic() < deadline else 0

    def abort(self) -> None:
        """Closes so that the peer sees an error: bytes under way to it are dropped."""
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except OSError:
            pass
        self._sock.close()

    def close(self) -> None:
        self._end_tls()
        self._sock.close()

    def _end_tls(self) -> None:
        """Ends TLS, where there is any."""

    def _receive_raw(self, buffer: bytearray) -> int:
        """Receives what is dropped."""
        return self._sock.recv_into(buffer)

    def _lost(self, _error: OSError) -> ConnectionLost:
        """Returns the error that this one of the socket means."""
        return ConnectionLost("the peer went away")

    def has_more(self) -> bool:
        """Returns whether bytes have come that the socket does not show."""
        return False

    def _moved(self, count: int) -> None:
        self.turn_bytes -= count
        self._progress += count
        if self._progress >= self._limits.progress_bytes:
            self._progress = 0
            self._patience_s = self._limits.stall_s

    def restart_pace(self) -> None:
        """Begins the pace of another body."""
        self._progress = 0
        self._patience_s = self._limits.stall_s

    async def _wait_paced(self, event: int) -> None:
        began, patience_s = time.monotonic(), self._patience_s
        await self._wait(event, began + patience_s)
        self._patience_s = max(0.0, patience_s - (time.monotonic() - began))

    async def _wait_to_send(self) -> None:
        """Waits until the socket takes more. It does so when a third of what it holds has gone,
        perhaps megabytes: the wait goes on for a peer that took its part of them meanwhile."""
        while True:
            queued = self._queued_bytes()
            try:
                return await self._wait_paced(WRITABLE)
            except Stalled:
                if queued - self._queued_bytes() < self._limits.progress_bytes:
                    raise
                self._patience_s = self._limits.stall_s

    def _queued_bytes(self) -> int:
        """Returns the bytes in the socket that the peer has not acknowledged (SIOCOUTQ)."""
        answer = fcntl.ioctl(self._fd, termios.TIOCOUTQ, bytes(_INT.size))
        return int(_INT.unpack(answer)[0])

    async def _wait(self, event: int, deadline: float) -> None:
        if deadline <= time.monotonic():
            raise Stalled("nothing has come")
        self.turn_bytes = TURN_BYTES
        self.deadline = deadline
        try:
            if event == READABLE:
                await until_readable(self._fd)
            else:
                await aside()
                await trio.lowlevel.wait_writable(self._fd)
        except trio.ClosedResourceError:
            if is_ready(self._fd, event, 0):
                return  # it came in the same moment
            raise Stalled("the peer did not do its part in time") from None
        finally:
            self.deadline = NEVER

    async def take_turn(self) -> None:
        """Lets other tasks run if this one has not waited for long."""
        if self._is_turn_over():
            await _let_others_run()

    def _is_turn_over(self) -> bool:
        """Returns whether the turn is over, in which case the caller lets others run; to be asked
        before each operation."""
        self.turn_bytes -= _TURN_COST
        if self.turn_bytes > 0:
            return False
        self.turn_bytes = TURN_BYTES
        return True


async def _let_others_run() -> None:
    await aside()
    await trio.lowlevel.checkpoint()


def is_ready(fd: int, event: int, patience_ms: int) -> bool:
    poll = select.poll()
    poll.register(fd, event)
    return bool(poll.poll(patience_ms))
