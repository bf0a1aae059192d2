"""Nodes that serve each other's data files on loopback: in one event loop, with real files."""

import contextlib
import os
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import trio

from kvfs.base.config import PeerTlsMode
from kvfs.base.errors import KvfsError
from kvfs.cluster import secrets
from kvfs.cluster.handshake import Party
from kvfs.cluster.peer_client import PeerClient
from kvfs.cluster.peer_protocol import PeerAddress, PeerIdentity
from kvfs.cluster.peer_server import Method, PeerServer
from kvfs.cluster.secrets import Secrets
from kvfs.cluster.tls.peer_tls import PeerTls
from kvfs.datastore import checksum
from kvfs.datastore.files import DataFiles
from kvfs.datastore.index import Index, Sealed
from kvfs.datastore.leases.taker import MARKS
from kvfs.http.api import listen
from kvfs.transfer.chunk_provider import ChunkProvider
from kvfs.transfer.peer_fetches import PeerFetches
from kvfs.transfer.rdma.rdma_transport import Rdma
from kvfs.transfer.transfer import Transfer, WantedFile
from tests.contract.memory_engine import MemoryEngine

DEADLINE_S = 60.0
CLUSTER = "00112233445566ff"
OURS = Secrets([secrets.generate(CLUSTER)])
INO, VERSION = 7 << 48 | 1234, 3


class Peer:
    """A node, as far as its peers see it."""

    def __init__(
        self,
        node: int,
        root: Path,
        known: Secrets = OURS,
        interpreter: Path | None = None,
        methods: Mapping[str, Method] | None = None,
        tls: PeerTlsMode = "off",
    ) -> None:
        """`interpreter`: of its mover; None: it has none. `methods`: what else it answers. `tls`:
        it believes that all others speak TLS, until `plain` names them."""
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
        self.plain: set[int] = set()
        """Nodes that say of themselves that they do not speak TLS."""
        self.tls = PeerTls(tls, lambda: self.known, node, lambda other: other not in self.plain)
        self.client = PeerClient(self.identity, self.tls)
        self.rdma = Rdma(host, self.client, str(interpreter)) if interpreter else None
        self.address_of: Callable[[int], PeerAddress | None] = lambda _node: None
        """Of another node, while it lives."""
        self.fetches = PeerFetches(
            self.client,
            node,
            lambda other: self.address_of(other),
            lambda: True,
            self.rdma.taking if self.rdma else None,
        )
        self.shelf = ChunkProvider(self.files, self.index, self.fetches, self._is_changed)
        self.serves = True
        self.server = PeerServer(
            self.identity,
            self.shelf,
            lambda: self.serves,
            lambda _ino: None,
            {**(self.rdma.methods if self.rdma else {}), **(methods or {})},
            self.rdma.lending if self.rdma else None,
            tls=self.tls,
        )
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
                self._nursery = nursery
                if self.rdma is not None:
                    await nursery.start(self.rdma.run)
                await nursery.start(self.fetches.run)
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

    def fetch(self, wanted: WantedFile, holders: Sequence[PeerAddress]) -> "Arriving":
        """As a node does: beside the data files, of which it becomes one."""
        fd = self.files.begin_arriving(wanted.ino, wanted.version, wanted.size)
        return self.fetch_into(fd, wanted, holders, self._name)

    def fetch_into(
        self,
        fd: int,
        wanted: WantedFile,
        holders: Sequence[PeerAddress],
        name: Callable[[Transfer], None] = lambda _transfer: None,
    ) -> "Arriving":
        """Into a file that is open for writing, and is closed when this has ended."""
        arriving = Arriving(Transfer(wanted), fd)
        self._nursery.start_soon(arriving.run, self.fetches, holders, name)
        return arriving

    def _name(self, transfer: Transfer) -> None:
        wanted = transfer.wanted
        self.files.arrived(wanted.ino, wanted.version)
        if wanted.checksum:
            self.index.store([Sealed(wanted.ino, wanted.version, transfer.sums, 0)])

    async def bring(self, wanted: WantedFile, holders: Sequence[PeerAddress]) -> bytes:
        """All of it, whole, as its data file; its bytes."""
        arriving = self.fetch(wanted, holders)
        try:
            await arriving.whole()
            return read_back(arriving)
        finally:
            arriving.close()


class Arriving:
    """A file that comes from peers, until it has come or `close`."""

    def __init__(self, transfer: Transfer, fd: int) -> None:
        self.transfer = transfer
        self.fd = os.dup(fd)
        """For reading what is here."""
        self._scope = trio.CancelScope()
        transfer.begin(fd)

    async def run(
        self,
        fetches: PeerFetches,
        holders: Sequence[PeerAddress],
        name: Callable[[Transfer], None],
    ) -> None:
        fd, error = self.transfer.fd, None
        with self._scope:
            try:
                await fetches.fill(self.transfer, holders)
                name(self.transfer)
            except (KvfsError, OSError) as failed:
                error = failed
            finally:
                self.transfer.end(error)
                os.close(fd)

    async def span(self, offset: int, length: int) -> None:
        await self.transfer.span(offset, length)

    async def whole(self) -> None:
        await self.transfer.whole()

    async def has(self, chunks: int) -> None:
        """Returns when so many have come. Raises why they do not."""
        while self.transfer.plan.here < chunks:
            if self.transfer.has_failed:
                await self.transfer.whole()
            await self.transfer.changed.wait()

    def close(self) -> None:
        self._scope.cancel()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def read_back(arriving: Arriving, offset: int = 0, length: int | None = None) -> bytes:
    size = arriving.transfer.wanted.size if length is None else length
    return os.pread(arriving.fd, size, offset)


def open_files(root: Path) -> list[str]:
    """Regular files below `root` that this process has open, but for the marks of its nodes."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            path = os.readlink(f"/proc/self/fd/{number}")
            is_marks = os.path.basename(path) == MARKS
            if path.startswith(f"{root}/") and not os.path.isdir(path) and not is_marks:
                found.append(path)
    return found


def content(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


@contextlib.asynccontextmanager
async def peers(
    root: Path,
    count: int,
    interpreter: Path | None = None,
    methods: Mapping[str, Method] | None = None,
    tls: Sequence[PeerTlsMode] = (),
) -> AsyncIterator[list[Peer]]:
    """So many nodes, numbered from 1, that answer these methods too; with movers, where they have
    an interpreter. `tls`: for each, if it is not off."""
    modes: list[PeerTlsMode] = [*tls, *["off"] * (count - len(tls))]  # type: ignore[list-item]
    made = [
        Peer(
            number,
            root / str(number),
            interpreter=interpreter,
            methods=methods,
            tls=modes[number - 1],
        )
        for number in range(1, count + 1)
    ]
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as starting:
                for peer in made:
                    starting.start_soon(nursery.start, peer.run)
            yield made
            nursery.cancel_scope.cancel()
