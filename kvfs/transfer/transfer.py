"""A file's content on its way to this node, and those who wait for it: one object, however many
want it, from the moment when it is asked for until it has its name, or will not have it.

| state | on disk | readers |
|---|---|---|
| asked for | nothing: room is made, or who has it is looked up | wait |
| filled | part of it, beside the data files | have each chunk that is here |
| filled from elsewhere | what was sealed stays; what was not begins anew | the same |
| whole | the data file | have all of it |
| failed | nothing | have what came, in descriptors that they have |

Invariants
- A chunk counts as here once its bytes are in the file and have had their checksum.
- It ends once. Whoever waits gets the bytes, or why they do not come.
- Cancelled waits leave it on its way: others may wait too.
"""

import os
from typing import Final, NamedTuple

import trio

from kvfs.base import detach
from kvfs.base.errors import KvfsError, NotFound
from kvfs.cluster.peer_protocol import CHUNK_BYTES, DIGEST_BYTES, chunks_of
from kvfs.transfer.chunk_plan import ChunkPlan, ChunkSpan
from kvfs.transfer.sink import Sink

SMALL_BYTES: Final = 64 << 20
"""Up to this size a file is brought whole before it is opened: it is read at the kernel's speed
from its first byte on."""


class WantedFile(NamedTuple):
    """A file's content, as its record says."""

    ino: int
    version: int
    size: int
    checksum: bytes
    """The checksum of all chunk checksums; empty: it is not sealed yet."""


class Transfer:
    """The way of one file's content to this node; made by `Transfers`, for its event loop."""

    def __init__(self, wanted: WantedFile) -> None:
        self.wanted = wanted
        self.plan = ChunkPlan(chunks_of(wanted.size))
        self.has_room = False
        """Whether room was made for it, which nobody else may have from then on."""
        self.fd = -1
        """The file into which it comes; belongs to whoever fills it, and is open as long as that
        lasts."""
        self.is_agreed = False
        """Whether the checksums of all chunks of a sealed file are known."""
        self.stamp = b""
        """The stamp that a holder of a file that is not sealed gave for the content that comes."""
        self.changed = trio.Event()
        """Set, and replaced, when chunks came or were given back, or it ended."""
        self.ended = trio.Event()
        """Set when it has its name, or will not have it."""
        self._sums = bytearray(self.plan.chunks * DIGEST_BYTES)
        self._error: Exception | None = None
        self._openers = 0
        self._readable = -1

    # --- for those who want it ---

    @property
    def is_whole(self) -> bool:
        """Whether it is under its name."""
        return self.ended.is_set() and self._error is None

    @property
    def has_failed(self) -> bool:
        """Whether the rest of it will not come."""
        return self._error is not None

    @property
    def share(self) -> float:
        """The share of its chunks that are here; 0 while that is not known."""
        return self.plan.here / self.plan.chunks if self.plan.chunks else 0.0

    def has(self, offset: int, length: int) -> bool:
        """Returns whether these bytes, except those beyond the end of the file, can be read now."""
        return self.is_whole or self.plan.has_all(self._span(offset, length))

    async def begun(self) -> None:
        """Returns when its first bytes are here, and others come one by one, or when it is whole.
        Raises what `span` raises."""
        await self.span(0, 1)

    async def span(self, offset: int, length: int) -> None:
        """Returns when these bytes can be read: they come before others. Bytes beyond the end of
        the file are not waited for.

        Raises NotFound (nobody has them any more), Unavailable (nobody answered in time, or the
        node stops), Corrupt, Conflict (the record is another by now), Busy (they are being written
        where they are), NoSpace, OSError. When it is cancelled, they come all the same."""
        span, plan = self._span(offset, length), None
        while not (self.is_whole or self.plan.has_all(span)):
            self._check()
            if plan is None:
                await detach.aside()
            if plan is not self.plan:
                plan = self.plan
                plan.urge(span)
                continue
            await self.changed.wait()

    async def whole(self) -> None:
        """Returns when it is a data file like others. Raises, and is cancelled, like `span`."""
        if not self.ended.is_set():
            await detach.aside()
            await self.ended.wait()
        self._check()

    async def opened(self) -> int:
        """Waits like `whole`; returns a descriptor of it for reading, which the caller closes. To
        be called before it has ended."""
        assert not self.ended.is_set(), "nobody has it open any more"
        self._openers += 1
        try:
            await self.whole()
        except BaseException:
            self._openers -= 1
            self._close_unused()
            raise
        self._openers -= 1
        if self._openers:
            return os.dup(self._readable)
        fd, self._readable = self._readable, -1
        return fd

    def want(self, offset: int, length: int) -> None:
        """Has these bytes come before the rest: they are likely to be asked for soon."""
        if not self.ended.is_set():
            self.plan.expect(self._span(offset, length))

    def _span(self, offset: int, length: int) -> ChunkSpan:
        first = min(offset // CHUNK_BYTES, self.plan.chunks)
        end = min(chunks_of(offset + length), self.plan.chunks)
        return ChunkSpan(first, max(0, end - first))

    def _check(self) -> None:
        """Raises the reason of its failure, to each who waits an error of his own."""
        error = self._error
        if isinstance(error, KvfsError):
            own = type(error)(str(error))
            if isinstance(error, NotFound) and isinstance(own, NotFound):
                own.at = error.at
            raise own
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror)
        if error is not None:
            raise error

    # --- for whoever fills it ---

    @property
    def sums(self) -> bytes:
        """The xxh3-128 of each chunk, one after the other; for a file that is not sealed, once all
        are here."""
        return bytes(self._sums)

    def sums_of(self, first: int, count: int) -> bytes:
        """Returns the checksums of some chunks."""
        return bytes(self._sums[first * DIGEST_BYTES : (first + count) * DIGEST_BYTES])

    def begin(self, fd: int) -> None:
        """Begins: it comes into this file, which is open for reading and writing and has its
        size."""
        self.fd = fd
        self.sink: Sink = Sink(fd)

    def begin_anew(self, wanted: WantedFile) -> None:
        """Begins again: it comes from elsewhere from now on. What others have of content that is
        not sealed may differ from what came; what is here of a sealed one stays."""
        if wanted != self.wanted or not wanted.checksum:
            self.wanted = wanted
            self.plan = ChunkPlan(chunks_of(wanted.size))
            self.is_agreed, self.stamp = False, b""
            self._sums = bytearray(self.plan.chunks * DIGEST_BYTES)
            self.wake()

    def agree(self, sums: bytes) -> None:
        """Takes these as the checksums of its chunks: the record's is theirs."""
        self._sums[:] = sums
        self.is_agreed = True
        self.wake()

    def put(self, chunk: int, digest: bytes) -> None:
        """Counts the chunk as here."""
        self._sums[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES] = digest
        self.plan.put(chunk)
        self.wake()

    def wake(self) -> None:
        """Makes all who wait look again."""
        self.changed.set()
        self.changed = trio.Event()

    def ready(self) -> None:
        """Gives a descriptor to those who wait to open it: it is about to have its name. Raises
        OSError."""
        if self._openers:
            self._readable = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def end(self, error: Exception | None = None) -> None:
        """Ends it: nothing more comes, and `fd` is closed soon."""
        self.fd = -1
        self._error = error
        self.ended.set()
        self.wake()
        self._close_unused()

    def _close_unused(self) -> None:
        if not self._openers and self._readable >= 0:
            os.close(self._readable)
            self._readable = -1
