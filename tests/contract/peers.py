"""Nodes that serve each other's data files on loopback: in one event loop, with real files."""

import contextlib
import os
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import trio

from kvfs.cluster import secrets
from kvfs.cluster.handshake import Party
from kvfs.cluster.peer_client import PeerClient
from kvfs.cluster.peer_protocol import PeerAddress, PeerIdentity
from kvfs.cluster.peer_server import PeerServer
from kvfs.cluster.secrets import Secrets
from kvfs.datastore import checksum
from kvfs.datastore.files import DataFiles
from kvfs.datastore.index import Index, Sealed
from kvfs.http.api import listen
from kvfs.transfer.arriving_file import ArrivingFile, WantedFile
from kvfs.transfer.chunk_provider import ChunkProvider
from kvfs.transfer.file_fetches import Fetcher
from kvfs.transfer.rdma.rdma_transport import Rdma
from tests.contract.memory_engine import MemoryEngine

DEADLINE_S = 60.0
CLUSTER = "00112233445566ff"
OURS = Secrets([secrets.generate(CLUSTER)])
INO, VERSION = 7 << 48 | 1234, 3


class Peer:
    """A node, as far as its peers see it."""

    def __init__(
        self, node: int, root: Path, known: Secrets = OURS, interpreter: Path | None = None
    ) -> None:
        """`interpreter`: of its mover; None: it has none."""
        root.mkdir()
        self.listeners = listen("127.0.0.1", 0)
        host, port = self.listeners[0].getsockname()[:2]
        self.address = PeerAddress(node, host, port)
        self.known = known
        self.written: set[int] = set()
        """Inode numbers of files that are being written here."""
        self._refused: dict[int, trio.Event] = {}
        self.identity = PeerIdentity(
            Party(CLUSTER, node, 1, f"host-{node}"), lambda: self.known, self.address
        )
        self.files = DataFiles(root)
        self.index = Index(MemoryEngine())
        self.client = PeerClient(self.identity)
        self.rdma = Rdma(host, self.client, str(interpreter)) if interpreter else None
        self.fetcher = Fetcher(self.client, node, self.rdma.taking if self.rdma else None)
        self.shelf = ChunkProvider(self.files, self.index, self.fetcher, self._is_changed)
        self.serves = True
        self.server = PeerServer(self.identity, self.shelf, lambda: self.serves, lambda _ino: None)
        if self.rdma is not None:
            self.rdma.serve(self.server)
        self.scope = trio.CancelScope()

    def refused(self, ino: int) -> trio.Event:
        """Set when somebody asked for a file that is being written here."""
        return self._refused.setdefault(ino, trio.Event())

    def _is_changed(self, ino: int) -> bool:
        if ino in self.written:
            self.refused(ino).set()
        return ino in self.written

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        with self.scope:
            async with trio.open_nursery() as nursery:
                if self.rdma is not None:
                    await nursery.start(self.rdma.run)
                await nursery.start(self.fetcher.run)
                await nursery.start(self.server.serve, self.listeners)
                task_status.started()
        self.files.close()

    def put(self, data: bytes, *, sealed: bool = True, ino: int = INO) -> WantedFile:
        """A data file is here from now on; what its record says."""
        fd = self.files.create(ino, VERSION)
        os.write(fd, data)
        sums = checksum.checksum(fd, len(data))
        os.close(fd)
        assert sums is not None
        if sealed:
            self.index.store([Sealed(ino, VERSION, sums.chunks, 0)])
        return WantedFile(ino, VERSION, len(data), sums.combined if sealed else b"")

    def fetch(
        self, wanted: WantedFile, holders: Sequence[PeerAddress], *, lazily: bool = False
    ) -> ArrivingFile:
        """As a node does: into a file beside the data files."""
        fd = self.files.begin_arriving(wanted.ino, wanted.version, wanted.size)
        try:
            return self.fetcher.start(wanted, holders, fd, lazily=lazily)
        finally:
            os.close(fd)

    async def bring(self, wanted: WantedFile, holders: Sequence[PeerAddress]) -> bytes:
        """All of it, whole, as its data file; its bytes."""
        arriving = self.fetch(wanted, holders)
        try:
            await arriving.whole()
            self.files.arrived(wanted.ino, wanted.version)
            if wanted.checksum:
                self.index.store([Sealed(wanted.ino, wanted.version, arriving.sums, 0)])
            return read_back(arriving)
        finally:
            arriving.close()


def read_back(arriving: ArrivingFile, offset: int = 0, length: int | None = None) -> bytes:
    return os.pread(arriving.fd, arriving.wanted.size if length is None else length, offset)


def content(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


@contextlib.asynccontextmanager
async def peers(
    root: Path, count: int, interpreter: Path | None = None
) -> AsyncIterator[list[Peer]]:
    """So many nodes, numbered from 1; with movers, where they have an interpreter."""
    made = [
        Peer(number, root / str(number), interpreter=interpreter) for number in range(1, count + 1)
    ]
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as starting:
                for peer in made:
                    starting.start_soon(nursery.start, peer.run)
            yield made
            nursery.cancel_scope.cancel()
