"""Listeners, connections, deadlines, the graceful end.

Connections wait for their next request in `idle_connections`. When told to stop, by its event or by
cancellation, the server stops accepting, closes connections that were idle for `parting_s`, answers
requests in flight, and those that come on others meanwhile, as the last of their connections, and
cuts off after `stop_s` seconds. At most `connections` are served, shared out by
`full_server`: if one more comes, it waits, answers end their connections, and of those that wait
for their peers the ones end that lose least by it.
"""

import errno
import logging
import math
import resource
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import trio

from kvfs.http.connection import Connection, Counters, Handler, OnResponse, Refuse, ServerContext
from kvfs.http.full_server import Origins, has_room, to_shed
from kvfs.http.idle_connections import IdleConnections
from kvfs.http.limits import Limits
from kvfs.http.parser import HeadParser
from kvfs.http.response import plain_refusal
from kvfs.http.stream import Stream
from kvfs.http.tls_contexts import ServerTls

log = logging.getLogger(__name__)

BACKLOG: Final = 1024
_EXHAUSTED: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_EXHAUSTED_PAUSE_S: Final = 0.1
_FULL_PAUSE_S: Final = 0.05
_STOPPING_TICK_S: Final = 0.02


def listen(host: str, port: int, *, share_port: bool = False) -> list[socket.socket]:
    """Returns listeners for each address of `host` (IPv4 and IPv6), all on one port; port 0: any
    free one.

    With `share_port` other processes may listen there too, and the kernel spreads connections over
    them. Raises OSError if an address is not available. Blocks while a name is looked up."""
    listeners: list[socket.socket] = []
    kinds = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    try:
        for family, _, _, _, address in dict.fromkeys(kinds):
            listener = socket.socket(family, socket.SOCK_STREAM)
            listeners.append(listener)
            chosen = listeners[0].getsockname()[1] if len(listeners) > 1 else port
            _prepare(listener, share_port)
            listener.bind((address[0], chosen, *address[2:]))
            listener.listen(BACKLOG)
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _prepare(listener: socket.socket, share_port: bool) -> None:
    """Sets options on the listener that accepted connections inherit, once rather than for each of
    them."""
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
    steps: bool = False,
    refuse: Refuse = plain_refusal,
    tls: ServerTls | None = None,
    on_response: OnResponse | None = None,
    counters: Counters | None = None,
    stop: trio.Event | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serves HTTP/1.1 (and 1.0) on `listeners`, which are closed at the end, until `stop` or
    cancellation; both end gracefully, within `limits.stop_s` seconds.

    The handler is shielded from the caller's cancellation; it is responsible for its own waits and
    for how long it takes. If it `steps`, it goes aside (`kvfs.base.detach`) before it waits: then a
    request that need not wait gets no task. With `tls` a connection is
    encrypted, and sendfile is replaced by a copy through a buffer.
    """
    counters = Counters() if counters is None else counters
    limits = _within_descriptors(limits or Limits())
    heads = HeadParser(limits)
    service = ServerContext(handler, limits, heads, counters, steps, refuse, on_response)
    async with trio.open_nursery() as nursery:
        server = _Server(service, tls, nursery)
        with server.ending(listeners):
            await nursery.start(server.idle.run)
            nursery.start_soon(server.keep_deadlines)
            async with trio.open_nursery() as accepting:
                accepting.start_soon(server.make_room)
                for listener in listeners:
                    listener.setblocking(False)
                    accepting.start_soon(server.accept, listener)
                task_status.started()
                await (trio.Event() if stop is None else stop).wait()
                accepting.cancel_scope.cancel()


def _within_descriptors(limits: Limits) -> Limits:
    """Returns limits with fewer connections if the process may have few descriptors: each may need
    a file, and another one, beside its own."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return replace(limits, connections=min(limits.connections, max(1, descriptors // 4)))


class _Server:
    def __init__(
        self, service: ServerContext, tls: ServerTls | None, nursery: trio.Nursery
    ) -> None:
        self._service = service
        self._limits = service.limits
        self._tls = tls
        self._nursery = nursery
        self._connections: set[Connection] = set()
        self.idle = IdleConnections[Connection](self._ended)
        self._waiting: deque[Connection] = deque()
        self._is_full = trio.Event()
        self._origins = Origins()
        self._stopping = trio.Event()
        self._cut_off = math.inf

    @contextmanager
    def ending(self, listeners: Sequence[socket.socket]) -> Iterator[None]:
        """Stops the server however the block ends."""
        try:
            yield
        finally:
            for listener in listeners:
                listener.close()
            self._stopping.set()
            self._cut_off = time.monotonic() + self._limits.stop_s
            for connection in tuple(self._connections):
                connection.stop()
            while self._waiting:
                self._waiting.popleft().stream.close()
            self._service.counters.waiting_connections = 0

    async def accept(self, listener: socket.socket) -> None:
        """Accepts until cancelled."""
        while True:
            await trio.lowlevel.wait_readable(listener)
            if len(self._waiting) >= self._limits.connections:
                await trio.sleep(_FULL_PAUSE_S)
                continue
            try:
                sock, address = listener.accept()
            except OSError as error:  # also: it went away, or another process took it
                if error.errno in _EXHAUSTED:
                    log.warning("no connection can be accepted: %s", error)
                    await trio.sleep(_EXHAUSTED_PAUSE_S)
                continue
            connection = self._connection(sock, address)
            if connection is not None:
                self._admit(connection)

    def _connection(self, sock: socket.socket, address: object) -> Connection | None:
        peer = (str(address[0]), int(address[1])) if isinstance(address, tuple) else ("", 0)
        try:
            sock.setblocking(False)
        except OSError:
            sock.close()
            return None
        stream = Stream(sock, self._limits)
        origin = self._origins.of(peer[0])
        return Connection(self._service, stream, peer, origin, self.idle)

    def _admit(self, connection: Connection) -> None:
        """Serves it now, or when there is room."""
        if has_room(self._limits, len(self._connections), connection.origin):
            self._begin(connection)
        else:
            self._waiting.append(connection)
            self._service.counters.waiting_connections = len(self._waiting)
            self._is_full.set()

    def _begin(self, connection: Connection) -> None:
        connection.origin.connections += 1
        self._connections.add(connection)
        self._service.counters.connections += 1
        self._service.counters.open_connections += 1
        if self._tls is not None:
            self._nursery.start_soon(self._attend, connection, self._tls)
        else:
            self.idle.add(connection)

    async def _attend(self, connection: Connection, tls: ServerTls) -> None:
        goes_on = False
        try:
            goes_on = await connection.attend(tls)
        finally:
            if not goes_on:
                self._ended(connection)
        if goes_on:
            self.idle.add(connection)

    def _ended(self, connection: Connection) -> None:
        self._service.counters.open_connections -= 1
        self._connections.discard(connection)
        connection.origin.connections -= 1
        self._origins.left(connection.origin)
        if self._waiting:
            self._let_in()

    def _let_in(self) -> None:
        """Begins the waiting connections that have room now, in the order in which they came."""
        still: deque[Connection] = deque()
        while self._waiting:
            served = len(self._connections)
            if served >= self._limits.connections:
                break
            connection = self._waiting.popleft()
            if has_room(self._limits, served, connection.origin):
                self._begin(connection)
            else:
                still.append(connection)
        still.extend(self._waiting)
        self._waiting = still
        self._service.counters.waiting_connections = len(still)

    async def make_room(self) -> None:
        """Ends connections as long as others wait for them, until cancelled."""
        while True:
            await self._is_full.wait()
            while self._waiting:
                self._turn_away()
                self._shed()
                await trio.sleep(_FULL_PAUSE_S)
            self._is_full = trio.Event()

    def _shed(self) -> None:
        most = len(self._waiting)
        for connection in to_shed(self._limits, self._connections, time.monotonic(), most):
            connection.expire()

    def _turn_away(self) -> None:
        """Tells peers that have waited too long to come again; with TLS lets them go."""
        latest = time.monotonic() - self._limits.stall_s
        while self._waiting and self._waiting[0].since <= latest:
            connection = self._waiting.popleft()
            self._origins.left(connection.origin)
            if self._tls is None:
                self._nursery.start_soon(connection.turn_away)
            else:
                connection.stream.close()  # a plain answer would be no TLS to it
        self._service.counters.waiting_connections = len(self._waiting)

    async def keep_deadlines(self) -> None:
        """Ends waits whose deadline has passed, until the server has stopped and is empty."""
        try:
            with trio.CancelScope(shield=True):
                while self._connections or not self._stopping.is_set():
                    self._look_at_deadlines(time.monotonic())
                    await self._tick()
        finally:
            self.idle.close()

    def _look_at_deadlines(self, now: float) -> None:
        self.idle.look_at_deadlines(now)
        for connection in tuple(self._connections):
            if connection.stream.deadline <= now:
                connection.expire()
            if self._cut_off <= now:
                self._cut(connection)

    def _cut(self, connection: Connection) -> None:
        if connection.stream.secure:
            connection.scope.cancel()
        else:
            self.idle.cut_off(connection)

    async def _tick(self) -> None:
        if self._stopping.is_set():
            await trio.sleep(_STOPPING_TICK_S)
        else:
            with trio.move_on_after(self._limits.tick_s):
                await self._stopping.wait()
