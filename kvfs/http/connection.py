"""One connection: requests in, responses out, in the order of the requests.

Its requests are served by `idle_connections`, in one step or by a task; over TLS a task serves the
connection from its beginning to its end.

Pipelined requests wait in the inbox until the one before has been answered. Any fault of a request
ends the connection after the answer to it, since nobody can tell where the next begins.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import trio

from kvfs.base.detach import Unfinished, aside, begin
from kvfs.http.body import RequestBody
from kvfs.http.connection_errors import (
    ConnectionLost,
    RequestRefused,
    Stalled,
    Untrusted,
    WireError,
)
from kvfs.http.full_server import IDLE_PROVEN, IDLE_STRANGER, STALLED, UNFINISHED_HEAD, Origin, Wait
from kvfs.http.head import ConnectionState, Head
from kvfs.http.idle_connections import IdleConnections
from kvfs.http.inbox import READ_BYTES, Inbox
from kvfs.http.limits import Limits
from kvfs.http.parser import HeadParser
from kvfs.http.response import (
    PLAIN,
    SIZED,
    FileRange,
    Response,
    is_delimited,
    plain_refusal,
    release,
    render_head,
)
from kvfs.http.response_writer import send_response
from kvfs.http.stream import NEVER, TURN_BYTES, Stream
from kvfs.http.tls_contexts import ServerTls
from kvfs.http.tls_stream import over

log = logging.getLogger(__name__)

_HANDSHAKE: Final = b"\x16"
"""The first byte of TLS; no method of HTTP begins with it."""
Handler = Callable[[Head, RequestBody], Awaitable[Response]]
Refuse = Callable[[int, str], Response]
OnResponse = Callable[[Head | None, int, int, float], None]


@dataclass(slots=True)
class Counters:
    """Counters since the server's start; `open_connections` and `waiting_connections` are present
    values."""

    open_connections: int = 0
    waiting_connections: int = 0
    """Connections that were accepted, and wait for others to end before they are served."""
    connections: int = 0
    requests: int = 0
    refused: int = 0
    """Responses made by `refuse`: requests that the server would not or could not serve."""
    failed: int = 0
    """Responses that did not go out whole."""
    sent_bytes: int = 0
    received_body_bytes: int = 0


@dataclass(slots=True, frozen=True)
class ServerContext:
    """The parts that the connections of a server share."""

    handler: Handler
    limits: Limits
    heads: HeadParser
    counters: Counters
    steps: bool = False
    """Whether the handler goes aside (`kvfs.base.detach`) before it waits."""
    refuse: Refuse = plain_refusal
    """Makes the response to a request that the server refuses with a status and a reason."""
    on_response: OnResponse | None = None
    """Told of each response: head (None if there was no proper one), status, bytes sent, seconds
    from the head's last byte to the response's last."""


class Connection:
    """One connection. While it is idle, or from its beginning over TLS, it is closed by `expire`
    and `stop`, while a task serves it by `scope` too."""

    def __init__(
        self,
        service: ServerContext,
        stream: Stream,
        peer: tuple[str, int],
        origin: Origin,
        idle: "IdleConnections[Connection]",
    ) -> None:
        self.stream = stream
        self.fileno = stream.fileno
        self._receive = stream.receiver
        self._idle_s = service.limits.idle_s
        self.is_idle = False
        self._idle = idle
        self.origin = origin
        self.scope = trio.CancelScope(shield=True)
        self._service = service
        self._inbox = Inbox(stream, service.limits, service.heads, peer)
        self._session = ConnectionState(origin)
        self._began = 0.0
        self._no_body: RequestBody | None = None
        """The body of all requests that have none."""
        self.since = self._inbox.since
        """The time when it was accepted (time.monotonic)."""

    def stop(self) -> None:
        """Serves the request in flight, or one that comes within `parting_s`, and no other."""
        inbox, stream = self._inbox, self.stream
        inbox.stopping = True
        self._idle_s = self._service.limits.parting_s
        if inbox.idle:
            stream.deadline = min(stream.deadline, inbox.since + self._idle_s)
            if stream.deadline <= time.monotonic():
                self.expire()

    def expire(self) -> None:
        """Ends the wait for the peer, if there is one."""
        if self.is_idle:
            self._idle.expire(self)
        elif not self._idle.interrupt(self):
            self.stream.expire()

    def wait(self, now: float) -> Wait | None:
        """Returns the wait for the peer, and its duration; None if there is none."""
        deadline, inbox = self.stream.deadline, self._inbox
        if deadline == NEVER:
            return None
        if inbox.is_fresh or inbox.in_head:
            return Wait(UNFINISHED_HEAD, now - (self.since if inbox.is_fresh else inbox.since))
        if inbox.idle:
            return Wait(IDLE_PROVEN if self._session.proven else IDLE_STRANGER, now - inbox.since)
        return Wait(STALLED, self._service.limits.stall_s - (deadline - now))

    def rest(self) -> None:
        """Begins to be idle."""
        inbox, limits = self._inbox, self._service.limits
        self.is_idle = inbox.idle = True
        inbox.since = now = time.monotonic()
        is_first = inbox.is_fresh and not inbox.stopping
        self.stream.deadline = now + (limits.head_s if is_first else self._idle_s)

    def step(self, *, expired: bool = False) -> bool | Unfinished[bool]:
        """Serves what has come to an idle connection. Returns whether it goes on, or the rest of a
        request that must wait, whose result says so. `expired`: it ends if nothing has come."""
        inbox, stream = self._inbox, self.stream
        try:
            data = self._receive(READ_BYTES)
        except BlockingIOError:
            if not expired:
                return True
            data = b""
        except OSError:
            data = b""
        if not data:
            stream.close()
            return False
        inbox.data, inbox.start = data, 0
        self.is_idle = inbox.idle = False
        stream.deadline, stream.turn_bytes = NEVER, TURN_BYTES
        try:
            result = begin(self.serve())
        except RuntimeError:
            return self._fail()
        if result is True:  # as `rest` does
            self.is_idle = inbox.idle = True
            inbox.since = now = time.monotonic()
            stream.deadline = now + self._idle_s
        return result

    def go_on(
        self, rest: Unfinished[bool], error: Exception | None = None
    ) -> bool | Unfinished[bool]:
        """Does what `step` does with the rest of a request whose wait is over; `error` is raised in
        its place."""
        try:
            result = rest.go_on(error)
        except RuntimeError:
            return self._fail()
        if result is True:
            self.rest()
        return result

    def _fail(self) -> bool:
        """Ends a connection whose handler waited and had not gone aside."""
        log.exception("a connection failed")
        self.stream.close()
        return False

    async def serve(self) -> bool:
        """Serves requests until none is under way, and returns whether the connection goes on;
        closes it if not. Cancelled: closes it."""
        goes_on, inbox = False, self._inbox
        try:
            while await self._serve_next():
                if inbox.start == len(inbox.data):
                    goes_on = True
                    break
        except ConnectionLost:
            log.debug("a connection ended early", exc_info=True)
        except Exception:
            log.exception("a connection failed")
        finally:
            if not goes_on:
                self.stream.close()
        return goes_on

    async def attend(self, tls: ServerTls) -> bool:
        """Serves a connection over TLS to its end and closes it. Shielded: ends by `stop`, by its
        deadlines or by `scope`. Returns whether it is plain, and may be: then it goes on."""
        is_plain = False
        try:
            with self.scope:
                is_plain = tls.plain_too and not await self._begins_tls()
                if not is_plain:
                    await self._begin_tls(tls)
                    while await self.serve():
                        pass
        except ConnectionLost:
            log.debug("a connection ended early", exc_info=True)
        except Exception:
            log.exception("a connection failed")
        finally:
            if not is_plain:
                self.stream.close()
        return is_plain

    async def _begins_tls(self) -> bool:
        """Returns whether the first byte is one of TLS. Raises ConnectionLost, Stalled."""
        inbox = self._inbox
        inbox.idle, inbox.since = True, time.monotonic()
        try:
            return await self.stream.peek(inbox.since + self._service.limits.head_s) == _HANDSHAKE
        finally:
            inbox.idle = False

    async def _begin_tls(self, tls: ServerTls) -> None:
        """Raises ConnectionLost, Stalled; what is wrong with the peer's certificate is told."""
        stream = over(self.stream, tls.context())
        self.stream = self._inbox.stream = stream
        try:
            await stream.handshake()
        except ConnectionLost as error:
            if isinstance(error, Untrusted):
                tls.refused(self._inbox.peer[0], str(error))
            if not isinstance(error, Stalled):
                await stream.linger()  # so that the peer sees the reason
            raise

    async def turn_away(self) -> None:
        """Answers that the server is full, and closes it; shielded like `attend`."""
        try:
            with self.scope:
                refusal = self._refusal(503, "too many connections: try again later")
                await self._respond(None, None, refusal)
        except ConnectionLost:
            log.debug("a connection ended early", exc_info=True)
        finally:
            self.stream.close()

    async def _serve_next(self) -> bool:
        """Returns whether the connection goes on."""
        try:
            head = await self._inbox.next_head()
        except RequestRefused as refusal:
            self._began = time.monotonic()
            await self._respond(None, None, self._refusal(refusal.status, refusal.reason))
            return False
        if head is None:
            return False
        head.session = self._session
        self._began = time.monotonic()
        counters = self._service.counters
        counters.requests += 1
        if head.content_length or head.chunked or head.expects_continue:
            inbox = self._inbox
            body = RequestBody(head, inbox, self._service.limits)
            if head.chunked or inbox.start + (head.content_length or 0) > len(inbox.data):
                self.stream.restart_pace()
        elif self._no_body is None:
            body = self._no_body = RequestBody(head, self._inbox, self._service.limits)
        else:
            body = self._no_body
        try:
            return await self._respond(head, body, await self._answer(head, body))
        finally:
            counters.received_body_bytes += body.received_bytes

    async def _answer(self, head: Head, body: RequestBody) -> Response:
        try:
            if (head.content_length or 0) > self._service.limits.body_bytes:
                limit = self._service.limits.body_bytes
                raise RequestRefused(413, f"a body may hold {limit} bytes")
            if head.expects_continue and body.remaining == 0:
                # Clients that asked for leave wait for it even where they have nothing to send.
                await body.send_continue()
            if not self._service.steps:
                await aside()
            return await self._service.handler(head, body)
        except RequestRefused as refusal:
            return self._refusal(refusal.status, refusal.reason)
        except WireError:
            raise
        except Exception:
            path = head.target.partition(b"?")[0]  # a query may hold a signature
            log.exception("a handler failed: %s %r", head.method, path)
            return self._refusal(500, "the server failed")

    def _refusal(self, status: int, reason: str) -> Response:
        self._service.counters.refused += 1
        response = self._service.refuse(status, reason)
        response.close = True
        return response

    async def _respond(
        self, head: Head | None, body: RequestBody | None, response: Response
    ) -> bool:
        """Sends the response and gives back what it holds. Returns whether the connection goes
        on."""
        is_taken = body is not None and (body.is_none or body.is_over())
        goes_on = (
            head is not None
            and body is not None
            and head.persistent
            and not response.close
            and not self._inbox.stopping
            # Told with the answer, the end loses no request, as it may while idle.
            and not self._service.counters.waiting_connections
            and (isinstance(response.body, SIZED) or is_delimited(head, response))
            and (is_taken or body.can_be_drained(self._service.limits.drain_bytes))
        )
        try:
            rendered = render_head(head, response, goes_on)
        except (TypeError, ValueError):
            log.exception("a handler's response cannot be sent: status %r", response.status)
            await release(response)
            response, goes_on = self._refusal(500, "the server failed"), False
            rendered = render_head(head, response, goes_on)
        response.head_bytes = len(rendered)
        before, service = self.stream.sent_bytes, self._service
        try:
            await send_response(self.stream, rendered, head, response)
        except BaseException:
            service.counters.failed += 1
            self.stream.abort()
            raise
        finally:
            if isinstance(response.body, FileRange):
                if response.body.close is not None:
                    response.body.close()
            elif not isinstance(response.body, PLAIN):
                await release(response)
            sent_bytes = self.stream.sent_bytes - before
            service.counters.sent_bytes += sent_bytes
            if service.on_response is not None:
                seconds = time.monotonic() - self._began
                service.on_response(head, response.status, sent_bytes, seconds)
        if goes_on and is_taken:
            return True
        return await self._finish(body, goes_on)

    async def _finish(self, body: RequestBody | None, goes_on: bool) -> bool:
        """Takes the part of the request that the handler left. Returns whether the connection goes
        on."""
        is_over = body is not None and body.is_over()
        if goes_on and body is not None and not is_over:
            try:
                return await body.drain(self._service.limits.drain_bytes)
            except RequestRefused:
                return False
        if not goes_on and not (is_over and self._inbox.is_empty()):
            await self.stream.linger()
        return goes_on
