"""Redis servers that tests start: one on a socket, a replica beside it, a cluster of three."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port

_PATIENCE_S = 60.0
_SLOTS = 16_384


def program(name: str) -> str:
    """The path of a server's program; skips where it is not installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed here")
    return found


class RedisServer:
    """A server with a directory of its own, killed at the end. It listens on a socket, and on a
    port where one is given; `config` is a file, of a sentinel."""

    def __init__(
        self,
        directory: Path,
        *settings: str,
        port: int = 0,
        name: str = "redis-server",
        config: Path | None = None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.port = port
        self.socket = directory / "s"
        self._command = [
            *(program(name), *([str(config)] if config else [])),
            *("--port", str(port), "--dir", str(directory), "--unixsocket", str(self.socket)),
            *("--logfile", str(directory / "log")),
            *(["--sentinel"] if config else ["--save", ""]),
            *settings,
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def pid(self) -> int:
        """The number of its process, once it was started."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Run it, and wait until it answers (also: that it is loading)."""
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, start_new_session=True
        )
        end = time.monotonic() + _PATIENCE_S
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise OSError((self.directory / "log").read_text()[-2000:])
            with contextlib.suppress(OSError):
                self.call("PING")
                return
            time.sleep(0.01)
        raise TimeoutError("redis-server does not answer")

    def kill(self) -> None:
        """With the children that write for it."""
        assert self._process is not None
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def restart(self) -> None:
        """Where it was killed."""
        assert self._process is not None
        if self._process.poll() is not None:
            self.start()

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def call(self, *command: str | bytes | int) -> Any:
        """What it answers; an error is returned as text."""
        with self.connected() as connection:
            return ask(connection, *command)

    @contextlib.contextmanager
    def connected(self) -> Iterator[socket.socket]:
        """A connection for `ask`."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_PATIENCE_S)
            connection.connect(str(self.socket))
            yield connection

    def info(self, field: str) -> str:
        lines: list[str] = self.call("INFO").decode().splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)[field]

    def wait_for(self, field: str, *values: str) -> None:
        """Until INFO shows one of these values. A server that a sentinel gives another role ends
        the connections that it has: then it is asked again."""
        end, shown = time.monotonic() + _PATIENCE_S, "not told"
        while shown not in values:
            assert time.monotonic() < end, f"{field} is {shown}"
            time.sleep(0.01)
            with contextlib.suppress(OSError):
                shown = self.info(field)


def ask(connection: socket.socket, *command: str | bytes | int) -> Any:
    """One command over a connection, in RESP2."""
    parts = [part if isinstance(part, bytes) else str(part).encode() for part in command]
    packed = b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
    connection.sendall(b"*%d\r\n%b" % (len(parts), packed))
    with connection.makefile("rb") as stream:
        return _answer(stream)


def _answer(stream: Any) -> Any:
    line = stream.readline()
    if not line:
        raise ConnectionError("the connection ended")
    kind, rest = line[:1], line[1:-2]
    if kind in b"+-":
        return rest.decode()
    if kind == b":":
        return int(rest)
    count = int(rest)
    if count < 0:
        return None
    if kind == b"$":
        return stream.read(count + 2)[:-2]
    return [_answer(stream) for _ in range(count)]


def on_a_port(
    directory: Path,
    *settings: str,
    tls: Sequence[str] = (),
    config: Path | None = None,
    is_of_cluster: bool = False,
) -> RedisServer:
    """A server that also listens on a port, and on one of its cluster's: others, where somebody
    else was faster. With settings of `tls` the port is for that."""
    for attempt in range(5):
        port = free_port()
        encrypted = ("--tls-port", str(port), *tls) if tls else ()
        bus = ("--cluster-port", str(free_port())) if is_of_cluster else ()
        with contextlib.suppress(OSError):
            server = RedisServer(
                directory / str(attempt),
                *(*settings, *bus, *encrypted),
                port=0 if tls else port,
                config=config,
            )
            server.port = port
            return server
    raise AssertionError("no port to be had")


class RedisCluster:
    """Servers with as many of the slots each. One that is silent for `timeout_ms` is given up by
    the others, and its replica, where it has one, takes its place."""

    def __init__(
        self,
        directory: Path,
        *,
        timeout_ms: int = 5_000,
        servers: int = 3,
        settings: Sequence[str] = (),
    ) -> None:
        """`settings`: further ones of each server."""
        self._directory = directory
        self._timeout_ms = timeout_ms
        self._settings = settings
        self.servers = [self._start(str(number)) for number in range(servers)]
        self.replicas: list[RedisServer] = []
        share = -(-_SLOTS // servers)
        for number, server in enumerate(self.servers):
            last = min(_SLOTS, (number + 1) * share) - 1
            assert server.call("CLUSTER", "ADDSLOTSRANGE", number * share, last) == "OK"
            assert server.call("CLUSTER", "SET-CONFIG-EPOCH", number + 1) == "OK"
        self._introduce(*self.servers[1:])

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{each.port}" for each in self.servers)

    def kill(self) -> None:
        for server in self._all:
            server.kill()

    def add_replica(self, master: RedisServer) -> RedisServer:
        """A server that follows one of the three; returns when all know of it."""
        replica = self._start("replica")
        self.replicas.append(replica)
        self._introduce(replica)
        known = master.call("CLUSTER", "MYID")
        assert replica.call("CLUSTER", "REPLICATE", known) == "OK"
        replica.wait_for("master_link_status", "up")
        end = time.monotonic() + _PATIENCE_S
        while not all(each.call("CLUSTER", "REPLICAS", known) for each in self._all):
            assert time.monotonic() < end, "the replica is not known"
            time.sleep(0.02)
        return replica

    def owner(self, slot: int, *, seen_by: int = 0) -> RedisServer:
        """Who has a slot, as one of the three sees it."""
        for first, last, master, *_ in self.servers[seen_by].call("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(each for each in self._all if each.port == master[1])
        raise AssertionError(f"nobody has the slot {slot}")

    def move(self, slot: int, target: RedisServer) -> None:
        """Give a slot with its keys to another server, as resharding does."""
        with self.moving(slot, target):
            pass

    @contextlib.contextmanager
    def moving(self, slot: int, target: RedisServer) -> Iterator[None]:
        """The same; in the block the other server has all keys, and the slot is not its yet."""
        source = self.owner(slot)
        ids = {each.port: each.call("CLUSTER", "MYID").decode() for each in self.servers}
        command = ("CLUSTER", "SETSLOT", slot)
        assert target.call(*command, "IMPORTING", ids[source.port]) == "OK"
        assert source.call(*command, "MIGRATING", ids[target.port]) == "OK"
        while keys := source.call("CLUSTER", "GETKEYSINSLOT", slot, 1):
            moved = source.call("MIGRATE", "127.0.0.1", target.port, keys[0], 0, 10_000)
            assert moved in ("OK", "NOKEY"), moved
        yield
        for server in (target, source, *self.servers):
            assert server.call(*command, "NODE", ids[target.port]) == "OK"

    @property
    def _all(self) -> list[RedisServer]:
        return self.servers + self.replicas

    def _start(self, name: str) -> RedisServer:
        settings = (
            *("--cluster-enabled", "yes", "--cluster-node-timeout", str(self._timeout_ms)),
            *("--cluster-replica-validity-factor", "0", "--repl-diskless-sync-delay", "0"),
            *self._settings,
        )
        return on_a_port(self._directory / name, *settings, is_of_cluster=True)

    def _introduce(self, *servers: RedisServer) -> None:
        """To the first one; returns when all know each other."""
        first = self.servers[0]
        bus = int(first.call("CONFIG", "GET", "cluster-port")[1])
        for server in servers:
            assert server.call("CLUSTER", "MEET", "127.0.0.1", first.port, bus) == "OK"
        end = time.monotonic() + _PATIENCE_S
        while not all(self._is_whole(each) for each in self._all):
            assert time.monotonic() < end, "the cluster does not come up"
            time.sleep(0.02)

    def _is_whole(self, server: RedisServer) -> bool:
        about = server.call("CLUSTER", "INFO").decode()
        return "cluster_state:ok" in about and f"cluster_known_nodes:{len(self._all)}" in about


@contextlib.contextmanager
def killed(server: Any) -> Iterator[Any]:
    try:
        yield server
    finally:
        server.kill()
