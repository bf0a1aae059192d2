"""The files that this node fetches from others: each once, however many want it."""

import zlib
from collections.abc import Sequence
from typing import Final

import trio

from kvfs.base.errors import Unavailable
from kvfs.cluster.peer_client import PeerClient
from kvfs.cluster.peer_protocol import PeerAddress
from kvfs.transfer.arriving_file import ArrivingFile, WantedFile
from kvfs.transfer.fetch import Fetch, Means
from kvfs.transfer.transport import OverTcp, Transport

_FILES: Final = 32
"""Files that are fetched at a time, others in turn: of 300 small ones at once each would take so
long that its deadlines pass. Large ones have turns of their own: a reader of one block must not
wait for gigabytes."""
_SMALL_BYTES: Final = 64 << 20
_THREADS: Final = 16
"""Threads that receive at a time."""


class Fetcher:
    """The fetches of one node; for its event loop."""

    def __init__(self, peers: PeerClient, me: int, transport: Transport | None = None) -> None:
        """`me`: this node's number. `transport`: OverTcp unless told otherwise."""
        self._nursery: trio.Nursery | None = None
        self._fetches: dict[tuple[int, int], Fetch] = {}
        self.counters = {
            "fetched_files": 0,
            "fetched_bytes": 0,
            "fetches_failed": 0,
            "fetches_hedged": 0,
            "fetches_redirected": 0,
            "fetches_wrong_bytes": 0,
        }
        self._small, self._large = trio.Semaphore(_FILES), trio.Semaphore(_FILES)
        threads = trio.CapacityLimiter(_THREADS)
        self._means = Means(peers, me, transport or OverTcp(), threads, {}, {}, self.counters)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Fetch what is asked for, until cancelled; tasks that wait then get Unavailable."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None
            for fetch in tuple(self._fetches.values()):
                fetch.arriving.close()
            self._fetches.clear()
            self._means.peers.close()

    def start(
        self,
        wanted: WantedFile,
        holders: Sequence[PeerAddress],
        fd: int,
        *,
        present: bytes = b"",
        lazily: bool = False,
    ) -> ArrivingFile:
        """The file begins to arrive in `fd`, which is open for writing and has its size; it may be
        closed at once. A file that arrives already goes on as it is: then `fd` is not used.

        `present` names chunks that are in `fd` already, a bit for each. `lazily`: only what
        somebody wants comes. Close what this returns, whole or not."""
        fetch = self._fetches.get((wanted.ino, wanted.version))
        if fetch is not None and not fetch.arriving.is_closed and not fetch.arriving.failure:
            return fetch.arriving
        arriving = ArrivingFile(wanted, fd, present, lazily)
        if self._nursery is None:
            arriving.fail(Unavailable("this node is not connected to others"))
            return arriving
        fetch = Fetch(self._means, arriving, _in_turn(holders, wanted.ino, self._means.me))
        self._fetches[wanted.ino, wanted.version] = fetch
        self._nursery.start_soon(self._drive, fetch)
        return arriving

    def arriving(self, ino: int, version: int) -> ArrivingFile | None:
        """The file, where it is arriving or has and was not closed yet."""
        fetch = self._fetches.get((ino, version))
        return None if fetch is None or fetch.arriving.is_closed else fetch.arriving

    def is_asked_of(self, arriving: ArrivingFile, chunk: int, node: int) -> bool:
        """Whether the chunk is being fetched from that node."""
        fetch = self._fetches.get((arriving.wanted.ino, arriving.wanted.version))
        return fetch is not None and fetch.is_asked_of(chunk, node)

    async def _drive(self, fetch: Fetch) -> None:
        arriving = fetch.arriving
        arriving.use()
        try:
            async with self._small if arriving.wanted.size <= _SMALL_BYTES else self._large:
                await fetch.run()
            while not arriving.is_closed:
                await arriving.changed.wait()
        finally:
            arriving.let_go()
            key = arriving.wanted.ino, arriving.wanted.version
            if self._fetches.get(key) is fetch:
                del self._fetches[key]


def _in_turn(holders: Sequence[PeerAddress], ino: int, me: int) -> list[PeerAddress]:
    """The holders in an order of its own for each file and reader: their load spreads over them."""
    return sorted(holders, key=lambda holder: zlib.crc32(b"%d %d %d" % (holder.node, ino, me)))
