"""A file that fills, chunk by chunk, and who waits for it.

Invariants
- A chunk counts as here once its bytes are in the file and have had their checksum; it stays.
- However many wait, the file is fetched once on this node.
- Whoever waits gets the chunk, or an error: when the file is closed, too.
"""

import os
from typing import Final, NamedTuple

import trio

from kvfs.base import detach
from kvfs.base.errors import Unavailable
from kvfs.cluster.peer_protocol import CHUNK_BYTES, DIGEST_BYTES, chunks_of
from kvfs.transfer.chunk_plan import ChunkPlan, ChunkSpan
from kvfs.transfer.sink import Sink


class WantedFile(NamedTuple):
    """A file's content, as its record says."""

    ino: int
    version: int
    size: int
    checksum: bytes
    """The checksum of all chunk checksums; empty: it is not sealed yet."""


class ArrivingFile:
    """Made by `Fetcher.start`; for its event loop."""

    def __init__(
        self, wanted: WantedFile, fd: int, present: bytes = b"", lazily: bool = False
    ) -> None:
        self.wanted: Final = wanted
        self.fd = os.dup(fd)
        """For reading what is here; closed by the end of `close`, or when the last stream has let
        go of it."""
        self.sink: Final = Sink(self.fd)
        kept = present if wanted.checksum else b""
        self.plan: Final = ChunkPlan(chunks_of(wanted.size), kept, lazily)
        self.agreed = trio.Event()
        """Set when the checksums are known, where the file is sealed."""
        self.changed = trio.Event()
        """Set, and replaced, when chunks came or were given back, or it ended."""
        self.failure: Exception | None = None
        self.stamp = b""
        """The stamp that a holder of a file that is not sealed gave for the content that comes."""
        self._is_closed = False
        self._users = 0
        self._sums = bytearray(self.plan.chunks * DIGEST_BYTES)

    @property
    def is_whole(self) -> bool:
        return self.plan.is_whole

    @property
    def has_ended(self) -> bool:
        """Nothing more comes."""
        return self.is_whole or self.failure is not None

    @property
    def sums(self) -> bytes:
        """The xxh3-128 of each chunk, one after the other; of a file that is not sealed, once it is
        whole."""
        return bytes(self._sums)

    @property
    def present(self) -> bytes:
        """A bit for each chunk that is here, the lowest of a byte first."""
        return self.plan.present

    def has(self, chunk: int) -> bool:
        return self.plan.has(chunk)

    def sums_of(self, first: int, count: int) -> bytes:
        """The checksums of some chunks."""
        return bytes(self._sums[first * DIGEST_BYTES : (first + count) * DIGEST_BYTES])

    async def span(self, offset: int, length: int) -> None:
        """Return when these bytes of the file are here: they come before others. What lies beyond
        its end is not waited for.

        Raises NotFound (no holder has it), Conflict (its holders have other content: the record is
        outdated), Busy (it is being written where it is), Corrupt (what came had wrong bytes),
        Unavailable (nobody answered in time, or it was closed), OSError (of the file). Cancelled:
        the chunks come all the same."""
        span = self._span(offset, length)
        if self.plan.has_all(span):
            return
        await detach.aside()
        self.plan.urge(span)
        self.wake()
        while not self.plan.has_all(span):
            if self.failure is not None:
                raise self.failure
            await self.changed.wait()

    async def whole(self) -> None:
        """Return when all of it is here. Raises and is cancelled as `span`."""
        if self.is_whole:
            return
        await detach.aside()
        self.plan.expect(ChunkSpan(0, self.plan.chunks))
        self.wake()
        while not self.is_whole:
            if self.failure is not None:
                raise self.failure
            await self.changed.wait()

    def want(self, offset: int, length: int) -> None:
        """These bytes are likely to be asked for soon: they come before the rest of the file."""
        self.plan.expect(self._span(offset, length))
        self.wake()

    def _span(self, offset: int, length: int) -> ChunkSpan:
        first = min(offset // CHUNK_BYTES, self.plan.chunks)
        end = min(chunks_of(offset + length), self.plan.chunks)
        return ChunkSpan(first, max(0, end - first))

    def close(self) -> None:
        """Closes the file: readers that wait get Unavailable; what streams still have under way
        goes to a descriptor of their own. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self.is_whole:
            self.fail(Unavailable("the file is not fetched any more"))
        self.wake()
        self._close_unused()

    def _close_unused(self) -> None:
        if self._is_closed and not self._users and self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    # --- for whoever fetches ---

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def use(self) -> None:
        """`fd` stays open until `let_go`."""
        self._users += 1

    def let_go(self) -> None:
        self._users -= 1
        self._close_unused()

    def put(self, chunk: int, digest: bytes) -> None:
        """It is here."""
        self._sums[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES] = digest
        self.plan.put(chunk)
        self.wake()

    def agree(self, sums: bytes) -> None:
        """These are the checksums of its chunks: the record's is theirs."""
        self._sums[:] = sums
        self.agreed.set()

    def fail(self, error: Exception) -> None:
        """Nothing more comes."""
        if self.failure is None:
            self.failure = error
        self.wake()

    def wake(self) -> None:
        """Whoever waits looks again."""
        self.changed.set()
        self.changed = trio.Event()
