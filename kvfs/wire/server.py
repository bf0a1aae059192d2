"""Listeners, connections, deadlines, the graceful end.

A connection is a task. When told to stop, by its event or by cancellation, the server stops
accepting, closes idle connections at once, lets requests in flight finish for `stop_s` seconds and
then cuts them off. At most `connections` are served: where one more comes, the one that has been
idle for longest is closed, and where none is idle, it waits in the backlog of the listener.
"""

import errno
import logging
import math
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import trio

from kvfs.wire.connection import Connection, Counters, Handler, OnResponse, Refuse, Service
from kvfs.wire.limits import Limits
from kvfs.wire.parser import Heads
from kvfs.wire.response import plain_refusal
from kvfs.wire.stream import Stream

log = logging.getLogger(__name__)

BACKLOG: Final = 1024
_EXHAUSTED: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_EXHAUSTED_PAUSE_S: Final = 0.1
_FULL_PAUSE_S: Final = 0.05
_STOPPING_TICK_S: Final = 0.02


def listen(
    host: str, port: int, *, backlog: int = BACKLOG, share_port: bool = False
) -> list[socket.socket]:
    """Listeners for each address of `host` (IPv4 and IPv6), all on one port; port 0: any free one.

    With `share_port` other processes may listen there too, and the kernel spreads connections over
    them. Raises OSError where an address cannot be had. Blocks while a name is looked up."""
    listeners: list[socket.socket] = []
    kinds = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    try:
        for family, _, _, _, address in dict.fromkeys(kinds):
            listener = socket.socket(family, socket.SOCK_STREAM)
            listeners.append(listener)
            chosen = listeners[0].getsockname()[1] if len(listeners) > 1 else port
            _prepare(listener, share_port)
            listener.bind((address[0], chosen, *address[2:]))
            listener.listen(backlog)
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _prepare(listener: socket.socket, share_port: bool) -> None:
    """What accepted connections inherit is set here once, not for each of them."""
    listener.setblocking(False)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if listener.family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    if share_port:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


async def serve(
    listeners: Sequence[socket.socket],
    handler: Handler,
    limits: Limits | None = None,
    *,
    refuse: Refuse = plain_refusal,
    tls: ssl.SSLContext | None = None,
    on_response: OnResponse | None = None,
    counters: Counters | None = None,
    stop: trio.Event | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve HTTP/1.1 (and 1.0) on `listeners`, which are closed at the end, until `stop` or
    cancellation; both end gracefully, within `limits.stop_s` seconds.

    The handler runs in its connection's task, shielded from the caller's cancellation; its own
    waits, and how long it takes, are its own affair. With `tls` every connection is encrypted, and
    sendfile is replaced by a copy through one buffer per connection; ALPN offers http/1.1 alone.
    """
    if tls is not None:
        tls.set_alpn_protocols(["http/1.1"])
    counters = Counters() if counters is None else counters
    limits = limits or Limits()
    service = Service(handler, limits, Heads(limits), counters, refuse, on_response)
    server = _Server(service, tls)
    async with trio.open_nursery() as nursery:
        with server.ending(listeners):
            nursery.start_soon(server.keep_deadlines)
            async with trio.open_nursery() as accepting:
                for listener in listeners:
                    listener.setblocking(False)
                    accepting.start_soon(server.accept, listener, nursery)
                task_status.started()
                await (trio.Event() if stop is None else stop).wait()
                accepting.cancel_scope.cancel()


class _Server:
    def __init__(self, service: Service, tls: ssl.SSLContext | None) -> None:
        self._service = service
        self._limits = service.limits
        self._tls = tls
        self._connections: set[Connection] = set()
        self._slots = trio.Semaphore(service.limits.connections)
        self._stopping = trio.Event()
        self._cut_off = math.inf

    @contextmanager
    def ending(self, listeners: Sequence[socket.socket]) -> Iterator[None]:
        """However the block ends, the server stops."""
        try:
            yield
        finally:
            for listener in listeners:
                listener.close()
            self._stopping.set()
            self._cut_off = time.monotonic() + self._limits.stop_s
            for connection in tuple(self._connections):
                connection.stop()

    async def accept(self, listener: socket.socket, nursery: trio.Nursery) -> None:
        """Accept until cancelled."""
        while True:
            await trio.lowlevel.wait_readable(listener)
            await self._take_slot()
            if not await self._accept_one(listener, nursery):
                self._slots.release()

    async def _take_slot(self) -> None:
        while True:
            with trio.move_on_after(_FULL_PAUSE_S):
                await self._slots.acquire()
                return
            self._close_idle()

    def _close_idle(self) -> None:
        """Clients keep connections that they may never use again; new ones must not wait for it."""
        idle = [connection for connection in self._connections if connection.idle]
        if idle:
            min(idle, key=lambda connection: connection.stream.deadline).stream.expire()

    async def _accept_one(self, listener: socket.socket, nursery: trio.Nursery) -> bool:
        """Whether a connection has been taken up."""
        try:
            sock, address = listener.accept()
        except OSError as error:  # also: it went away, or another process took it
            if error.errno in _EXHAUSTED:
                log.warning("no connection can be accepted: %s", error)
                await trio.sleep(_EXHAUSTED_PAUSE_S)
            return False
        connection = self._connection(sock, address)
        if connection is None:
            return False
        self._connections.add(connection)
        nursery.start_soon(self._attend, connection)
        return True

    def _connection(self, sock: socket.socket, address: object) -> Connection | None:
        peer = (str(address[0]), int(address[1])) if isinstance(address, tuple) else ("", 0)
        try:
            sock.setblocking(False)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except OSError:
            sock.close()
            return None
        return Connection(self._service, Stream(sock, self._limits), peer)

    async def _attend(self, connection: Connection) -> None:
        counters = self._service.counters
        counters.connections += 1
        counters.open_connections += 1
        try:
            await connection.attend()
        finally:
            counters.open_connections -= 1
            self._connections.discard(connection)
            self._slots.release()

    async def keep_deadlines(self) -> None:
        """Ends waits whose deadline has passed, until the server has stopped and is empty."""
        with trio.CancelScope(shield=True):
            while self._connections or not self._stopping.is_set():
                now = time.monotonic()
                for connection in tuple(self._connections):
                    if connection.stream.deadline <= now:
                        connection.stream.expire()
                    if self._cut_off <= now:
                        connection.scope.cancel()
                await self._tick()

    async def _tick(self) -> None:
        if self._stopping.is_set():
            await trio.sleep(_STOPPING_TICK_S)
        else:
            with trio.move_on_after(self._limits.tick_s):
                await self._stopping.wait()
