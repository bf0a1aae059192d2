"""Receives the body of an answer into the file, verified chunk by chunk.

Payload goes from the socket into a reused buffer, is hashed there in C while the CPU's cache still
has it, and written from there: on two cores 0.69 s of CPU for a GB; with splice and a mapping of
each chunk to hash it 0.67, without any hash 0.47. A thread takes the bytes as long as they come
without a pause: a turn of the loop for each piece would cost more than the rest.
"""

import mmap
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import trio
import xxhash

from kvfs.base.errors import Corrupt, Unavailable
from kvfs.cluster.peer_client import IncomingChunks
from kvfs.cluster.peer_protocol import CHUNK_BYTES, DIGEST_BYTES
from kvfs.transfer.sink import Sink

STALL_S: Final = 5.0
"""Time without a byte after which another source is asked."""
BUFFER_BYTES: Final = 1 << 20
"""Size of a buffer. With 256 KiB a GB takes a sixth more of the CPU: calls, and turns of the
GIL."""
_IDLE_BUFFERS: Final = 4
_PAUSE_MS: Final = 20
_INLINE_BYTES: Final = 4 << 20
"""Bytes for which a thread's wake-up would be a good part of the time; a step takes half a
millisecond."""


class ChunkBuffers:
    """Reused buffers of BUFFER_BYTES: as many as streams receive at once, and a few besides."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    @contextmanager
    def lent(self) -> Iterator[memoryview]:
        buffer = self._free.pop() if self._free else mmap.mmap(-1, BUFFER_BYTES)
        try:
            yield memoryview(buffer)
        finally:
            if len(self._free) < _IDLE_BUFFERS:
                self._free.append(buffer)


Arrived = Callable[[int, int, float], None]
"""Called with a chunk, its bytes and how many seconds it took, in the loop."""


class Taking(ABC):
    """Takes one answer; use it once."""

    def __init__(self, incoming: IncomingChunks, sink: Sink, arrived: Arrived) -> None:
        """`arrived` is called for each chunk that was written and has its checksum."""
        self._sums = incoming.sums
        self._size = incoming.ask.size
        self._sink = sink
        self._arrived = arrived
        self._chunk = self._first = incoming.ask.first
        self._offset = incoming.ask.offset
        self._hash = xxhash.xxh3_128()
        self._began = time.monotonic()
        self.moved_at = self._began
        """The time when bytes last came (time.monotonic)."""
        self.stopped = False
        """Must be set before it is cancelled."""

    @property
    def chunk_began(self) -> float:
        """The time when the present chunk began to come (time.monotonic)."""
        return self._began

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the present chunk that have come."""
        return self._offset - self._chunk * CHUNK_BYTES

    @property
    def _chunk_left(self) -> int:
        """Bytes of the present chunk that are still to come."""
        return min((self._chunk + 1) * CHUNK_BYTES, self._size) - self._offset

    @abstractmethod
    async def run(self, threads: trio.CapacityLimiter) -> None:
        """Takes the whole answer. Raises Corrupt (a chunk does not have its checksum), Unavailable
        (nothing comes), ConnectionLost, OSError (the file). Cancelled: chunks that arrived until
        then stay."""

    def _take(self, part: memoryview) -> None:
        self._hash.update(part)
        self._sink.write(part, self._offset)
        self._offset += len(part)

    def _finish_chunk(self, tell: Arrived) -> None:
        at = (self._chunk - self._first) * DIGEST_BYTES
        if self._hash.digest() != self._sums[at : at + DIGEST_BYTES]:
            raise Corrupt(f"chunk {self._chunk} came with other bytes than its checksum's")
        tell(self._chunk, self.chunk_bytes, self.moved_at - self._began)
        self._hash.reset()
        self._chunk += 1
        self._began = self.moved_at


class Receiving(Taking):
    """Takes bytes that come as the answer's body. `burst` runs in a thread, the rest in the
    loop."""

    def __init__(
        self, incoming: IncomingChunks, sink: Sink, buffer: memoryview, arrived: Arrived
    ) -> None:
        super().__init__(incoming, sink, arrived)
        self._connection = incoming.connection
        self._buffer = buffer
        self._token = trio.lowlevel.current_trio_token()

    async def run(self, threads: trio.CapacityLimiter) -> None:
        """Like `Taking.run`. Cancelled: it ends within a pause, if `stopped` was set."""
        while not await self._take_turn(threads):
            with trio.move_on_after(STALL_S) as scope:
                await self._connection.wait_readable()
            if scope.cancelled_caught:
                raise Unavailable(f"nothing has come for {STALL_S:g} s")

    async def _take_turn(self, threads: trio.CapacityLimiter) -> bool:
        """Takes the bytes that come without a pause; returns whether the body has ended. If little
        is left, not in a thread."""
        if self._connection.remaining > _INLINE_BYTES:
            return await trio.to_thread.run_sync(self._burst, limiter=threads)
        while (ended := self._step(0, self._arrived)) is False:
            await trio.lowlevel.checkpoint()
        return bool(ended)

    def _burst(self) -> bool:
        """Takes bytes in a thread; returns whether the body has ended."""
        while not self.stopped and (ended := self._step(_PAUSE_MS, self._tell_loop)) is not None:
            if ended:
                return True
        return False

    def _tell_loop(self, chunk: int, bytes_: int, seconds: float) -> None:
        self._token.run_sync_soon(self._arrived, chunk, bytes_, seconds)

    def _step(self, patience_ms: int, tell: Arrived) -> bool | None:
        """Takes the available bytes, up to a buffer's length; returns whether they were the body's
        end; None: there are none."""
        left = self._chunk_left
        count = self._connection.receive_soon(self._buffer[:left], patience_ms)
        if count is None:
            return None
        self.moved_at = time.monotonic()
        self._take(self._buffer[:count])
        if count == left:
            self._finish_chunk(tell)
        return not self._connection.remaining
