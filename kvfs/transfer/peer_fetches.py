"""The files whose chunks come to one node from others, and what it knows of those."""

import time
import zlib
from collections.abc import Callable, Sequence
from typing import Final

import trio

from kvfs.base.errors import Unavailable
from kvfs.cluster.peer_client import PeerClient
from kvfs.cluster.peer_protocol import PeerAddress
from kvfs.transfer.peer_fetch import Means, PeerFetch
from kvfs.transfer.transfer import SMALL_BYTES, Transfer
from kvfs.transfer.transport import OverTcp, Transport

_FILES: Final = 32
"""Files that are fetched at a time, others in turn: of 300 small ones at once each would take so
long that its deadlines pass. Large ones have turns of their own: a reader of one block must not
wait for gigabytes."""
_THREADS: Final = 16
"""Threads that receive at a time."""
_FIRST_LOOK_S: Final = 0.4
"""Time before the first look: most files are here by then."""
_LOOK_S: Final = 0.1


class PeerFetches:
    """The fetches of one event loop."""

    def __init__(
        self,
        peers: PeerClient,
        me: int,
        address: Callable[[int], PeerAddress | None],
        is_sure: Callable[[], bool],
        transport: Transport | None = None,
    ) -> None:
        """`me`: this node's number. `address`: of another node, while it lives. `is_sure`: whether
        this node may say who lives; while it may not, nothing is given up as lost. `transport`:
        OverTcp unless told otherwise."""
        self._address = address
        self._is_sure = is_sure
        self._fetches: dict[PeerFetch, None] = {}
        self._handed_on: dict[tuple[int, int], PeerFetch] = {}
        self._begun = trio.Event()
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
        """Looks after what is fetched, until cancelled: what is stuck is asked of others."""
        task_status.started()
        try:
            while True:
                await self._begun.wait()
                self._begun = trio.Event()
                await self._watch()
        finally:
            self._means.peers.close()

    async def _watch(self) -> None:
        """Looks as long as anything is fetched."""
        looked, was_held_up = time.monotonic(), False
        while self._fetches:
            await trio.sleep(_LOOK_S)
            now, before = time.monotonic(), looked
            looked = now
            # What this process was too busy to take is no source's fault: it gets another chance.
            was_held_up = now - before > 2 * _LOOK_S and not was_held_up
            if was_held_up:
                continue
            for fetch in tuple(self._fetches):
                if now - fetch.began >= _FIRST_LOOK_S:
                    fetch.look(now)

    def living(self, nodes: Sequence[int]) -> list[PeerAddress]:
        """Returns the addresses of those that live. Raises Unavailable if none does and this node
        may not say so."""
        alive = [there for node in nodes if (there := self._address(node)) is not None]
        if not alive and not self._is_sure():
            raise Unavailable("this node has lost touch with its cluster")
        return alive

    async def fill(
        self, transfer: Transfer, holders: Sequence[PeerAddress], *, hand_on: bool = True
    ) -> None:
        """Returns when all chunks are in the transfer's file. `hand_on`: other nodes may have what
        is here of it.

        Raises NotFound (no holder has it), Conflict (its holders have other content: the record is
        outdated), Busy (it is being written where it is), Corrupt (what came had wrong bytes),
        Unavailable (nobody answered in time), OSError (of the file). When it is cancelled, the
        chunks that came stay, and nothing is written any more."""
        name = transfer.wanted.ino, transfer.wanted.version
        fetch = PeerFetch(self._means, transfer, _in_turn(holders, name[0], self._means.me))
        if hand_on:
            self._handed_on[name] = fetch
        turns = self._small if transfer.wanted.size <= SMALL_BYTES else self._large
        try:
            if turns.value:  # `acquire` would take a turn of the loop, a reader's wait
                turns.acquire_nowait()
            else:
                await turns.acquire()
            try:
                fetch.began = time.monotonic()
                self._fetches[fetch] = None
                self._begun.set()
                await fetch.run()
            finally:
                turns.release()
        finally:
            self._fetches.pop(fetch, None)
            if self._handed_on.get(name) is fetch:
                del self._handed_on[name]

    def arriving(self, ino: int, version: int) -> Transfer | None:
        """Returns the file if its chunks come from other nodes just now."""
        fetch = self._handed_on.get((ino, version))
        return None if fetch is None else fetch.transfer

    def is_asked_of(self, transfer: Transfer, chunk: int, node: int) -> bool:
        """Returns whether the chunk is being fetched from that node."""
        fetch = self._handed_on.get((transfer.wanted.ino, transfer.wanted.version))
        return fetch is not None and fetch.is_asked_of(chunk, node)


def _in_turn(holders: Sequence[PeerAddress], ino: int, me: int) -> list[PeerAddress]:
    """Returns the holders in an order of its own for each file and reader: their load spreads over
    them."""
    return sorted(holders, key=lambda holder: zlib.crc32(b"%d %d %d" % (holder.node, ino, me)))
