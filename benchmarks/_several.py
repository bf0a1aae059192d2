"""What `bench nodes` measures: two nodes of one cluster, a third whose metadata server is far away,
JuiceFS on the same server, and what bare processes do.
"""

import contextlib
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks import _plain
from benchmarks._guard import Guard
from benchmarks._interleave import NATIVE
from benchmarks._systems import Kvfs, System, Unavailable
from tests.fault.proxy import Proxy, proxied

NODES: Final = "kvfs"
STRICT: Final = "kvfs, strict"
FAR: Final = "kvfs, engine far"
PROGRAMS: Final = ("redis-server", "valkey-server")
_START_S: Final = 30.0
_SEEN_S: Final = 30.0


class Server:
    """A metadata server on a port of this host. Raises Unavailable where none is installed."""

    def __init__(self, directory: Path, guard: Guard) -> None:
        program = next(filter(None, map(shutil.which, PROGRAMS)), None)
        if program is None:
            raise Unavailable(f"none of {', '.join(PROGRAMS)} is installed")
        directory.mkdir(parents=True)
        self.name = Path(program).name
        self.port = free_port()
        command = [program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--appendonly", "yes", "--dir", str(directory)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        guard.process(process.pid)
        self._process = process
        wait_for(self._answers, "the metadata server")

    def url(self, database: int) -> str:
        return f"redis://127.0.0.1:{self.port}/{database}"

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), self.connection() as connection:
            return self.round_trip(connection) > 0
        return False

    def connection(self) -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.port), 5)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    def round_trip(self, connection: socket.socket) -> float:
        """Seconds of the least request."""
        began = time.perf_counter()
        connection.sendall(b"*1\r\n$4\r\nPING\r\n")
        if connection.recv(7) != b"+PONG\r\n":
            raise ConnectionError("the metadata server ended")
        return time.perf_counter() - began

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)


class Plain(System):
    """Two processes and the least request to the metadata server."""

    def __init__(self, base: Path, server: Server) -> None:
        super().__init__(NATIVE, base)
        self.server = server
        self._stack = contextlib.ExitStack()

    def start(self, guard: Guard) -> None:
        super().start(guard)
        self.sender = self._stack.enter_context(_plain.sender())
        self.connection = self._stack.enter_context(self.server.connection())

    def stop(self) -> None:
        self._stack.close()


class Nodes(System):
    """A node that writes and one that reads, both of one cluster; `root` is the writer's."""

    def __init__(self, base: Path, server: Server) -> None:
        self.writer, self.reader = (member(base, name, server.url(0)) for name in ("a", "b"))
        super().__init__(NODES, self.writer.root)

    def start(self, guard: Guard) -> None:
        self.writer.start(guard)
        self.reader.start(guard)

    def stop(self) -> None:
        self.reader.stop()
        self.writer.stop()

    def processes(self) -> list[int]:
        return [*self.writer.processes(), *self.reader.processes()]

    def read_by_other(self, path: Path) -> Path:
        """The same file on the reader's mount; returns when it is seen there."""
        other = self.reader.mountpoint / path.relative_to(self.writer.mountpoint)
        wait_for(other.exists, "the file on the other node")
        return other


class Level(System):
    """The same nodes, in a namespace of another level of coherence."""

    def __init__(self, name: str, nodes: Nodes, namespace: str) -> None:
        super().__init__(name, nodes.writer.mountpoint / namespace)
        self.nodes = nodes

    def start(self, guard: Guard) -> None:
        if self.nodes.writer.daemon() is None:
            raise Unavailable("the nodes did not start")
        super().start(guard)
        wait_for((self.nodes.reader.mountpoint / self.root.name).exists, "the namespace")


class Far(System):
    """A node of the same cluster whose way to the metadata server is long."""

    def __init__(self, base: Path, server: Server, delay_s: float) -> None:
        self._server, self._delay_s, self._base = server, delay_s, base
        self._stack = contextlib.ExitStack()
        super().__init__(FAR, base)

    def start(self, guard: Guard) -> None:
        server = ("127.0.0.1", self._server.port)
        proxy: Proxy = self._stack.enter_context(proxied(("127.0.0.1", 0), server))
        self.node = member(self._base, "c", f"redis://127.0.0.1:{proxy.port}/0")
        self._stack.callback(self.node.stop)
        self.node.start(guard)
        proxy.delay_s = self._delay_s / 2
        self.root = self.node.root

    def stop(self) -> None:
        self._stack.close()

    def processes(self) -> list[int]:
        return self.node.processes()


def member(base: Path, name: str, url: str) -> Kvfs:
    return Kvfs(
        f"node {name}",
        base / name,
        "auto",
        *("--engine", url, "--node-name", name, "--peer", f"127.0.0.1:{free_port()}"),
        *("--secret-file", str(base / "cluster.key"), "--no-s3"),
    )


def status(node: Kvfs) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(node.command("status", "--json"))
    return told


def round_trips(node: Kvfs) -> int:
    """Requests to the metadata server so far, for transactions and look-ups."""
    return int(status(node)["engine"]["round_trips"])


def wait_for(is_so: Any, what: str) -> None:
    """Raises Unavailable where it does not come to be."""
    end = time.monotonic() + _SEEN_S
    while not is_so():
        if time.monotonic() > end:
            raise Unavailable(f"waited for {what} in vain")
        time.sleep(0.001)


def free_port() -> int:
    """One that was free a moment ago."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


@contextlib.contextmanager
def running(base: Path, guard: Guard) -> Iterator[Server]:
    """Raises Unavailable."""
    server = Server(base / "server", guard)
    try:
        yield server
    finally:
        server.stop()
