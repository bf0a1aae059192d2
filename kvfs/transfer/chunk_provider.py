"""The data that this node has for others: whole data files, and those that are arriving.

Invariants
- A file that is arriving offers only chunks that are here.
- The index knows the checksums of sealed content; if it does not (just sealed, or the index is
  new), and for other content, they are computed from the bytes on request.
- A data file that is open is not evicted while it is sent.
- A data file that is written in place is given to nobody: its recorded content is gone, and its
  next content is not published yet.
"""

import os
from collections.abc import Callable
from typing import Final

import trio

from kvfs.base.errors import Busy, Conflict, NotFound, Unavailable
from kvfs.cluster.peer_protocol import DIGEST_BYTES, Ask, Later, chunks_of
from kvfs.cluster.peer_server import Offer
from kvfs.datastore import checksum
from kvfs.datastore.files import DataFiles
from kvfs.datastore.index import Index
from kvfs.transfer.peer_fetches import PeerFetches

_WAIT_S: Final = 0.3
"""Time to wait for a chunk that is on its way: the asking node hears of us before it gives us
up."""
_SUMS_S: Final = 3.0
_LEASED_S: Final = 0.02
_LEASED_TRIES: Final = 10
_HASHING_THREADS: Final = 4
_INLINE_CHUNKS: Final = 1
"""Chunks in memory whose checksums take less time than a thread's wake-up."""
_COMPUTED_MOST: Final = 64
"""Files whose computed checksums are kept, as the index does not know them."""


class ChunkProvider:
    """The provider for one event loop; see `peer_server.Shelf`."""

    def __init__(
        self,
        files: DataFiles,
        index: Index,
        fetches: PeerFetches,
        is_changed: Callable[[int], bool] = lambda _ino: False,
    ) -> None:
        """`is_changed`: whether the file is open here, with other content than was published."""
        self._files = files
        self._index = index
        self._fetches = fetches
        self._is_changed = is_changed
        self._computed: dict[tuple[int, int, bytes], bytes] = {}
        self._threads = trio.CapacityLimiter(_HASHING_THREADS)

    def has(self, ino: int, version: int) -> bool:
        if self._fetches.arriving(ino, version) is not None:
            return True
        return self._files.has(ino, version)

    async def offer(self, ask: Ask, peer: int) -> Offer:
        fd = await self._open(ask.ino, ask.version)
        if fd is None:
            return await self._offer_arriving(ask, peer)
        try:
            # Looked at in the step that found the name: once the change is published, this
            # descriptor has the new content, and the name of the old one goes.
            if self._is_changed(ask.ino):
                raise Busy("the file is being written where its data are")
            stat = os.fstat(fd)
            if stat.st_size != ask.size and (ask.sealed or stat.st_size < ask.size):
                raise Conflict(f"the file has {stat.st_size} bytes here, not {ask.size}")
            if ask.sealed:
                sums = await self._sealed_sums(fd, ask.ino, ask.version, ask.size)
                return Offer(fd, ask.chunks, _told(ask, sums, ask.chunks))
            return await self._offer_unsealed(fd, ask)
        except BaseException:
            os.close(fd)
            raise

    async def sums(self, ino: int, version: int, size: int) -> bytes:
        fd = await self._open(ino, version)
        if fd is None:
            return await self._agreed_sums(ino, version, size)
        try:
            return await self._sealed_sums(fd, ino, version, size)
        finally:
            os.close(fd)

    async def _open(self, ino: int, version: int) -> int | None:
        """Returns a descriptor; None if there is no whole data file. Raises Unavailable."""
        for _ in range(_LEASED_TRIES):
            try:
                return self._files.open_unseen(ino, version)
            except FileNotFoundError:
                return None
            except BlockingIOError:  # looked at by the sealer or the evictor: for a moment
                await trio.sleep(_LEASED_S)
        raise Unavailable("the data file is being looked at")

    async def _sealed_sums(self, fd: int, ino: int, version: int, size: int) -> bytes:
        entry = self._index.get(ino)
        wanted = chunks_of(size) * DIGEST_BYTES
        if entry is not None and entry.version == version and len(entry.chunks) == wanted:
            return entry.chunks
        name = ino, version, _stamp(fd)
        sums = self._computed.get(name)
        if sums is None:
            sums = await self._compute(fd, size, 0, chunks_of(size))
            self._computed[name] = sums
            if len(self._computed) > _COMPUTED_MOST:
                del self._computed[next(iter(self._computed))]
        return sums

    async def _agreed_sums(self, ino: int, version: int, size: int) -> bytes:
        arriving = self._fetches.arriving(ino, version)
        if arriving is None:
            raise NotFound("this node does not have the file")
        if arriving.wanted.size != size:
            raise Conflict("this node fetches other content of the file")
        with trio.move_on_after(_SUMS_S):
            while not arriving.is_agreed and not arriving.ended.is_set():
                await arriving.changed.wait()
        if not arriving.is_agreed:
            raise Unavailable("the checksums have not come here yet")
        return arriving.sums

    async def _compute(self, fd: int, size: int, first: int, chunks: int) -> bytes:
        sums = None
        if chunks <= _INLINE_CHUNKS:
            sums = checksum.cached_sums(fd, size, first, chunks)
        if sums is None:
            sums = await trio.to_thread.run_sync(
                checksum.chunk_sums, fd, size, first, chunks, limiter=self._threads
            )
        if sums is None:
            raise Conflict(f"the file has less than {size} bytes here")
        return sums

    async def _offer_unsealed(self, fd: int, ask: Ask) -> Offer:
        stamp = _stamp(fd)
        sums = await self._compute(fd, ask.size, ask.first, ask.chunks)
        if _stamp(fd) != stamp:
            raise Conflict("the file is being written")
        return Offer(fd, ask.chunks, sums, stamp)

    async def _offer_arriving(self, ask: Ask, peer: int) -> Offer:
        arriving = self._fetches.arriving(ask.ino, ask.version)
        if arriving is None:
            raise NotFound("this node does not have the file")
        if arriving.wanted.size != ask.size or bool(arriving.wanted.checksum) != ask.sealed:
            raise Conflict("this node fetches other content of the file")
        if not arriving.plan.has(ask.first):
            arriving.want(ask.offset, ask.length(ask.chunks))
        with trio.move_on_after(_WAIT_S):
            while not arriving.plan.has(ask.first) and not arriving.ended.is_set():
                if self._fetches.is_asked_of(arriving, ask.first, peer):
                    break  # each would wait for the other
                await arriving.changed.wait()
        if arriving.is_whole:
            return await self.offer(ask, peer)
        count = arriving.plan.run(ask.first, ask.chunks)
        if arriving.has_failed:
            raise Unavailable("this node cannot get the file either")
        if not count:
            raise Later
        sums = _told(ask, arriving.sums, count)
        return Offer(os.dup(arriving.fd), count, sums, arriving.stamp)


def _stamp(fd: int) -> bytes:
    stat = os.fstat(fd)
    return b"%d-%d" % (stat.st_mtime_ns, stat.st_size)


def _told(ask: Ask, sums: bytes, count: int) -> bytes:
    """Returns the part of the file's checksums that an answer with the first `count` chunks
    carries."""
    if ask.tells_all:
        return sums
    return sums[ask.first * DIGEST_BYTES : (ask.first + count) * DIGEST_BYTES]
