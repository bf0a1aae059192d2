"""Seals published files: checksums, on disk, described, and known to the index as whole.

| step of a seal | on disk | in the engine | after a kill here |
|---|---|---|---|
| 1 quiet, read, still quiet and unchanged | data in the page cache | unsealed | sealed again |
| 2 checksums to the index | same | unsealed | sealed again |
| 3 the record is sealed | same | sealed, listed as not synced | sealed again |
| 4 description written, data synced | all on disk | same | sealed again |
| 5 the record says so | same | sealed, not listed | - |

If the disk refuses the sync of step 4 the seal is withdrawn, and the file is not sealed again: data
that can be read now may not be there later (`datastore.file_sync`).

Invariants
- The data file was quiet (nobody had it open or mapped for writing) before it was read and after,
  with the same size, mtime and ctime; on an embedded engine nothing runs between the last look and
  step 3, or 5 and its check.
- A file that cannot be sealed now is tried again later, ever more rarely, for as long as the engine
  lists it.

Reading and syncing compete with programs that use the disk: a file of a cache namespace waits until
nothing was published for a moment, though no longer than ten seconds, and the sealer rests nine
times as long as it worked, or until that moment comes. Data written with O_DIRECT are not left in
the page cache by the reading, if the kernel can do that (see `checksum`). A node that stops waits
for one chunk of it at most.

A caller that waits for the ETag of files (`tree.sealed_etags`) asks for their seal: they go before
all others, settled or not, and before the rest.
"""

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Set
from functools import partial
from typing import Final

import trio

from kvfs.base.priority import at_ordinary
from kvfs.base.retry import Persistence
from kvfs.datastore import file_lease, file_sync
from kvfs.datastore.checksum import checksum
from kvfs.datastore.files import DataFiles
from kvfs.datastore.index import Index, Sealed
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.records import Flag, namespace_of
from kvfs.node.tasks.failing_files import FailingFiles
from kvfs.tree import lifecycle, namespaces, sealed_etags
from kvfs.tree.inodes import read_inodes
from kvfs.vfs import seal
from kvfs.vfs.content_versions import Overtaken, check_follows, publish_anew

log = logging.getLogger(__name__)
_PERIOD_S: Final = 0.25
_SCAN_PERIOD_S: Final = 5.0
_SETTLED_S: Final = 1.0
"""Time since the last publish of the file: one that is rewritten at once is not worth a
checksum."""
_CALM_S: Final = 0.5
_PATIENCE_S: Final = 10.0
_BATCH: Final = 32
_LOOKED_AT: Final = 1024
_BATCH_BYTES: Final = 256 << 20
_WAITING_LIMIT: Final = 16_384
_MAX_DELAY_S: Final = 60.0
_MAPPED_DELAY_S: Final = 4.0
"""Delay for a file that is mapped: nobody tells when its last mapping goes, and stores through it
are not published yet."""
_RESTS: Final = 9


class _Wait:
    """A file that is to be sealed."""

    __slots__ = ("delay_s", "due", "since")

    def __init__(self, now: float, delay_s: float = _SETTLED_S) -> None:
        self.since = now
        self.delay_s = delay_s
        self.due = now + delay_s


class _Asked:
    """Files for whose seal callers wait."""

    __slots__ = ("again", "done", "left")

    def __init__(self, inos: Iterable[int]) -> None:
        self.left = dict.fromkeys(inos)
        self.again: list[int] = []
        """Files that were in use, but published just now: their last user may be about to close
        them."""
        self.done = trio.Event()
        """Set when all were tried."""


class Sealer:
    """Seals published files; one for each node. `writing` tells whether this process has a file
    open for writing."""

    def __init__(
        self, engine: Engine, files: DataFiles, index: Index, writing: Callable[[int], bool]
    ) -> None:
        self._engine = engine
        self._files = files
        self._index = index
        self._writing = writing
        self._waiting: dict[int, _Wait] = {}
        self._last_publish = 0.0
        self._next_scan = 0.0
        self._scanned = 0
        self._mapped: set[int] = set()
        """The files of the present batch that were not quiet."""
        self._asked: list[_Asked] = []
        self._called = trio.Event()
        self.open_in: Set[int] = frozenset()
        """Namespaces of the files that it has open now: meanwhile nobody can evict those."""
        self.counters = {"sealed_files": 0, "sealed_bytes": 0, "not_quiet": 0, "seals_failed": 0}
        """Counters since the start; `not_quiet` counts attempts that met a writer, `seals_failed`
        those that the disk refused."""
        self._failing = FailingFiles(log, "sealed")

    def published(self, ino: int, version: int, blocks: int) -> None:
        """Notes that a file was published: it takes its place in the access order, and is sealed
        when it has settled."""
        self._index.add(ino, version, blocks)
        now = trio.current_time()
        self._last_publish = now
        if len(self._waiting) < _WAITING_LIMIT or ino in self._waiting:
            self._waiting[ino] = _Wait(now)

    async def seal_first(self, inos: Iterable[int]) -> None:
        """Returns when each of these was sealed, or tried: it is in use. `run` must be running.
        Cancelled: they are tried all the same."""
        asked = _Asked(inos)
        self._asked.append(asked)
        self._called.set()
        await asked.done.wait()

    async def run(self) -> None:
        """Seals the due files, until cancelled. Cancelled: a file is sealed or it is not."""
        sealing_due = Persistence(log.warning, "sealing failed, it will be tried again")
        while True:
            await self._pause(_PERIOD_S)
            began = trio.current_time()
            await sealing_due.attempt(self._seal_due)
            busy_s = trio.current_time() - began
            await self._rest(busy_s * _RESTS)

    async def _rest(self, longest_s: float) -> None:
        """Leaves the disk to publishers, until they have paused."""
        end = trio.current_time() + longest_s
        while (now := trio.current_time()) < min(end, self._last_publish + _CALM_S):
            if await self._pause(min(end, self._last_publish + _CALM_S) - now):
                return

    async def _pause(self, seconds: float) -> bool:
        """Waits until a caller waits for a seal, at most so long; returns whether one does."""
        with trio.move_on_after(seconds):
            await self._called.wait()
        return self._called.is_set()

    async def _seal_due(self) -> None:
        await self._seal_asked()
        now = trio.current_time()
        await self._scan(now)
        await self._seal(await self._due(now))

    async def _seal_asked(self) -> None:
        """Seals the files that callers wait for."""
        self._called = trio.Event()
        closing: list[_Asked] = []
        while self._asked:
            asked = self._asked[0]
            if asked.left:
                await self._try(asked)
                continue
            self._asked.pop(0)
            if asked.again:
                closing.append(asked)
            else:
                asked.done.set()
        if closing:
            await trio.sleep(_PERIOD_S)
        for asked in closing:
            while again := asked.again[:_BATCH]:
                await self._seal(again)
                del asked.again[: len(again)]
            asked.done.set()

    async def _try(self, asked: _Asked) -> None:
        """Tries as many as fit into one batch."""
        part = list(itertools.islice(asked.left, _BATCH))
        tried, sealed = await self._seal(part)
        for ino in tried:
            del asked.left[ino]
            wait = self._waiting.get(ino)
            if ino not in sealed and wait and trio.current_time() < wait.since + _SETTLED_S:
                asked.again.append(ino)

    async def settle(self) -> None:
        """Seals at once everything that can be sealed; for a stop in order and for tests."""
        after = 0
        while inos := await self._engine.read(
            lambda t, after=after: lifecycle.unsealed(t, after, _BATCH)  # type: ignore[misc]
        ):
            await self._seal(inos)
            after = inos[-1]

    async def sync_durable(self) -> None:
        """Puts data of durable namespaces on disk, even unsealed ones; for a stop in order: a later
        start may find the disk mounted anew, and unsynced data are doubtful then."""
        after = 0
        while inos := await self._engine.read(
            lambda t, after=after: lifecycle.unsealed(t, after, _BATCH)  # type: ignore[misc]
        ):
            after = inos[-1]
            doubtful = await self._engine.read(lambda t, inos=inos: _durable_unsynced(t, inos))  # type: ignore[misc]
            synced = await trio.to_thread.run_sync(
                seal.synced, self._files, doubtful, self._failing.failed
            )
            if synced:
                await self._engine.transact(partial(_settle, synced))

    async def _scan(self, now: float) -> None:
        """Takes up files that the engine lists and nobody told of: from before the start, by other
        processes, or beyond the bound of the memory."""
        if now < self._next_scan or len(self._waiting) >= _WAITING_LIMIT // 2:
            return
        after = self._scanned
        found = await self._engine.read(lambda t: lifecycle.unsealed(t, after, 1024))
        inodes = await self._engine.read(lambda t: read_inodes(t, found))
        for ino, inode in zip(found, inodes, strict=True):
            if ino not in self._waiting and inode is not None and inode.flags & Flag.PUBLISHED:
                self._index.add_missing(ino, inode.version, inode.blocks)
                self._waiting[ino] = _Wait(now)
        self._scanned = found[-1] if found else 0
        if not found:
            self._next_scan = now + _SCAN_PERIOD_S

    async def _due(self, now: float) -> list[int]:
        """Returns the files to be tried now, those that wait longest first."""
        due = [ino for ino, wait in self._waiting.items() if wait.due <= now]
        if now - self._last_publish < _CALM_S:
            kinds = await self._engine.read(lambda t: _cache_namespaces(t, due))
            due = [
                ino
                for ino in due
                if namespace_of(ino) not in kinds or now - self._waiting[ino].since >= _PATIENCE_S
            ]
        return await self._without_removed(due[:_LOOKED_AT])

    async def _without_removed(self, due: list[int]) -> list[int]:
        """Returns a batch of those that have a name: files that are replaced again and again must
        not hold up the others. The engine lists those that get a name later."""
        inodes = await self._engine.read(lambda t: read_inodes(t, due))
        named = [
            ino for ino, inode in zip(due, inodes, strict=True) if inode is not None and inode.nlink
        ]
        for ino in set(due).difference(named):
            del self._waiting[ino]
        return named[:_BATCH]

    async def _seal(self, inos: list[int]) -> tuple[list[int], set[int]]:
        """Seals as many of these as fit into one batch; returns those tried, and those sealed."""
        if not inos:
            return [], set()
        inodes = await self._engine.read(lambda t: read_inodes(t, inos))
        with_md5 = await self._engine.read(lambda t: sealed_etags.wanting_md5(t, inos))
        wanted = [
            (ino, inode.version)
            for ino, inode in zip(inos, inodes, strict=True)
            if inode is not None and seal.sealable(inode) and not self._writing(ino)
        ]
        read: list[seal.SealRead] = []
        sealed: set[int] = set()
        self._mapped.clear()
        self.open_in = {namespace_of(ino) for ino, _ in wanted}
        try:
            count = await trio.to_thread.run_sync(at_ordinary, self._read, wanted, with_md5, read)
            await self._record(read)
            sealed = {each.ino for each in read}
        finally:  # those of a batch that failed give way to others, too
            for each in read:
                os.close(each.fd)
            self.open_in = frozenset()
            self._reschedule(inos, sealed)
            self._failing.look(self._waiting)
            self.counters["seals_failed"] = self._failing.failures
        left = {ino for ino, _ in wanted[count:]}
        return [ino for ino in inos if ino not in left], sealed

    def _read(
        self, wanted: list[tuple[int, int]], with_md5: Set[int], read: list[seal.SealRead]
    ) -> int:
        """Does step 1, in a thread: reads as many files as fit into one batch, and returns their
        number."""
        budget = _BATCH_BYTES
        for count, (ino, version) in enumerate(wanted):
            if budget <= 0:
                return count
            one = self._read_one(ino, version, md5=ino in with_md5)
            if one is not None:
                read.append(one)
                budget -= one.stat.st_size
        return len(wanted)

    def _read_one(self, ino: int, version: int, *, md5: bool) -> seal.SealRead | None:
        try:
            fd = self._files.open_unseen(ino, version)
        except OSError:
            return None
        found = None
        try:
            before = os.fstat(fd)
            if file_sync.is_lost(fd):
                pass  # what it reads like now, it may not read like later
            elif file_lease.is_quiet(fd) is False:
                self._mapped.add(ino)
            else:
                go_on = trio.from_thread.check_cancelled
                found = checksum(fd, before.st_size, md5=md5, step=go_on)
        except OSError as error:
            self._failing.failed(ino, error)
        finally:
            if found is None:
                os.close(fd)
        if found is None:
            return None
        return seal.SealRead(ino, version, fd, before, found, before.st_blocks)

    async def _record(self, read: list[seal.SealRead]) -> None:
        """Does steps 2 to 5; files that were touched meanwhile are removed from `read`."""
        # What was removed while it was read has left the index, and is not to come back.
        there = await self._engine.read(lambda t: [seal.is_there(t, each) for each in read])
        self._keep(read, [each for each, so in zip(read, there, strict=True) if so])
        self._index.store(
            Sealed(each.ino, each.version, each.checksum.chunks, each.blocks) for each in read
        )
        self._keep(read, [each for each in read if self._still(each)])
        sealed = await self._engine.transact(lambda t: [seal.seal(t, each) for each in read])
        await self._publish_changed(
            [each for each, done in zip(read, sealed, strict=True) if not done]
        )
        self._keep(read, [each for each, done in zip(read, sealed, strict=True) if done])
        described = await self._engine.read(lambda t: [seal.describe(t, each) for each in read])
        settled = await trio.to_thread.run_sync(
            seal.settle_on_disk, read, described, self._failing.failed
        )
        on_disk = {each.ino for each in settled}
        lost = [each for each in read if each.ino not in on_disk and file_sync.is_lost(each.fd)]
        await self._engine.transact(lambda t: [seal.confirm(t, each) for each in settled])
        if lost:
            await self._engine.transact(lambda t: seal.take_back(t, lost))
        self._keep(read, [each for each in read if each.ino in on_disk])
        self.counters["sealed_files"] += len(read)
        self.counters["sealed_bytes"] += sum(each.stat.st_size for each in read)

    async def _publish_changed(self, unsealed: list[seal.SealRead]) -> None:
        """Publishes files changed through a mapping: in a cluster that is new content, which is
        sealed later."""
        changed = await self._engine.read(
            lambda t: [each for each in unsealed if t.node and seal.is_changed(t, each)]
        )
        for each in changed:
            record = partial(_publish, each)
            try:
                version = await publish_anew(
                    self._engine, self._files, each.ino, each.version, record
                )
            except Overtaken:
                continue
            self.published(each.ino, version, each.blocks)

    def _keep(self, read: list[seal.SealRead], kept: list[seal.SealRead]) -> None:
        names = {each.ino for each in kept}
        for each in read:
            if each.ino not in names:
                os.close(each.fd)
        read[:] = kept

    def _still(self, each: seal.SealRead) -> bool:
        """Returns whether the file is as it was before it was read, with nobody there to change
        it."""
        try:
            if self._writing(each.ino) or file_lease.is_quiet(each.fd) is False:
                self.counters["not_quiet"] += 1
                return False
            return seal.stamp(os.fstat(each.fd)) == seal.stamp(each.stat)
        except OSError as error:
            self._failing.failed(each.ino, error)
            return False

    def _reschedule(self, tried: list[int], sealed: set[int]) -> None:
        now = trio.current_time()
        for ino in tried:
            wait = self._waiting.get(ino)
            if wait is None or (ino not in sealed and now < wait.due):
                continue
            del self._waiting[ino]
            if ino not in sealed:
                longest_s = _MAPPED_DELAY_S if ino in self._mapped else _MAX_DELAY_S
                again = _Wait(now, min(wait.delay_s * 2, longest_s))
                again.since = wait.since
                self._waiting[ino] = again


def _publish(each: seal.SealRead, t: Transaction, version: int) -> None:
    check_follows(t, each.ino, each.version)
    seal.publish(t, each, version)


def _settle(synced: list[tuple[int, int]], t: Transaction) -> None:
    seal.settle(t, synced)


def _durable_unsynced(t: Transaction, inos: list[int]) -> list[tuple[int, int]]:
    """Returns inode number and version of those whose data are not known to be on disk."""
    caches = _cache_namespaces(t, inos)
    return [
        (ino, inode.version)
        for ino, inode in zip(inos, read_inodes(t, inos), strict=True)
        if inode is not None and inode.nlink and namespace_of(ino) not in caches
    ]


def _cache_namespaces(t: Transaction, inos: list[int]) -> set[int]:
    numbers = {namespace_of(ino) for ino in inos}
    known = {each.id: each.namespace.kind for each in namespaces.list_all(t)}
    return {number for number in numbers if known.get(number) == "cache"}
