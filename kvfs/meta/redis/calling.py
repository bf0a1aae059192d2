"""Requests over lines of our own, whatever happens to the server: sent again within a deadline.

Each `Caller` has one line, to the server of the URL or the master that sentinels name, and serves
one request at a time.
"""

import secrets
import ssl
from pathlib import Path
from typing import Any, Final

import trio

from kvfs.errors import Invalid, KvfsError, NotSupported, Unavailable
from kvfs.meta.redis import identity, refusals, scripts
from kvfs.meta.redis.about import check_server, read_info, sync_means
from kvfs.meta.redis.line import Line, Lost, Refused, connect
from kvfs.meta.redis.location import Address, Kind, Location, parse
from kvfs.meta.redis.scripts import Item, Script, keys_of
from kvfs.meta.redis.sharding import TOP, Layout

_PAUSE_S: Final = (0.005, 0.25)
"""Before a refused request is sent again: at first, and at most; doubled each time."""
_CONNECT_S: Final = 2.0
_REQUEST_S: Final = 5.0
"""After which a connection is given up: a server that is well answers within milliseconds."""


class Caller:
    """Asks one after the other. `deadline_s` bounds each request with its retries."""

    def __init__(self, location: Location, deadline_s: float) -> None:
        if location.kind is Kind.CLUSTER:
            raise NotSupported(
                f"nodes cannot use a Redis cluster ({location.shown}): name a server, or sentinels"
            )
        self.location = location
        self.deadline_s = deadline_s
        self.requests = 0
        """Sent so far: round trips."""
        self._keys = keys_of(location.prefix, TOP)
        self._line: Line | None = None
        self._attempt = trio.CancelScope()
        self._is_stopped = False

    @property
    def log(self) -> bytes:
        """The key of the stream."""
        return self._keys[3]

    def end(self) -> float:
        """When what begins now is given up, by trio's clock."""
        return trio.current_time() + self.deadline_s

    async def call(self, *command: Item, end: float | None = None) -> Any:
        """What a command answers. Raises Unavailable at `end`, Invalid, NotSupported."""
        return await self._patiently(None, command, self.end() if end is None else end)

    async def script(self, script: Script, *arguments: Item, end: float | None = None) -> Any:
        """What a script answers. Cancelled: it may have been done. Raises as `call`."""
        return await self._patiently(script, arguments, self.end() if end is None else end)

    async def examine(self, cluster: str | None) -> str:
        """Whether the server will do; returns whose the metadata are, `cluster` or a new id where
        there are none yet. Raises Unavailable, NotSupported, Conflict, Invalid."""
        check_server(read_info(await self.call(b"INFO")), self.location)
        arguments = identity.arguments(Layout.SINGLE, cluster)
        found = await self.script(scripts.IDENTIFY, *arguments)
        return identity.checked(found, Layout.SINGLE, cluster, self.location.shown)

    async def keep(self) -> str:
        """Ask the server to keep what was committed; returns what it promises. Raises
        Unavailable."""
        about = read_info(await self.call(b"INFO"))
        means = sync_means(about, await self._appendfsync(), round(self.deadline_s * 1000 / 4))
        if means.command:
            # What is waited for is what the same connection wrote, and all before it.
            await self.call(b"HSET", self._keys[2], b"synced", secrets.token_bytes(4))
            answer = await self.call(*means.command)
            if (answer[0] if isinstance(answer, list) else answer) < 1:
                raise Unavailable(f"the engine {self.location.shown} did not keep it in time")
        return means.promise

    def stop(self) -> None:
        """Close, and end the request under way: it and later ones raise Unavailable."""
        self._is_stopped = True
        self._attempt.cancel()
        self.close()

    def close(self) -> None:
        """Idempotent; the next request makes a new line."""
        if self._line is not None:
            self._line.close()
            self._line = None

    async def _patiently(self, script: Script | None, items: tuple[Item, ...], end: float) -> Any:
        pause_s, most_s = _PAUSE_S
        reason: Exception = TimeoutError("no answer")
        while not self._is_stopped:
            try:
                deadline = min(end, trio.current_time() + _REQUEST_S)
                with trio.CancelScope(deadline=deadline) as self._attempt:
                    line = await self._connected()
                    self.requests += 1
                    if script is None:
                        return await line.ask(*items)
                    return await line.script(script, *items)
            except (Lost, Refused) as error:
                reason = error
                self._after(error)
            if trio.current_time() + pause_s >= end:
                shown = self.location.shown
                raise refusals.unanswered(str(reason), shown, self.deadline_s) from reason
            with trio.CancelScope() as self._attempt:
                await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, most_s)
        raise Unavailable("the engine is closed")

    async def _appendfsync(self) -> str:
        """The server's setting, or 'unknown' where it does not tell us."""
        try:
            found = await self.call(b"CONFIG", b"GET", b"appendfsync")
        except KvfsError:
            return "unknown"
        return bytes(found[1]).decode() if len(found) > 1 else "unknown"

    def _after(self, reason: Lost | Refused) -> None:
        """Raises what cannot be mended by asking again."""
        shown, text = self.location.shown, str(reason)
        if isinstance(reason, Lost):
            self.close()
            if refusals.is_of(reason, ssl.SSLCertVerificationError):
                raise refusals.untrusted(text, shown) from reason
        elif not refusals.is_passing(text):
            self.close()
            raise refusals.raised(text, shown) from reason
        elif refusals.said(text).startswith(refusals.ELSEWHERE):
            self.close()

    async def _connected(self) -> Line:
        if self._line is None or not self._line.is_open:
            with trio.move_on_after(_CONNECT_S):
                address = await self._address()
                self._line = await connect(address, self.location, self._keys)
                return self._line
            raise Lost("it does not accept connections")
        return self._line

    async def _address(self) -> Address:
        """Of the server, or the master that the first sentinel that answers names. Raises Lost."""
        if self.location.kind is Kind.SERVER:
            return self.location.addresses[0]
        plain = self.location._replace(username=None, password=None, db=0)
        name = self.location.name
        reason: Exception = Lost("there is nobody to ask")
        for address in self.location.addresses:
            try:
                line = await connect(address, plain, ())
                try:
                    found = await line.ask(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", name.encode())
                finally:
                    line.close()
                if found:
                    return Address(found[0].decode(), int(found[1]))
                reason = Lost(f"the sentinel {address} knows no master '{name}'")
            except (Lost, Refused) as error:
                reason = error
        raise Lost(str(reason)) from reason


def locate(url: str) -> Location:
    """What a URL says, with the password that is in a file. Raises Invalid."""
    location = parse(url)
    if not location.password_file:
        return location
    file = Path(location.password_file)
    try:
        return location._replace(password=file.read_text().rstrip("\r\n"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise Invalid(f"the password file {file} cannot be read: {reason}") from None
