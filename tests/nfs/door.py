"""A node with its NFS door, and clients of it."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tests.integration.harness import Node, best_mode, kvfs
from tests.integration.several import Several
from tests.nfs.mount import MountClient
from tests.nfs.rpc import ROOT, AuthSys, Connection
from tests.nfs.v3 import Client
from tests.nfs.v4 import Client40, Client41
from tests.ports import free_port


def held_of(pid: int, part: str) -> int:
    """How many files with names a process holds open, of those with this in their path."""
    found = 0
    for each in Path(f"/proc/{pid}/fd").iterdir():
        try:
            path = os.readlink(each)
        except FileNotFoundError:
            continue
        found += part in path and not path.endswith("(deleted)")
    return found


class Door:
    """Connections end with it."""

    def __init__(self, node: Node, port: int, mount_port: int) -> None:
        self.node = node
        self.port = port
        self.mount_port = mount_port
        self._open = contextlib.ExitStack()

    @classmethod
    @contextlib.contextmanager
    def make(
        cls,
        *flags: str,
        mode: str | None = None,
        home: Path | None = None,
        inside: tuple[str, ...] = (),
    ) -> Iterator["Door"]:
        """A running node that exports nothing yet. `home`: where it is to lie; `inside`: the
        command that it is started below."""
        port, mount_port = free_port(), free_port()
        flags = ("--nfs", f"127.0.0.1:{port}", "--nfs-mount-port", str(mount_port), *flags)
        if home is None:
            node = Node.make(mode or best_mode(), *flags)
        else:
            node = Node(mode or best_mode(), home, flags)
            node.mount.mkdir(parents=True)
        node.inside = inside
        made = cls(node, port, mount_port)
        try:
            node.up()
            yield made
        finally:
            made.close()
            node.remove()

    @classmethod
    @contextlib.contextmanager
    def of(cls, cluster: Several, *flags: str) -> Iterator["Door"]:
        """One more node of a cluster, which serves version 3 too, and ends with the cluster."""
        port, mount_port = free_port(), free_port()
        place = "--nfs", f"127.0.0.1:{port}", "--nfs-v3", "--nfs-mount-port", str(mount_port)
        made = cls(cluster.add(*place, *flags), port, mount_port)
        try:
            yield made
        finally:
            made.close()

    def close(self) -> None:
        """Close the connections that were made by it."""
        self._open.close()

    def kvfs(self, *arguments: str) -> str:
        """What a command about this node's store prints."""
        done = kvfs(*arguments, "--store", str(self.node.store))
        assert done.returncode == 0, done.stderr
        return done.stdout

    def exported(self, name: str, *options: str, mode: int = 0o755) -> Path:
        """The directory of a namespace, made and exported."""
        directory = self.node.mount / name
        directory.mkdir(exist_ok=True)
        directory.chmod(mode)
        self.kvfs("nfs", "export", name, *options)
        return directory

    def connection(self, credentials: AuthSys | None = ROOT) -> Connection:
        return self._open.enter_context(Connection("127.0.0.1", self.port, credentials))

    def v3(self, credentials: AuthSys | None = ROOT) -> Client:
        return Client(self.connection(credentials))

    def mounts(self) -> MountClient:
        return MountClient(self._open.enter_context(Connection("127.0.0.1", self.mount_port)))

    def v40(self, credentials: AuthSys | None = ROOT) -> Client40:
        return Client40(self.connection(credentials))

    def v41(self, credentials: AuthSys | None = ROOT) -> Client41:
        return Client41(self.connection(credentials))
