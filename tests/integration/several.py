"""Nodes that share an engine, on the loopback interface of this machine: redis-servers, and
daemons with a mount each. For links, and partitions of them, see tests/cluster."""

import contextlib
import errno
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.cluster.waiting import wait_until
from tests.contract.redis_servers import RedisServer
from tests.integration.conftest import start
from tests.integration.harness import Node, base_directory, best_mode, kvfs


class Several:
    """One engine and its nodes. Made by `several`."""

    def __init__(self, home: Path, url: str) -> None:
        self.home = home
        # A kill loses nothing: what was answered was written, while no fsync holds that up.
        kept = ("--appendonly", "yes", "--appendfsync", "no")
        self._server = None if url else RedisServer(home / "engine", *kept)
        self.url = url or self.server.url
        self.nodes: list[Node] = []

    @property
    def server(self) -> RedisServer:
        """The engine, where it is of this cluster alone."""
        assert self._server is not None
        return self._server

    def add(self, *flags: str, mode: str | None = None, inside: tuple[str, ...] = ()) -> Node:
        """Start one more node, `inside` what runs its command; skips where this machine cannot do
        its mode."""
        number = len(self.nodes) + 1
        node = Node.make(mode or best_mode(), *self.flags(f"n{number}"), *flags)
        node.inside = inside
        self.nodes.append(node)
        return start(node)

    def flags(self, name: str) -> tuple[str, ...]:
        """Of a node of this cluster."""
        return (
            *("--engine", self.url, "--node-name", name),
            *("--peer", "127.0.0.1:0", "--secret-file", str(self.home / "cluster.key")),
        )

    def wait_for_room(self) -> None:
        """Return when the first node knows of all of them how much room they have: before, it gives
        them nothing."""

        def is_known() -> bool:
            found = members(self.nodes[0]).values()
            return sum(each["free_bytes"] > 0 for each in found) == len(self.nodes)

        wait_until(is_known, "each node has said what room it has")

    def remove(self) -> None:
        """Stop and delete everything, whatever state it is in."""
        for node in self.nodes:
            print(f"--- {node.home}\n{node.log[-5000:]}")  # shown where the test failed
            node.remove()
        if self._server is not None:
            self._server.kill()
        shutil.rmtree(self.home, ignore_errors=True)


def members(node: Node) -> dict[str, dict[str, Any]]:
    """The nodes of its cluster, as one of them lists them, by name."""
    done = kvfs("node", "list", "--json", "--store", str(node.store))
    assert done.returncode == 0, done.stderr
    return {each["name"]: each for each in json.loads(done.stdout)["nodes"]}


def has(path: Path, content: bytes) -> bool:
    """Whether a file has this content here: not yet while it is missing, or busy elsewhere."""
    try:
        return path.read_bytes() == content
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EBUSY):
            raise
        return False


@contextlib.contextmanager
def paused(node: Node) -> Iterator[None]:
    assert node.pid is not None
    os.kill(node.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(node.pid, signal.SIGCONT)


@contextlib.contextmanager
def several(count: int, *flags: str, mode: str | None = None, url: str = "") -> Iterator[Several]:
    """`count` nodes on one engine, as long as the block lasts: that of `url`, or a new one."""
    home = Path(tempfile.mkdtemp(prefix="kvfs-several-", dir=base_directory())).resolve()
    cluster = Several(home, url)
    try:
        for _ in range(count):
            cluster.add(*flags, mode=mode)
        yield cluster
    finally:
        cluster.remove()
