"""Reads the files on the disk, slowly, and compares them with the checksums they were sealed with.

| a damaged file | treatment |
|---|---|
| of a cache namespace | it is evicted: a miss |
| of a durable one | the data file goes into quarantine; opens of the file get EIO (Corrupt) |

Invariants
- A file counts as damaged when it differs twice, its record is sealed with the same checksum before
  and after, and nobody has it open for writing: then nobody with the right to change it could have.
- The record says what a file is. If the index has other checksums, either this copy is damaged, or
  the index is, and is corrected.
- Reading keeps to a rate, small files included: each counts as 64 KiB at least.
- A pass over all files begins once a day; one that a restart cut short goes on where it was.

A whole file describes itself anew if its name or attributes have changed since (`kvfs rebuild` uses
the description). Changes by another program, or the disk, after a file was read here are found in
the next pass.
"""

import errno
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
import trio

from kvfs.base.descriptors import closing
from kvfs.base.priority import at_ordinary
from kvfs.base.retry import Persistence
from kvfs.datastore import file_lease
from kvfs.datastore.checksum import CHUNK_BYTES, DIGEST_BYTES, chunk_sums, combine, wrong_chunks
from kvfs.datastore.files import DataFiles, Description, describe, description, fitting
from kvfs.datastore.index import Index, IndexEntry, Sealed
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.records import Flag, Inode
from kvfs.policy.pace import Pace
from kvfs.tree.inodes import read_inodes
from kvfs.vfs import seal

log = logging.getLogger(__name__)
PASS_S: Final = 86_400.0
_FIRST_S: Final = 60.0
"""Delay after the start: until then the node has better things to do."""
_BATCH: Final = 64
_SPAN: Final = 4
"""Chunks read in one step."""
_LEAST_BYTES: Final = 64 << 10

Damaged = Callable[[int, Inode], Awaitable[None]]
"""Told of an inode whose data file differs from its record."""


class Scrubber:
    """The scrubber of one node. `bytes_per_s`: the rate of its reads; 0: it reads nothing by
    itself."""

    def __init__(
        self, engine: Engine, files: DataFiles, index: Index, damaged: Damaged, bytes_per_s: int
    ) -> None:
        self._engine = engine
        self._files = files
        self._index = index
        self._damaged = damaged
        self._rate = bytes_per_s
        self._pace = Pace(bytes_per_s, 0.0)
        self._asked = trio.Event()
        self._running = False
        self.counters = {"scrubbed_files": 0, "scrubbed_bytes": 0, "scrub_damaged": 0}

    async def run(self) -> None:
        """Makes a pass each day, and when one is asked for, until cancelled."""
        scrubbing = Persistence(log.warning, "scrubbing failed, it goes on later")
        wait_s = _FIRST_S if self._rate else float("inf")
        while True:
            with trio.move_on_after(wait_s):
                await self._asked.wait()
            self._asked = trio.Event()
            began = trio.current_time()
            await scrubbing.attempt(self.scrub)
            passed_s = trio.current_time() - began
            wait_s = max(PASS_S - passed_s, _FIRST_S) if self._rate else float("inf")

    def ask(self) -> None:
        """Makes a pass begin now, if none is under way; it keeps to the rate."""
        self._asked.set()

    async def scrub(self) -> None:
        """Examines every sealed file from where the last pass ended. Raises KvfsError, OSError."""
        self._running = True
        self._pace = Pace(self._rate, trio.current_time())
        try:
            while page := self._index.entries(self._index.scrubbing_from(), _BATCH):
                await self._look_at(page)
                self._index.scrub_from(page[-1][0] + 1)
            self._index.scrub_from(0)
        finally:
            self._running = False

    def report(self) -> dict[str, Any]:
        """Returns the part of the node's status."""
        return {"running": self._running}

    async def _look_at(self, page: list[tuple[int, IndexEntry]]) -> None:
        inodes = await self._engine.read(lambda t: read_inodes(t, [ino for ino, _ in page]))
        for (ino, entry), inode in zip(page, inodes, strict=True):
            if inode is not None and _is_sealed(inode, entry):
                await self._look_at_one(ino, inode, entry)
            await trio.lowlevel.checkpoint()

    async def _look_at_one(self, ino: int, inode: Inode, entry: IndexEntry) -> None:
        try:
            fd = self._files.open_unseen(ino, inode.version)
        except FileNotFoundError:
            return
        with closing(fd):
            differs = not await self._is_whole(ino, fd, inode, entry)
            is_damaged = differs and await self._still(ino, fd, inode)
            if not differs:
                await self._describe_anew(ino, fd, inode)
        self.counters["scrubbed_files"] += 1
        self.counters["scrubbed_bytes"] += inode.size
        if is_damaged:
            self.counters["scrub_damaged"] += 1
            await self._damaged(ino, inode)

    async def _describe_anew(self, ino: int, fd: int, inode: Inode) -> None:
        """Describes the file anew, if it was renamed, or its attributes were changed, since it
        described itself."""

        def fn(t: Transaction) -> Description | None:
            return seal.described(t, ino, inode.version, inode.size, inode.checksum)

        now = await self._engine.read(fn)
        said = description(fd)
        if now is None or said is None or not await self._still(ino, fd, inode):
            return
        if fitting(msgspec.structs.replace(now, described_ns=said.described_ns)) != said:
            describe(fd, now)

    async def _is_whole(self, ino: int, fd: int, inode: Inode, entry: IndexEntry) -> bool:
        if os.fstat(fd).st_size != inode.size:
            return False
        if combine(entry.chunks) != inode.checksum:
            return await self._is_recorded(ino, fd, inode, entry)
        for first in range(0, max(len(entry.chunks) // DIGEST_BYTES, 1), _SPAN):
            await trio.sleep(self._pace.spend(_cost(inode.size, first), trio.current_time()))
            wrong = await trio.to_thread.run_sync(
                at_ordinary, wrong_chunks, fd, inode.size, entry.chunks, first, _SPAN
            )
            if wrong:
                return False
        return True

    async def _is_recorded(self, ino: int, fd: int, inode: Inode, entry: IndexEntry) -> bool:
        """Returns whether it matches its record, although the index has other checksums. Those are
        corrected if it does."""
        sums = b""
        for first in range(0, -(-inode.size // CHUNK_BYTES), _SPAN):
            await trio.sleep(self._pace.spend(_cost(inode.size, first), trio.current_time()))
            try:
                some = await trio.to_thread.run_sync(
                    at_ordinary, chunk_sums, fd, inode.size, first, _SPAN
                )
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                some = None
            if some is None:
                return False
            sums += some
        if combine(sums) != inode.checksum:
            return False
        if await self._still(ino, fd, inode):  # what was removed meanwhile has left the index
            self._index.store([Sealed(ino, entry.version, sums, entry.blocks)])
        return True

    async def _still(self, ino: int, fd: int, before: Inode) -> bool:
        """Returns whether nobody with the right to change the file has done so since its record was
        read."""
        if file_lease.is_quiet(fd) is False:
            return False
        inode = (await self._engine.read(lambda t: read_inodes(t, [ino])))[0]
        return (
            inode is not None
            and bool(inode.flags & Flag.SEALED and inode.nlink)
            and (inode.version, inode.checksum) == (before.version, before.checksum)
        )


def _is_sealed(inode: Inode, entry: IndexEntry) -> bool:
    """Returns whether the file here should match its record's seal."""
    return bool(inode.flags & Flag.SEALED and inode.nlink) and inode.version == entry.version


def _cost(size: int, first: int) -> int:
    """Returns the cost of a step in bytes."""
    return max(min(size - first * CHUNK_BYTES, _SPAN * CHUNK_BYTES), _LEAST_BYTES)
