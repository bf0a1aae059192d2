"""The transport whose bytes are moved by movers, and by TCP if that is impossible.

These come over TCP instead, and are counted: chunks from a node without a mover, or with one of
another kind; chunks for which a holder had no free piece; and for REST_S all chunks of a node whose
mover failed. Wrong bytes are blamed on the way, not on the holder: they are asked for again over
TCP.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, TypeVar

import trio

from kvfs.base.errors import Corrupt, KvfsError, Unavailable
from kvfs.cluster.peer_client import IncomingChunks, PeerClient
from kvfs.cluster.peer_protocol import TAKEN, Ask, Lent, PeerAddress
from kvfs.transfer.chunk_receiver import BUFFER_BYTES, STALL_S, Arrived, ChunkBuffers, Taking
from kvfs.transfer.rdma.exporter import LENT_S
from kvfs.transfer.rdma.registered_memory import LANDING_BYTES, Landing
from kvfs.transfer.rdma.transfer_process import Mover
from kvfs.transfer.sink import Sink
from kvfs.transfer.transport import OverTcp

T = TypeVar("T")
log = logging.getLogger(__name__)
TAKEN_S: Final = LENT_S - 2 * STALL_S
"""Time after the answer in which lent chunks may be taken: later they may be gone."""
assert TAKEN_S > STALL_S
assert BUFFER_BYTES <= LANDING_BYTES
LEAST_BYTES: Final = 1 << 20
"""Bytes below which a request is answered sooner in the answer itself than by a way of three round
trips."""
REST_S: Final = 30.0
_MOST_TICKETS: Final = 256
_TELL_S: Final = 2.0


class OverMover:
    """A `Transport`; `run` it."""

    def __init__(self, mover: Mover, peers: PeerClient) -> None:
        self.own = mover
        """This node's own mover."""
        self._peers = peers
        self._tcp = OverTcp()
        self._buffers = ChunkBuffers()
        self._rests: dict[int, float] = {}
        """Times (time.monotonic) until which a node's mover is left alone."""
        self._tickets: deque[tuple[PeerAddress, int]] = deque(maxlen=_MOST_TICKETS)
        """Tickets to be given back; one that is forgotten ends by itself."""
        self._told = trio.Event()
        self.counters = {"mover_bytes": 0, "mover_over_tcp": 0, "mover_failures": 0}

    def mover(self, address: PeerAddress, ask: Ask) -> bytes:
        if ask.length(ask.chunks) < LEAST_BYTES:
            return b""
        if self._rests.get(address.node, -math.inf) > time.monotonic():
            return b""
        return self.own.kind

    @contextmanager
    def taking(
        self, address: PeerAddress, incoming: IncomingChunks, sink: Sink, arrived: Arrived
    ) -> Iterator[Taking]:
        if incoming.lent is None:
            asked = incoming.ask
            self.counters["mover_over_tcp"] += asked.length(asked.chunks) >= LEAST_BYTES
            with self._tcp.taking(address, incoming, sink, arrived) as taking:
                yield taking
            return
        try:
            with self._buffers.lent() as buffer:
                yield _Moving(self, address, incoming, incoming.lent, sink, buffer, arrived)
        finally:
            self._tickets.append((address, incoming.lent.ticket))
            self._told.set()

    async def run(self) -> None:
        """Tells holders what was taken of them, until cancelled."""
        while True:
            await self._told.wait()
            self._told = trio.Event()
            while self._tickets:
                address, _ = self._tickets[0]
                tickets = [ticket for at, ticket in self._tickets if at == address]
                left = [each for each in self._tickets if each[0] != address]
                self._tickets.clear()
                self._tickets.extend(left)
                with suppress(KvfsError):
                    await self._peers.call(address, TAKEN, tickets, _TELL_S)

    def failed(self, address: PeerAddress, error: KvfsError) -> None:
        """Counts a failure of that node's mover, and leaves it alone for a while."""
        self.counters["mover_failures"] += 1
        if self._rests.get(address.node, -math.inf) <= time.monotonic():
            log.warning(
                "node %d is asked over TCP for %g s: its mover: %s", address.node, REST_S, error
            )
        self._rests[address.node] = time.monotonic() + REST_S


class _Moving(Taking):
    """Takes bytes that lie in the memory of the holder's mover."""

    def __init__(
        self,
        transport: OverMover,
        address: PeerAddress,
        incoming: IncomingChunks,
        lent: Lent,
        sink: Sink,
        buffer: memoryview,
        arrived: Arrived,
    ) -> None:
        super().__init__(incoming, sink, arrived)
        self._transport = transport
        self._address = address
        self._lent = lent
        self._end = self._offset + incoming.ask.length(incoming.count)
        self._buffer = buffer
        self._until = self._began + TAKEN_S

    async def run(self, threads: trio.CapacityLimiter) -> None:
        """Like `Taking.run`, except for Corrupt: it is Unavailable in this way."""
        try:
            while self._offset < self._end:
                if time.monotonic() > self._until:
                    raise Unavailable(f"what was lent has not come within {TAKEN_S:g} s")
                await self._move(threads)
        except (Corrupt, Unavailable) as error:
            self._transport.failed(self._address, error)
            raise Unavailable(str(error)) from None

    async def _move(self, threads: trio.CapacityLimiter) -> None:
        """Moves the next piece."""
        mover = self._transport.own
        length = min(self._chunk_left, len(self._buffer))
        remote = self._lent.at[self._chunk - self._first] + self.chunk_bytes
        piece = await _in_time(mover.memory.land())
        try:
            holder = f"{self._address.host}:{self._lent.port}"
            await _in_time(mover.read(piece, holder, remote, length))
            self.moved_at = time.monotonic()
            await trio.to_thread.run_sync(self._copy, piece, length, limiter=threads)
        finally:
            mover.memory.leave(piece)
        self._transport.counters["mover_bytes"] += length
        if not self._chunk_left:
            self._finish_chunk(self._arrived)

    def _copy(self, piece: Landing, length: int) -> None:
        """Copies the piece in a thread: memory that others may write to is copied before it is
        verified."""
        part = self._buffer[:length]
        self._transport.own.memory.empty(piece, part)
        self._take(part)


async def _in_time(step: Awaitable[T]) -> T:
    """Raises Unavailable if it takes longer than a pause may. A piece that came in that moment is
    kept: only cancelled ones count as late."""
    with trio.move_on_after(STALL_S):
        return await step
    raise Unavailable(f"nothing has come for {STALL_S:g} s")
