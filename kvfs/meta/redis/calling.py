"""Requests over connections of our own, whatever happens to the server: sent again within a
deadline.

Each `RetryingClient` has one connection, to the server that `finding` names, and serves one request
at a time. In a cluster each shard lies in one slot, so one server has it: it is found anew when it
is lost, or says that another one has it.
"""

import secrets
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import trio

from kvfs.base.clock import now
from kvfs.base.errors import Invalid, KvfsError, Unavailable
from kvfs.meta.redis import identity, refusals, scripts
from kvfs.meta.redis.about import check_server, read_info, sync_means
from kvfs.meta.redis.finding import Finder
from kvfs.meta.redis.line import ErrorReply, RespConnection, ServerLost, connect
from kvfs.meta.redis.location import EngineLocation, Kind, ServerAddress, parse
from kvfs.meta.redis.scripts import TOP, Item, Script, keys_of
from kvfs.meta.redis.slots import Redirect, redirect

_PAUSE_S: Final = (0.005, 0.25)
"""Pause before a refused request is sent again: the first, and the longest; doubled each time."""
_CONNECT_S: Final = 2.0
_REQUEST_S: Final = 5.0
"""Time after which a connection is given up: a healthy server answers within milliseconds."""


class RetryingClient:
    """Makes one request after the other. `deadline_s` bounds each request with its retries."""

    def __init__(self, location: EngineLocation, deadline_s: float, shard: int = TOP) -> None:
        self.location = location
        self.deadline_s = deadline_s
        self.requests = 0
        """Requests sent so far: round trips."""
        self.connections = 0
        """Connections made so far: while it stays, it was one server that answered."""
        self.apart_at = 0.0
        """The time, by `clock.now`, when it was last seen to have no connection: another server may
        have taken over."""
        self.at = location.addresses[0]
        """The server that was asked last."""
        self._keys = keys_of(location.prefix, shard)
        self._finder = Finder(location, shard)
        self._line: RespConnection | None = None
        self._aside: ServerAddress | None = None
        """The server that answers only the next request."""
        self._attempt = trio.CancelScope()
        self._is_stopped = False

    @property
    def values(self) -> bytes:
        """The key of the hash of all values."""
        return self._keys[0]

    @property
    def state(self) -> bytes:
        """The key of the hash of the state."""
        return self._keys[2]

    @property
    def log(self) -> bytes:
        """The key of the stream."""
        return self._keys[3]

    def end(self) -> float:
        """Returns the time at which a request that begins now is given up, by trio's clock."""
        return trio.current_time() + self.deadline_s

    async def call(self, *command: Item, end: float | None = None) -> Any:
        """Sends a command and returns its answer. Raises Unavailable at `end`, NoSpace (the
        server's memory is full, and nothing was done), Invalid, NotSupported."""
        return await self._patiently(lambda line: line.ask(*command), end)

    async def script(self, script: Script, *arguments: Item, end: float | None = None) -> Any:
        """Runs a script and returns its answer. Cancelled: it may have been done. Raises what
        `call` raises."""
        return await self._patiently(lambda line: line.script(script, *arguments), end)

    async def examine(self, cluster: str | None) -> str:
        """Checks the server; returns the owner of the metadata: `cluster`, or a new id if there are
        none yet. Raises Unavailable, NotSupported, Conflict, Invalid."""
        check_server(read_info(await self.call(b"INFO")), self.location)
        found = await self.script(scripts.IDENTIFY, *identity.arguments(cluster))
        return identity.checked(found, cluster, self.location.shown)

    async def keep(self) -> str:
        """Asks the server to keep what was committed; returns its promise. Raises Unavailable."""
        about = read_info(await self.call(b"INFO"))
        means = sync_means(about, await self._appendfsync(), round(self.deadline_s * 1000 / 4))
        if means.command:

            async def settle(line: RespConnection) -> Any:
                # What is waited for is what the same connection wrote, and all before it.
                await line.script(scripts.TOUCH, secrets.token_bytes(4))
                return await line.ask(*means.command)

            answer = await self._patiently(settle)
            if (answer[0] if isinstance(answer, list) else answer) < 1:
                raise Unavailable(f"the engine {self.location.shown} did not keep it in time")
        return means.promise

    def stop(self) -> None:
        """Closes, and ends the request under way: it and later ones raise Unavailable."""
        self._is_stopped = True
        self._attempt.cancel()
        self.close()

    def close(self) -> None:
        """Closes the connection; the next request makes a new one. Idempotent."""
        self.apart_at = now()
        if self._line is not None:
            self._line.close()
            self._line = None

    async def _patiently(
        self, send: Callable[[RespConnection], Awaitable[Any]], end: float | None = None
    ) -> Any:
        """Sends until it is answered."""
        end = self.end() if end is None else end
        pause_s, most_s = _PAUSE_S
        reason: Exception = TimeoutError("no answer")
        self._begin_anew()
        while not self._is_stopped:
            try:
                deadline = min(end, trio.current_time() + _REQUEST_S)
                with trio.CancelScope(deadline=deadline) as self._attempt:
                    if self._aside is not None:
                        return await self._send_aside(send, self._aside)
                    line = await self._connected()
                    self.requests += 1
                    return await send(line)
            except (ServerLost, ErrorReply) as error:
                reason = error
                self._after(error)
            if trio.current_time() + pause_s >= end:
                shown = self.location.shown
                raise refusals.unanswered(str(reason), shown, self.deadline_s) from reason
            with trio.CancelScope() as self._attempt:
                await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, most_s)
        raise Unavailable("the engine is closed")

    def _begin_anew(self) -> None:
        """Forgets a redirect of an earlier request: it is not for this one."""
        self._aside = None

    async def _send_aside(
        self, send: Callable[[RespConnection], Awaitable[Any]], address: ServerAddress
    ) -> Any:
        """Sends one request to the server that is being given the slot, and returns its answer."""
        self.at, self._aside = address, None
        self.connections += 1
        line = await connect(address, self.location, self._keys)
        try:
            line.is_asking = True
            self.requests += 1
            return await send(line)
        finally:
            line.close()

    async def _appendfsync(self) -> str:
        """Returns the server's setting, or 'unknown' if it does not tell us."""
        try:
            found = await self.call(b"CONFIG", b"GET", b"appendfsync")
        except KvfsError:
            return "unknown"
        return bytes(found[1]).decode() if len(found) > 1 else "unknown"

    def _after(self, reason: ServerLost | ErrorReply) -> None:
        """Raises errors that asking again cannot cure."""
        shown, text = self.location.shown, str(reason)
        is_lost = isinstance(reason, ServerLost)
        if not is_lost and self.location.kind is Kind.CLUSTER and (to := redirect(text, self.at)):
            self._redirected(to)
        elif is_lost:
            self._leave()
            if refusals.is_of(reason, ssl.SSLCertVerificationError):
                raise refusals.untrusted(text, shown) from reason
        elif refusals.is_full(text):
            raise refusals.full(shown) from reason
        elif not refusals.is_passing(text):
            self.close()
            raise refusals.raised(text, shown) from reason
        elif refusals.said(text).startswith(refusals.ELSEWHERE):
            self._leave()

    def _redirected(self, to: Redirect) -> None:
        if to.is_moved:
            self._finder.tell(to.address)
            self.close()
        else:
            self._aside = to.address

    def _leave(self) -> None:
        """Leaves a server that is not the right one, or does not answer."""
        self._finder.again()
        self.close()

    async def _connected(self) -> RespConnection:
        if self._line is None or not self._line.is_open:
            self.apart_at = now()
            with trio.move_on_after(_CONNECT_S):
                self.at = await self._finder.find()
                self.connections += 1
                self._line = await connect(self.at, self.location, self._keys)
                return self._line
            raise ServerLost("it does not accept connections")
        return self._line


def locate(url: str) -> EngineLocation:
    """Returns the location that a URL names, with the password from its file. Raises Invalid."""
    location = parse(url)
    if not location.password_file:
        return location
    file = Path(location.password_file)
    try:
        return location._replace(password=file.read_text().rstrip("\r\n"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise Invalid(f"the password file {file} cannot be read: {reason}") from None
