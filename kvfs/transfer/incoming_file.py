"""A data file on its way to this node: one for each file, however many wait for it.

Invariants
- It begins when where from is known, and ends once: whole and under its name, or failed.
- A span that was waited for is verified, and stays readable in the descriptor, also when the rest
  fails.
"""

from typing import Final, Protocol

import trio

from kvfs.base.errors import KvfsError
from kvfs.datastore.checksum import CHUNK_BYTES

SMALL_BYTES: Final = 64 << 20
"""Up to this size a file is brought whole before it is opened: it is read at the kernel's speed
from its first byte on."""


class FileFiller(Protocol):
    """The source that fills the file, of whatever kind."""

    @property
    def sums(self) -> bytes:
        """The checksums of all chunks, once it is whole."""

    def has(self, chunk: int) -> bool:
        """Whether a chunk is there and verified."""

    async def span(self, offset: int, length: int) -> None:
        """Returns when these bytes are there; they come first."""

    async def whole(self) -> None:
        """Returns when all are."""

    def want(self, offset: int, length: int) -> None:
        """These are asked for soon."""

    def close(self) -> None:
        """End it."""


class IncomingFile:
    """One that comes. Cancelled waits leave it on its way: others may wait too."""

    def __init__(self, ino: int, version: int, size: int) -> None:
        self.ino = ino
        self.version = version
        self.size = size
        self.has_room = False
        """Whether room was made for it, which no one else may have from then on."""
        self._arriving: FileFiller | None = None
        self._begun = trio.Event()
        self._ended = trio.Event()
        self._error: Exception | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it is under its name."""
        return self._ended.is_set() and self._error is None

    @property
    def has_failed(self) -> bool:
        """Whether the rest of it will not come."""
        return self._ended.is_set() and self._error is not None

    def has(self, offset: int, length: int) -> bool:
        """Whether these bytes, those beyond the end of the file aside, can be read now."""
        if self.is_whole:
            return True
        end = min(offset + length, self.size)
        if self._arriving is None:
            return offset >= end
        chunks = range(offset // CHUNK_BYTES, -(-end // CHUNK_BYTES))
        return offset >= end or all(map(self._arriving.has, chunks))

    @property
    def share(self) -> float:
        """The share of its chunks that are here; 0 while that is not known."""
        chunks = -(-self.size // CHUNK_BYTES)
        if self._arriving is None or not chunks:
            return 0.0
        return sum(map(self._arriving.has, range(chunks))) / chunks

    async def begun(self) -> None:
        """Returns when its bytes may come one by one, or it has ended. Raises what made it fail."""
        await self._begun.wait()
        self._raise()

    async def span(self, offset: int, length: int) -> None:
        """Returns when these bytes can be read.

        Raises NotFound (nobody has them any more), Unavailable, Corrupt, Conflict (the record is
        another by now), Busy (they are being written where they are), NoSpace, OSError."""
        while True:
            await self._begun.wait()
            if self.has(offset, length):
                return
            self._raise()
            arriving = self._arriving
            assert arriving is not None
            try:
                await arriving.span(offset, min(length, self.size - offset))
            except (KvfsError, OSError):
                self.gave_up(arriving)  # others may give it, or none: then it ends by that
            else:
                return

    def want(self, offset: int, length: int) -> None:
        """These are asked for soon."""
        if self._arriving is not None and not self._ended.is_set() and offset < self.size:
            self._arriving.want(offset, min(length, self.size - offset))

    async def whole(self) -> None:
        """Returns when it is a data file like others. Raises as `span`."""
        await self._ended.wait()
        self._raise()

    def begin(self, arriving: FileFiller) -> None:
        """Its bytes come from there, now or in place of who had to give up."""
        self._arriving = arriving
        self._begun.set()

    def gave_up(self, arriving: FileFiller) -> None:
        """Nothing more comes from there: it comes from elsewhere, or it ends."""
        is_current = self._arriving is arriving and not self._ended.is_set()
        if is_current and self._begun.is_set():  # else some wait for it already
            self._begun = trio.Event()

    def end(self, error: Exception | None = None) -> None:
        """It has its name, or will not have it."""
        self._error = error
        self._begun.set()
        self._ended.set()

    def _raise(self) -> None:
        if isinstance(self._error, KvfsError):
            raise type(self._error)(str(self._error))
        if isinstance(self._error, OSError):
            raise OSError(self._error.errno, self._error.strerror)
        if self._error is not None:
            raise self._error
