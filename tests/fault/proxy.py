"""A proxy before a server that does what networks do: it delays, holds back, refuses and cuts.

    with proxied(unix_path, unix_server) as proxy:
        proxy.delay_s = 0.01        # each way, from now on
        proxy.bytes_s = 1 << 20     # the answers of each connection come so fast
        proxy.held = "out"          # answers are held back; None: they arrive after all
        proxy.cut()                 # all connections end
        proxy.is_refusing = True    # new ones end at once
        proxy.go_over(other_server) # all end, and new ones lead there

Cuts are also drawn from a seed: before a request has gone through, in its middle, or when it was
done and its answer is on the way. An address is the path of a unix socket or (host, port).
"""

import contextlib
import random
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Literal

Address = Path | tuple[str, int]
Ways = Literal["in", "out", "both"]
_BLOCK: Final = 1 << 16
_MOST_QUEUED: Final = 64
"""Blocks on their way: the sender waits then, as with a full link."""
_CUT_S: Final = 5.0
_LOOK_S: Final = 0.01
"""How often a connection that is held back, or waits for a cut, looks again."""


class Proxy:
    """Serves until closed. Its attributes may be set at any time, by any thread."""

    def __init__(
        self,
        listening: socket.socket,
        connect: Callable[[], socket.socket],
        seed: int = 0,
        most_bytes: int = 0,
    ) -> None:
        """`connect` gives a new connection to the server."""
        self.delay_s = 0.0
        """How long what comes is on its way, each way."""
        self.bytes_s = 0.0
        """What comes from the server on a connection takes its time: so many bytes in a second; 0:
        it does not."""
        self.held: Ways | None = None
        """What comes to the server (`in`), from it (`out`) or both does not arrive, until this is
        None again."""
        self.is_refusing = False
        self.most_bytes = most_bytes
        """After at most so many bytes, of both ways together, a connection is cut; 0: never."""
        self.cuts = 0
        """Connections cut so far."""
        self._connect = connect
        self._seed = seed
        self._listening = listening
        self._connections: list[_Connection] = []
        self._is_closed = False
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    @property
    def port(self) -> int:
        """Where it listens, at an address with a port."""
        return int(self._listening.getsockname()[1])

    def cut(self) -> None:
        """The connections that there are; what is on its way is lost."""
        for connection in list(self._connections):
            connection.is_cut = True
        for connection in list(self._connections):
            if connection.thread.is_alive():  # else it finds that it is cut when it begins
                connection.thread.join()

    def go_over(self, server: Address) -> None:
        """Another server answers at the address from now on."""
        self._connect = _connector(server)
        self.cut()

    def close(self) -> None:
        self._is_closed = True
        self._accepting.join()
        self.cut()
        self._listening.close()

    def _accept(self) -> None:
        number = 0
        while not self._is_closed:
            if not select.select([self._listening], [], [], 5 * _LOOK_S)[0]:
                continue
            client, _ = self._listening.accept()
            if self.is_refusing:
                client.close()
                continue
            draw = random.Random(f"{self._seed} {number}")
            number += 1
            self._connections = [each for each in self._connections if each.thread.is_alive()]
            made = _Connection(self, client, self._connect, draw)
            self._connections.append(made)  # before it serves, so that a cut meets it
            made.thread.start()


class _Connection:
    """One, with a thread of its own."""

    def __init__(
        self,
        proxy: Proxy,
        client: socket.socket,
        connect: Callable[[], socket.socket],
        draw: random.Random,
    ) -> None:
        self.is_cut = False
        self._proxy = proxy
        self._draw = draw
        self._left = draw.randrange(proxy.most_bytes) if proxy.most_bytes else None
        self.thread = threading.Thread(target=self._serve, args=(client, connect))

    def _serve(self, client: socket.socket, connect: Callable[[], socket.socket]) -> None:
        with client, contextlib.suppress(OSError), connect() as server:
            client.setblocking(False)
            server.setblocking(False)
            ways = _Way("in", client, server), _Way("out", server, client)
            while not self.is_cut and not all(way.is_done for way in ways):
                self._step(ways)

    def _step(self, ways: "tuple[_Way, _Way]") -> None:
        """Waits until something can be done, and does it."""
        now = time.monotonic()
        going = [way for way in ways if self._proxy.held not in (way.name, "both")]
        due = [way for way in going if way.queue and way.queue[0][0] <= now]
        later = [way.queue[0][0] - now for way in going if way.queue and way not in due]
        readable, writable, _ = select.select(
            [way.source for way in ways if not way.is_ended and len(way.queue) < _MOST_QUEUED],
            [way.sink for way in due],
            [],
            min([5 * _LOOK_S, *later]) if len(going) == 2 else _LOOK_S,
        )
        for way in due:
            if way.sink in writable:
                way.send()
        for way in ways:
            if way.source in readable:
                self._take(way)

    def _due(self, way: "_Way", count: int) -> float:
        """When a block that came now arrives."""
        now = time.monotonic()
        if way.name == "out" and self._proxy.bytes_s:
            way.free_at = max(now, way.free_at) + count / self._proxy.bytes_s
            now = way.free_at
        return now + self._proxy.delay_s

    def _take(self, way: "_Way") -> None:
        block = way.source.recv(_BLOCK)
        if not block:
            way.end()
        elif self._left is None or len(block) < self._left:
            way.queue.append((self._due(way, len(block)), block))
            self._left = None if self._left is None else self._left - len(block)
        else:
            # Nothing of the last one, a part, or all: then it is done, and nobody hears.
            part = block[: self._draw.choice([0, self._left, len(block)])]
            way.sink.settimeout(_CUT_S)
            way.sink.sendall(b"".join(each for _, each in way.queue) + part)
            self._proxy.cuts += 1
            self.is_cut = True


class _Way:
    """What comes from one end and goes to the other."""

    def __init__(self, name: Ways, source: socket.socket, sink: socket.socket) -> None:
        self.name = name
        self.source = source
        self.sink = sink
        self.queue: deque[tuple[float, bytes]] = deque()
        """When it arrives, and what."""
        self.free_at = 0.0
        """When the link has carried what is in the queue."""
        self.is_ended = False
        """Whether the source says no more."""

    @property
    def is_done(self) -> bool:
        return self.is_ended and not self.queue

    def end(self) -> None:
        self.is_ended = True
        self._tell_end()

    def send(self) -> None:
        due, block = self.queue[0]
        try:
            sent = self.sink.send(block)
        except BlockingIOError:
            return
        if sent < len(block):
            self.queue[0] = due, block[sent:]
            return
        self.queue.popleft()
        self._tell_end()

    def _tell_end(self) -> None:
        if self.is_done:
            self.sink.shutdown(socket.SHUT_WR)


def _listen(address: Address) -> socket.socket:
    made = socket.socket(socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX)
    if isinstance(address, tuple):
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(address if isinstance(address, tuple) else str(address))
    made.listen(64)
    return made


def _connector(address: Address) -> Callable[[], socket.socket]:
    def connect() -> socket.socket:
        made = socket.socket(socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX)
        try:
            made.connect(address if isinstance(address, tuple) else str(address))
        except BaseException:
            made.close()
            raise
        return made

    return connect


@contextlib.contextmanager
def proxied(
    address: Address, server: Address, *, seed: int = 0, most_bytes: int = 0
) -> Iterator[Proxy]:
    """One that listens at an address (port 0: any; `port` tells which) before a server."""
    proxy = Proxy(_listen(address), _connector(server), seed, most_bytes)
    try:
        yield proxy
    finally:
        proxy.close()
