"""An engine and nodes on one machine, each in a network namespace with a mount of its own.

    with Cluster(root, 3) as cluster:
        (cluster[1].mount / "cache" / "a").write_bytes(b"x")
        cluster[1].kill()

What is known of a cluster is on the disk and in the kernel: `./dev cluster` is a new process each
time, and finds what the last one left. DIR/<n> has a node's store and its mount, DIR/engine what
the metadata server keeps.
"""

import contextlib
import hashlib
import os
import shutil
import signal
import socket
import struct
import subprocess
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Final

from gateway.bare_directory import open_to_writers
from tests.cluster import engine
from tests.cluster.network import Lacking, Network, Ways
from tests.cluster.waiting import end_all, lives, name_of, wait_until
from tests.integration.harness import CannotStart, Node, is_mounted, kvfs

S3_PORT: Final = 9000
ADMIN_PORT: Final = 9001
PEER_PORT: Final = 9002
_LAST_S: Final = 30.0
_LONGEST_ROOT: Final = 80
"""Bytes: a socket's address below it has at most 107."""
_CREDENTIALS: Final = struct.Struct("3i")
SERVES_S3: Final = ("--s3", f"0.0.0.0:{S3_PORT}", "--s3-workers", "1")
"""Flags: on all addresses of a host that holds one node and nothing else."""


class Host(Node):
    """A node on a host of the network."""

    def __init__(self, number: int, home: Path, network: Network, *flags: str) -> None:
        self.number = number
        self.name = str(number)
        self.network = network
        self.address = network.address(self.name)
        served = ("--s3", "off", "--admin", f"{self.address}:{ADMIN_PORT}")
        peer = ("--node-name", self.name, "--peer", f"{self.address}:{PEER_PORT}")
        super().__init__("auto", home, (*served, *peer, *flags), inside=network.inside(self.name))

    @property
    def admin(self) -> str:
        """Where it tells health and metrics; reached from hosts of the network alone."""
        return f"http://{self.address}:{ADMIN_PORT}"

    def find(self) -> int | None:
        """The process number of its daemon, whoever started it."""
        try:
            with socket.socket(socket.AF_UNIX) as control:
                control.connect(str(self.store / "run" / "control.sock"))
                peer = control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except OSError:
            return None
        pid = int(_CREDENTIALS.unpack(peer)[0])
        return pid if lives(pid) else None

    def up(self) -> "Host":
        """Start it where it does not run; returns when its mount answers. What a killed one left
        running (its S3 workers) is waited for. Raises CannotStart."""
        self.pid = self.find()
        if self.pid is None:
            if not is_mounted(self.mount):
                self.mount.mkdir(parents=True, exist_ok=True)
            self.wait_for_the_last()
            super().up()
        return self

    def wait_for_the_last(self) -> None:
        """Until no process of a killed daemon is left there. A killed one that the kernel cannot
        let go of yet does no harm, and is not waited for."""

        def others() -> list[int]:
            return [
                pid
                for pid in self.network.processes(self.name)
                if pid not in self.killed and lives(pid) and _is_ours(pid)
            ]

        try:
            wait_until(lambda: not others(), "the last daemon's processes have ended", _LAST_S)
        except TimeoutError:
            names = "; ".join(f"{pid}: {name_of(pid)}" for pid in others())
            raise CannotStart(1, f"node {self.name}: still running there: {names}") from None

    def kill(self) -> None:
        """SIGKILL to its daemon alone. The mount stays behind, stale; and the process, where the
        kernel cannot let go of it before the next `up`."""
        pid = self.find()
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not lives(pid), "the daemon has ended", _LAST_S)
            self.killed.append(pid)
        self.pid = None

    def signal(self, number: int) -> None:
        """To its daemon: SIGSTOP, SIGCONT."""
        pid = self.find()
        assert pid is not None
        os.kill(pid, number)

    def end(self) -> None:
        """It runs no more and is not mounted, whatever state it was in."""
        if self.find() is not None:
            self.signal(signal.SIGCONT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                kvfs("down", *self.place())
        if is_mounted(self.mount):
            command = ["umount", "--force", "--lazy", str(self.mount)]
            subprocess.run(command, check=False, capture_output=True)
        self.pid = None
        end_all(lambda: self.network.processes(self.name))


class Cluster:
    """Nodes 1 to `size` (those that are there, where it is 0) and their engine, below `root`.

    As a context manager it is up inside, and gone with all it stored afterwards. `flags` are
    further ones of each node's `kvfs up`.
    """

    def __init__(self, root: Path, size: int = 0, *flags: str) -> None:
        self.root = root.resolve()
        if len(os.fsencode(self.root)) > _LONGEST_ROOT:
            raise Lacking(f"the path of the root has more than {_LONGEST_ROOT} bytes: {self.root}")
        tag = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:6]
        self.network = Network(tag)
        self.engine = engine.Engine(self.root / "engine", self.network)
        numbers = range(1, size + 1) if size else self._numbers()
        secret = ("--secret-file", str(self.root / "cluster.key"))
        self._shared = ("--engine", self.engine.url, *secret, *flags)
        self.hosts = {number: self._host(number) for number in numbers}

    def _host(self, number: int) -> Host:
        return Host(number, self.root / str(number), self.network, *self._shared)

    @contextlib.contextmanager
    def spare(self, number: int) -> Iterator[Host]:
        """A host beside those of the cluster, for a node that comes and goes; it does not run."""
        made = self._host(number)
        self.network.make([made.name])
        try:
            yield made
        finally:
            made.end()
            open_to_writers(made.mount)

    def _numbers(self) -> list[int]:
        return [int(host) for host in self.network.hosts() if host.isdecimal()]

    def __getitem__(self, number: int) -> Host:
        return self.hosts[number]

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts.values())

    def __enter__(self) -> "Cluster":
        try:
            return self.up()
        except BaseException:
            self.remove()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            for host in self:
                print(f"---- node {host.number}\n{host.log[-5000:]}")
        self.remove()

    def up(self) -> "Cluster":
        """All that does not run is started. Raises Lacking, CannotStart."""
        self.network.make([engine.HOST, *(host.name for host in self)])
        self.engine.start()
        first, *others = self
        first.up()
        _together(host.up for host in others)
        return self

    def down(self) -> None:
        """Nothing runs, nothing is mounted, no namespace is left; what was stored is."""
        for host in self:
            if self.network.exists:
                self.network.heal(host.name)
        _together(host.end for host in self)
        if self.network.exists:
            self.engine.stop()
        self.network.remove()

    def remove(self) -> None:
        self.down()
        for host in self:
            open_to_writers(host.mount)
        shutil.rmtree(self.root, ignore_errors=True)

    # ---- what may happen to it

    def partition(self, name: str | int, ways: Ways = "both") -> None:
        """Nothing comes to a host, or from it, or both."""
        self.network.cut(str(name), ways)

    def heal(self, name: str | int) -> None:
        self.network.heal(str(name))


def _is_ours(pid: int) -> bool:
    """Whether it is a daemon or a worker, and not somebody's shell on that host."""
    command = name_of(pid)
    return "cli.main" in command or "s3api." in command


def _together(steps: Iterable[Callable[[], object]]) -> None:
    """All at once; the first error is raised when all have ended."""
    with ThreadPoolExecutor() as pool:
        for future in [pool.submit(step) for step in steps]:
            future.result()
