"""Seals published files: checksums, on disk, described, and known to the index as whole.

| step of a seal | on disk | in the engine | after a kill here |
|---|---|---|---|
| 1 quiet, read, still unchanged | data in the page cache | unsealed | sealed again |
| 2 description written, data synced | all on disk | unsealed | sealed again |
| 3 checksums to the index | same | unsealed | sealed again |
| 4 still quiet and unchanged; the record is sealed | same | sealed, not listed | - |

If the disk refuses the sync of step 2 the file is not sealed, now or later: data that can be read
now may not be there later (`datastore.file_sync`).

Invariants
- The data file was quiet (nobody had it open or mapped for writing) before it was read and after,
  with the same size, mtime and ctime (but for the description, which changes ctime: a writer that
  came just then has published, or has it open still); on an embedded engine nothing runs between
  the last look and step 4.

Reading and syncing compete with programs that use the disk: a file of a cache namespace waits until
nothing was published for a moment (`seal_queue`), and the sealer rests nine times as long as it
worked, or until that moment comes. Data written with O_DIRECT are not left in the page cache by the
reading, if the kernel can do that (see `checksum`). A node that stops waits for one chunk of it at
most.

A file whose seal only the engine keeps back is not read, described or synced again, while it stays
as it was.

A caller that waits for the ETag of files (`tree.sealed_etags`) asks for their seal: they go before
all others, settled or not, and before the rest.
"""

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Set
from functools import partial
from itertools import chain
from typing import Final

import trio

from kvfs.base.errors import KvfsError
from kvfs.base.priority import at_ordinary
from kvfs.base.retry import Persistence
from kvfs.datastore import file_lease, file_sync
from kvfs.datastore.checksum import checksum
from kvfs.datastore.files import DataFiles
from kvfs.datastore.index import Index, Sealed
from kvfs.meta.engine import Engine, Transaction, apart
from kvfs.meta.records import namespace_of
from kvfs.node.tasks.failing_files import FailingFiles
from kvfs.node.tasks.seal_queue import SealQueue, cache_namespaces
from kvfs.tree import lifecycle, sealed_etags
from kvfs.tree.inodes import read_inodes
from kvfs.vfs import seal
from kvfs.vfs.content_versions import Overtaken, check_follows, publish_anew

log = logging.getLogger(__name__)
_PERIOD_S: Final = 0.25
_BATCH: Final = 128
"""Files that are sealed by one commit, at most: of fewer the commit costs more than their keys."""
_BATCH_BYTES: Final = 256 << 20
_RESTS: Final = 9
_REMEMBERED: Final = 1024
"""Files whose seals wait for the engine alone, at most: more are read again."""


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
        self._queue = SealQueue(engine, index)
        self.published: Final = self._queue.published
        self._has_more = False
        """Whether the last batch was a whole one: others are likely to be due."""
        self._mapped: set[int] = set()
        """The files of the present batch that were not quiet."""
        self._on_disk: dict[int, seal.SealRead] = {}
        """Files that did all but step 4, since the engine did not answer, without a descriptor."""
        self._asked: list[_Asked] = []
        self._called = trio.Event()
        self.open_in: Set[int] = frozenset()
        """Namespaces of the files that it has open now: meanwhile nobody can evict those."""
        self.counters = {"sealed_files": 0, "sealed_bytes": 0, "not_quiet": 0, "seals_failed": 0}
        """Counters since the start; `not_quiet` counts attempts that met a writer, `seals_failed`
        those that the disk refused."""
        self._failing = FailingFiles(log, "sealed")

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
            await self._pause(0 if self._has_more else _PERIOD_S)
            began = trio.current_time()
            await sealing_due.attempt(self._seal_due)
            busy_s = trio.current_time() - began
            await self._rest(busy_s * _RESTS)

    async def _rest(self, longest_s: float) -> None:
        """Leaves the disk to publishers, until they have paused."""
        end = trio.current_time() + longest_s
        while (now := trio.current_time()) < min(end, self._queue.calm_at):
            if await self._pause(min(end, self._queue.calm_at) - now):
                return

    async def _pause(self, seconds: float) -> bool:
        """Waits until a caller waits for a seal, at most so long; returns whether one does."""
        with trio.move_on_after(seconds):
            await self._called.wait()
        return self._called.is_set()

    async def _seal_due(self) -> None:
        await self._seal_asked()
        now = trio.current_time()
        await self._queue.scan(now)
        due = await self._queue.due(now, _BATCH)
        self._has_more = len(due) == _BATCH
        await self._seal(due)

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
            if ino not in sealed and self._queue.is_unsettled(ino):
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
            for part in apart(self._engine, synced, lambda each: each[0]):
                await self._engine.transact(partial(_settle, part))

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
        parts, sealed = [read], set[int]()
        self._mapped.clear()
        self.open_in = {namespace_of(ino) for ino, _ in wanted}
        try:
            count = await trio.to_thread.run_sync(at_ordinary, self._read, wanted, with_md5, read)
            parts = apart(self._engine, read, lambda each: each.ino)
            failure: KvfsError | None = None
            for part in parts:
                try:
                    await self._record(part)
                except KvfsError as error:  # one shard's server may be away, and not another's
                    failure = failure or error
                else:
                    sealed.update(each.ino for each in part)
            if failure is not None:
                raise failure
        finally:  # those of a batch that failed give way to others, too
            for each in chain.from_iterable(parts):
                os.close(each.fd)
            self.open_in = frozenset()
            self._queue.tried(inos, sealed, self._mapped)
            self._failing.look(self._queue)
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
                budget -= 0 if ino in self._on_disk else one.stat.st_size
        return len(wanted)

    def _read_one(self, ino: int, version: int, *, md5: bool) -> seal.SealRead | None:
        try:
            fd = self._files.open_unseen(ino, version)
        except OSError:
            return None
        found = done = None
        try:
            before = os.fstat(fd)
            if file_sync.is_lost(fd):
                pass  # what it reads like now, it may not read like later
            elif file_lease.is_quiet(fd) is False:
                self._mapped.add(ino)
            elif (done := self._done(ino, version, before, md5=md5)) is not None:
                return done._replace(fd=fd)
            else:
                go_on = trio.from_thread.check_cancelled
                found = checksum(fd, before.st_size, md5=md5, step=go_on)
        except OSError as error:
            self._failing.failed(ino, error)
        finally:
            if found is None and done is None:
                os.close(fd)
        if found is None:
            return None
        stamp = seal.stamp(before)
        return seal.SealRead(ino, version, fd, before, found, before.st_blocks, stamp)

    def _done(
        self, ino: int, version: int, now: os.stat_result, *, md5: bool
    ) -> seal.SealRead | None:
        """Returns what an earlier try found, if the file is as it was then."""
        done = self._on_disk.get(ino)
        if done is None or (done.version, done.stamp) != (version, seal.stamp(now)):
            self._on_disk.pop(ino, None)
            return None
        return done if done.checksum.md5 or not md5 else None

    async def _record(self, read: list[seal.SealRead]) -> None:
        """Does steps 2 to 4; files that were touched meanwhile are removed from `read`."""
        self._queue.unpublished = {each.ino for each in read}
        await self._publish_changed(read)
        self._keep(read, await self._settled_on_disk(read))
        # What was removed while it was read has left the index, and is not to come back.
        self._keep(read, await self._engine.read(lambda t: seal.there(t, read)))
        self._index.store(
            Sealed(each.ino, each.version, each.checksum.chunks, each.blocks) for each in read
        )
        self._keep(read, [each for each in read if self._still(each)])
        self._on_disk.update({each.ino: each for each in read})
        while len(self._on_disk) > _REMEMBERED:
            del self._on_disk[next(iter(self._on_disk))]
        sealed = await self._engine.transact(lambda t: seal.seal_all(t, read))
        for each in read:
            self._on_disk.pop(each.ino, None)
        self._keep(read, [each for each, done in zip(read, sealed, strict=True) if done])
        self.counters["sealed_files"] += len(read)
        self.counters["sealed_bytes"] += sum(each.stat.st_size for each in read)

    async def _settled_on_disk(self, read: list[seal.SealRead]) -> list[seal.SealRead]:
        """Does step 2 of those that did not do it at an earlier try; returns all that have."""
        done = [each for each in read if each.ino in self._on_disk]
        left = [each for each in read if each.ino not in self._on_disk]
        if not left:
            return done
        described = await self._engine.read(lambda t: seal.describe_all(t, left))
        return done + await trio.to_thread.run_sync(
            seal.settle_on_disk, left, described, self._failing.failed
        )

    async def _publish_changed(self, read: list[seal.SealRead]) -> None:
        """Publishes files changed through a mapping, and removes them from `read`: in a cluster
        that is new content, which is sealed later."""
        changed = await self._engine.read(lambda t: seal.changed(t, read) if t.node else [])
        for each in filter(self._still, changed):
            record = partial(_publish, each)
            try:
                version = await publish_anew(
                    self._engine, self._files, each.ino, each.version, record, set()
                )
            except Overtaken:
                continue
            self.published(each.ino, version, each.blocks)
        if changed:
            self._keep(read, [each for each in read if each not in changed])

    def _keep(self, read: list[seal.SealRead], kept: list[seal.SealRead]) -> None:
        if len(kept) == len(read):
            read[:] = kept
            return
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
            return (
                each.ino in self._queue.unpublished and seal.stamp(os.fstat(each.fd)) == each.stamp
            )
        except OSError as error:
            self._failing.failed(each.ino, error)
            return False


def _publish(each: seal.SealRead, t: Transaction, version: int) -> None:
    check_follows(t, each.ino, each.version)
    seal.publish(t, each, version)


def _settle(synced: list[tuple[int, int]], t: Transaction) -> None:
    seal.settle(t, synced)


def _durable_unsynced(t: Transaction, inos: list[int]) -> list[tuple[int, int]]:
    """Returns inode number and version of those whose data are not known to be on disk."""
    caches = cache_namespaces(t, inos)
    return [
        (ino, inode.version)
        for ino, inode in zip(inos, read_inodes(t, inos), strict=True)
        if inode is not None and inode.nlink and namespace_of(ino) not in caches
    ]
