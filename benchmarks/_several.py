"""What `bench nodes` measures: two nodes of one cluster, a third whose metadata server is far away,
JuiceFS on the same server, and what bare processes do.
"""

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks import _plain
from benchmarks._guard import Guard
from benchmarks._interleave import NATIVE
from benchmarks._systems import Kvfs, System, Unavailable
from tests.cluster.network import Network
from tests.fault.proxy import Proxy, proxied
from tests.ports import free_port

NODES: Final = "kvfs"
STRICT: Final = "kvfs, strict"
FAR: Final = "kvfs, engine far"
PROGRAMS: Final = ("redis-server", "valkey-server")
_START_S: Final = 30.0
_SEEN_S: Final = 30.0
_DATA: Final = """
local found = {}
for _, name in ipairs(redis.call('KEYS', '*')) do
  if redis.call('TYPE', name).ok ~= 'stream' then found[#found + 1] = name end
end
return table.concat(found, ' ')
"""


class Site(NamedTuple):
    """Where a process runs: this host, or one in a network namespace of its own."""

    address: str
    inside: Sequence[str]
    """What stands before a command that is to run there."""
    socket: Callable[[], socket.socket]
    """A TCP socket of that host."""


HERE: Final = Site("127.0.0.1", (), socket.socket)


def site(network: Network, host: str) -> Site:
    """A host of a network."""
    return Site(network.address(host), network.inside(host), lambda: network.socket(host))


class Server:
    """A metadata server on a port of this host. Raises Unavailable where none is installed."""

    def __init__(self, directory: Path, guard: Guard, at: Site = HERE) -> None:
        program = next(filter(None, map(shutil.which, PROGRAMS)), None)
        if program is None:
            raise Unavailable(f"none of {', '.join(PROGRAMS)} is installed")
        directory.mkdir(parents=True)
        self.name = Path(program).name
        self.port = free_port()
        self._at = at
        command = [*at.inside, program, "--port", str(self.port), "--bind", at.address]
        command += ["--protected-mode", "no", "--save", ""]
        command += ["--appendonly", "yes", "--dir", str(directory)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        guard.process(process.pid)
        self._process = process
        wait_for(self._answers, "the metadata server")

    def url(self, database: int) -> str:
        return f"redis://{self._at.address}:{self.port}/{database}"

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), self.connection() as connection:
            return self.round_trip(connection) > 0
        return False

    def connection(self) -> socket.socket:
        made = self._at.socket()
        try:
            made.settimeout(5)
            made.connect((self._at.address, self.port))
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException:
            made.close()
            raise
        return made

    def round_trip(self, connection: socket.socket) -> float:
        """Seconds of the least request."""
        began = time.perf_counter()
        connection.sendall(b"*1\r\n$4\r\nPING\r\n")
        if connection.recv(7) != b"+PONG\r\n":
            raise ConnectionError("the metadata server ended")
        return time.perf_counter() - began

    @property
    def pid(self) -> int:
        return self._process.pid

    def traffic(self) -> int:
        """Bytes that it received and sent so far."""
        lines = self._ask("INFO", "stats").splitlines()
        told = dict(line.split(":", 1) for line in lines if ":" in line)
        return int(told["total_net_input_bytes"]) + int(told["total_net_output_bytes"])

    def commands(self) -> int:
        """Commands that it ran so far, for whomever."""
        lines = self._ask("INFO", "commandstats").splitlines()
        calls = (line.partition("calls=")[2].partition(",")[0] for line in lines)
        return sum(int(each) for each in calls if each)

    def memory(self) -> int:
        """Bytes that its data take, without streams, which are bounded."""
        names = self._ask("EVAL", _DATA, "0").split()
        return sum(int(self._ask("MEMORY", "USAGE", name, "SAMPLES", "0")) for name in names)

    def _ask(self, *words: str) -> str:
        request = f"*{len(words)}\r\n" + "".join(f"${len(w)}\r\n{w}\r\n" for w in words)
        with self.connection() as connection:
            connection.sendall(request.encode())
            with connection.makefile("rb") as answer:
                head = answer.readline().decode().strip()
                if head[0] != "$":
                    return head[1:]
                return answer.read(int(head[1:])).decode()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """It answers nobody meanwhile."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

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


def member(
    base: Path, name: str, url: str, at: Site = HERE, *flags: str, checkout: Path | None = None
) -> Kvfs:
    """`checkout`: another one of the project, by which the node runs."""
    return Kvfs(
        f"node {name}",
        base / name,
        "auto",
        *("--engine", url, "--node-name", name, "--peer", f"{at.address}:{free_port()}"),
        *("--secret-file", str(base / "cluster.key"), "--no-s3", *flags),
        checkout=checkout,
        inside=at.inside,
    )


def status(node: Kvfs) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(node.command("status", "--json"))
    return told


def round_trips(node: Kvfs) -> int:
    """Requests to the metadata server so far, for transactions and look-ups."""
    return int(status(node)["engine"]["round_trips"])


def wait_for(is_so: Any, what: str, pause_s: float = 0.001) -> None:
    """Raises Unavailable where it does not come to be."""
    end = time.monotonic() + _SEEN_S
    while not is_so():
        if time.monotonic() > end:
            raise Unavailable(f"waited for {what} in vain")
        time.sleep(pause_s)


@contextlib.contextmanager
def running(base: Path, guard: Guard, at: Site = HERE) -> Iterator[Server]:
    """Raises Unavailable."""
    server = Server(base / "server", guard, at)
    try:
        yield server
    finally:
        server.stop()
