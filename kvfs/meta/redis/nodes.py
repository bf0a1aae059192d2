"""One server: a connection that many requests share, made anew when it is lost."""

import logging
from typing import Any, Final

import trio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from coredis.connection import (
    BaseConnection,
    TCPConnection,
    TCPLocation,
    UnixDomainSocketConnection,
    UnixDomainSocketLocation,
)
from coredis.exceptions import NoScriptError, RedisError

from kvfs.meta.redis.line import tls_context
from kvfs.meta.redis.location import Address, Location
from kvfs.meta.redis.scripts import Item, Script

_CONNECT_S: Final = 2.0
_REQUEST_S: Final = 5.0
"""After which a connection is given up: a server that is well answers within milliseconds."""

# It prints the traceback of each failed attempt; ours are told to the caller.
logging.getLogger("coredis").setLevel(logging.CRITICAL)


class Node:
    """A server. Its connection lives in a task of `nursery`; requests are answered in their
    order."""

    def __init__(self, address: Address, location: Location, nursery: trio.Nursery) -> None:
        self.address = address
        self._location = location
        self._nursery = nursery
        self._connection: BaseConnection | None = None
        self._connecting = trio.Lock()
        self.requests = 0
        """Sent so far: round trips."""

    async def call(self, *command: Item, asking: bool = False) -> Any:
        """The answer to a command. Raises RedisError, OSError, TimeoutError.

        Cancelled: it may have been done. `asking`: of a cluster's server that is being given the
        keys.
        """
        connection = self._connection
        if connection is None or not connection.usable:
            connection = await self._connected()
        self.requests += 1
        if asking:
            connection.create_request(b"ASKING", decode=False)
        name, *arguments = command
        assert isinstance(name, bytes)
        request = connection.create_request(name, *arguments, decode=False)
        try:
            return await request
        except TimeoutError:
            self.disconnect()
            raise

    async def script(self, script: Script, *arguments: Item, asking: bool = False) -> Any:
        """What a script returns; the server learns it where it has forgotten it."""
        try:
            return await self.call(b"EVALSHA", script.sha, *arguments, asking=asking)
        except NoScriptError:
            return await self.call(b"EVAL", script.text, *arguments, asking=asking)

    def disconnect(self) -> None:
        """The next request makes a new connection; those under way fail."""
        if self._connection is not None:
            self._connection.invalidate()
            self._connection = None

    async def _connected(self) -> BaseConnection:
        async with self._connecting:
            if self._connection is None or not self._connection.usable:
                connection = _connection(self.address, self._location)
                await self._nursery.start(_keep, connection)
                self._connection = connection
            return self._connection


async def _keep(connection: BaseConnection, task_status: "trio.TaskStatus[None]") -> None:
    """Run a connection to its end; only what happens before it is made is an error here: later,
    requests tell it."""
    status = _Started(task_status)
    try:
        await connection.run(task_status=status)
    except RedisError:
        if not status.is_started:
            raise
    finally:
        # One that could not be made leaves its queues open, and Python would complain.
        for queue in vars(connection).values():
            if isinstance(queue, MemoryObjectSendStream | MemoryObjectReceiveStream):
                queue.close()


class _Started:
    """Remembers whether a task said that it has started."""

    def __init__(self, task_status: "trio.TaskStatus[None]") -> None:
        self._status = task_status
        self.is_started = False

    def started(self, value: None = None) -> None:
        self.is_started = True
        self._status.started(value)


def _connection(address: Address, location: Location) -> BaseConnection:
    common: dict[str, Any] = {
        "stream_timeout": _REQUEST_S,
        "connect_timeout": _CONNECT_S,
        "username": location.username,
        "password": location.password,
        "db": location.db,
    }
    if address.path:
        return UnixDomainSocketConnection(UnixDomainSocketLocation(address.path), **common)
    return TCPConnection(
        TCPLocation(address.host, address.port),
        socket_keepalive=True,
        ssl_context=tls_context(location) if location.tls else None,
        **common,
    )
