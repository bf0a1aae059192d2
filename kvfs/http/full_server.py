"""Admission to a full server: pure decisions on which peer gets a connection, and whose connection
ends for it.

Strangers must not be able to hold all connections, from one address or from many, with heads that
they never finish or bodies that they never send. So an address that has a quarter of the
connections gets no more once three quarters are taken, and the last eighth is kept for addresses
whose callers have proven their identity.

Of the connections that wait for their peer, those end first that lose least by it. A connection
that was used a moment ago is left alone: its client is likely to use it again soon.
"""

import socket
from collections.abc import Iterable
from typing import Final, NamedTuple, Protocol, TypeVar

from kvfs.http.limits import Limits

UNFINISHED_HEAD: Final = 0
IDLE_STRANGER: Final = 1
IDLE_PROVEN: Final = 2
STALLED: Final = 3
"""Rank of a connection in the middle of a request, whose peer neither sends nor takes anything."""
_REMEMBERED: Final = 1024
"""Remembered addresses whose callers proved their identity and have no connection now."""


class Origin:
    """An address; for IPv6 the prefix that one subscriber is given (a /64)."""

    __slots__ = ("connections", "held", "name", "proven")

    def __init__(self, name: bytes | str, proven: bool) -> None:
        self.name = name
        self.held = 0
        """Connections that were accepted and have not ended."""
        self.connections = 0
        """Connections that are served."""
        self.proven = proven
        """Whether a caller there has proven its identity."""


class Origins:
    """The addresses that have connections, and those whose callers lately proved their identity."""

    def __init__(self) -> None:
        self._live: dict[bytes | str, Origin] = {}
        self._proven: dict[bytes | str, None] = {}

    def of(self, host: str) -> Origin:
        """Returns the origin of a connection from the address `host`, which it holds until
        `left`."""
        name = _subscriber(host)
        origin = self._live.get(name)
        if origin is None:
            origin = self._live[name] = Origin(name, name in self._proven)
        origin.held += 1
        return origin

    def left(self, origin: Origin) -> None:
        """Notes that one of its connections has ended."""
        origin.held -= 1
        if origin.held:
            return
        del self._live[origin.name]
        self._proven.pop(origin.name, None)
        if origin.proven:
            self._proven[origin.name] = None
            if len(self._proven) > _REMEMBERED:
                del self._proven[next(iter(self._proven))]


def has_room(limits: Limits, served: int, origin: Origin) -> bool:
    """Returns whether one more from `origin` may be served beside `served` connections."""
    most = limits.connections
    if origin.connections >= max(1, most // 4):
        return served < most - most // 4
    return served < (most if origin.proven else most - most // 8)


class Wait(NamedTuple):
    """A connection that waits for its peer."""

    rank: int
    """UNFINISHED_HEAD and so on: lower ones end first."""
    waited_s: float


class WaitingConnection(Protocol):
    """The facts about a connection that the decision needs."""

    @property
    def origin(self) -> Origin: ...

    def wait(self, now: float) -> Wait | None:
        """Returns the wait; None: it does not wait for its peer."""


C = TypeVar("C", bound=WaitingConnection)


def to_shed(limits: Limits, connections: Iterable[C], now: float, most: int) -> list[C]:
    """Returns the connections that end so that others are served, `most` of them, in order: by
    rank, then those of the address that has most, then those that have waited longest."""
    found = []
    for connection in connections:
        wait = connection.wait(now)
        if wait is None:
            continue
        grace_s = limits.shed_stalled_s if wait.rank == STALLED else limits.shed_idle_s
        if wait.waited_s >= grace_s:
            key = (wait.rank, -connection.origin.connections, -wait.waited_s)
            found.append((key, connection))
    found.sort(key=lambda each: each[0])
    return [connection for _, connection in found[:most]]


def _subscriber(host: str) -> bytes | str:
    if ":" not in host:
        return host
    try:
        return socket.inet_pton(socket.AF_INET6, host.partition("%")[0])[:8]
    except OSError:
        return host
