"""The cold tier of a node: sealed files are sent to an object store, and fetched from there when
they are read again.

`tree.copies.cold_copies` has the steps and the repair after a kill. This module moves the bytes, in
threads of its own, and collects garbage.

Invariants
- Returned content is verified, chunk by chunk, against the checksum of its record before it counts.
- Nobody waits for a store that is away: after a failure nothing is sent for a while, and a fetch
  ends by the endpoint's patience.
- What was sent of a file that is not sent to its end is dropped a week after it was begun.
- Few files are sent at once (`uploads`), and never faster than the set rate.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, TypeVar

import trio

from kvfs.base.background import Background
from kvfs.base.descriptors import closing
from kvfs.base.errors import AccessDenied, Corrupt, Invalid, KvfsError, NotFound, Unavailable
from kvfs.base.retry import Persistence
from kvfs.datastore.checksum import checksum
from kvfs.datastore.files import DataFiles
from kvfs.meta.engine import Engine, transact_each
from kvfs.meta.records import Flag, Inode
from kvfs.policy.pace import Pace
from kvfs.transfer.cold import object_transfer
from kvfs.transfer.cold.endpoint import NOTHING_TOLD, ColdLocation, Endpoint, Patience
from kvfs.transfer.cold.uploads import ColdUploads
from kvfs.tree.copies import cold_copies
from kvfs.tree.copies.cold_copies import Object

T = TypeVar("T")
log = logging.getLogger(__name__)
_THREADS: Final = 16
_AWAY_S: Final = 5.0
_PERIOD_S: Final = 10.0
_BATCH: Final = 256
_LOOK_S: Final = 3600.0
"""Time between two looks for uploads that nobody goes on with."""
_FORGOTTEN_S: Final = 7 * 86_400.0
"""Age from which an unfinished upload counts as such: the longest that a file may take."""
_PATIENCE: Final = Patience(connect_s=3.0, read_s=10.0, attempts=1)
_AWAY: Final = (Unavailable, AccessDenied, Invalid)
"""Errors after which nothing can be sent: the store does not answer, or refuses us."""


def connect(where: ColdLocation, url: str) -> Endpoint:
    """Returns the endpoint of a cold tier. Raises NotSupported, Invalid."""
    return Endpoint(where.bucket, url or None, _PATIENCE)


class ColdTier:
    """The cold tier of one node. `owner` names the store or cluster, as several may share a
    bucket."""

    def __init__(
        self,
        engine: Engine,
        files: DataFiles,
        where: ColdLocation,
        endpoint: Endpoint,
        owner: str,
        rate: int,
        may_collect: Callable[[], Awaitable[bool]],
    ) -> None:
        """`may_collect` returns whether this node is the one that deletes garbage."""
        self._engine = engine
        self._files = files
        self._endpoint = endpoint
        self._prefix = "/".join(part for part in (where.prefix, owner) if part)
        self._pace = Pace(rate, time.monotonic())
        self._pace_lock = threading.Lock()
        self._threads = trio.CapacityLimiter(_THREADS)
        self._may_collect = may_collect
        self._tasks = Background()
        self._uploads = ColdUploads[Object, Object](self._tasks, self._send, lambda: self.is_away)
        self._away_until = self._looks_at = 0.0
        self._ending = threading.Event()
        self._complaints = Persistence(log.warning, "the cold tier")
        self.counters = {
            "cold_sent_files": 0,
            "cold_sent_bytes": 0,
            "cold_fetched_files": 0,
            "cold_fetched_bytes": 0,
            "cold_deleted_objects": 0,
            "cold_failures": 0,
        }

    @property
    def is_away(self) -> bool:
        """Whether it failed a moment ago, so that nothing is sent now."""
        return trio.current_time() < self._away_until

    @property
    def is_sending(self) -> bool:
        """Whether files are on their way there."""
        return bool(self._uploads)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Sends the requested files and collects garbage, until cancelled: files on their way are
        garbage at the next start."""
        after, first = b"", True
        while after or first:
            left, after = await self._engine.read(lambda t: cold_copies.uploads(t, after, _BATCH))  # noqa: B023
            await transact_each(self._engine, left, _inode_of, cold_copies.abandon)
            first = False

        async def collect() -> None:
            task_status.started()
            collecting = Persistence(log.warning, "the cold tier keeps what nobody needs")
            try:
                await collecting.repeat(self._collect, _PERIOD_S)
            finally:
                self._away_until = math.inf  # a file that is begun now would find no task
                self._ending.set()

        await self._tasks.run(collect)

    async def demote(self, wanted: Sequence[Object], deadline_s: float) -> list[Object]:
        """Sends these files, some at once; returns those that the tier has then. Files that were
        not begun by the deadline, or while the store is away, are not sent; those begun go on."""
        with trio.move_on_after(deadline_s):
            await self._uploads.send({each: each for each in wanted})
        return await self._engine.read(lambda t: cold_copies.there(t, wanted))

    async def fetch(self, ino: int, inode: Inode, fd: int) -> bytes | None:
        """Fills a new file with the content of this record; returns the checksums of its chunks.
        None: the tier does not have it. Raises Unavailable, NotFound (the object has gone),
        Corrupt, OSError."""
        if not inode.flags & Flag.COLD:
            return None
        kept = Object(ino, inode.version, inode.checksum)
        if self.is_away:
            raise Unavailable(f"the cold tier, which has inode {ino:#x}, did not answer lately")
        return await self.receive(str(kept), kept.checksum, inode.size, fd)

    async def receive(self, name: str, wanted: bytes, size: int, fd: int) -> bytes:
        """Fills a new file with an object of this checksum; returns those of its chunks. Raises
        Unavailable, NotFound, Corrupt (it has other content), OSError."""

        def download(target: int) -> bytes:
            object_transfer.download(self._endpoint, self._key(name), size, target, self._go_on)
            found = checksum(target, size)
            if found is None or found.combined != wanted:
                raise Corrupt(f"the cold tier has other content under {self._key(name)}")
            return found.chunks

        try:
            chunks = await self._in_thread(download, fd)
        except _AWAY as error:
            self._failed(error)
            raise Unavailable(f"the cold tier cannot be read: {error}") from error
        except NotFound as error:
            self._complaints.complain(error)
            raise
        self.counters["cold_fetched_files"] += 1
        self.counters["cold_fetched_bytes"] += size
        return chunks

    async def put(self, wanted: Object, name: str, told: Mapping[str, str]) -> bool:
        """Sends a sealed file under a name, with what is told of it; returns whether it is there.
        Nothing of that is recorded."""
        try:
            self._count_sent(await self._send_file(wanted, name, told))
        except (KvfsError, OSError) as error:
            self._failed(error)
            return False
        return True

    async def told(self, name: str) -> dict[str, str] | None:
        """Returns what was told of an object; None: there is none. Raises KvfsError."""
        return await self._ask(lambda: self._endpoint.told(self._key(name)))

    async def delete(self, name: str) -> None:
        """Deletes an object, if it is there. Raises KvfsError."""
        await self._ask(lambda: self._endpoint.delete(self._key(name)))
        self.counters["cold_deleted_objects"] += 1

    async def names(self, prefix: str) -> list[str]:
        """Returns the names of all objects that begin so. Raises KvfsError."""
        start = len(self._key(""))

        def listed() -> list[str]:
            return [each.key[start:] for each in self._endpoint.objects(self._key(prefix))]

        return await self._ask(listed)

    async def _ask(self, step: Callable[[], T]) -> T:
        if self.is_away:
            raise Unavailable("the cold tier did not answer lately")
        try:
            return await self._in_thread(lambda _: step())
        except _AWAY as error:
            self._failed(error)
            raise

    async def _send(self, wanted: Object) -> None:
        try:
            if await self._engine.transact(lambda t: cold_copies.begin(t, wanted)):
                await self._upload(wanted)
        except (KvfsError, OSError) as error:
            self._failed(error)

    async def _upload(self, wanted: Object) -> None:
        try:
            size = await self._send_file(wanted, str(wanted), NOTHING_TOLD)
        except (KvfsError, OSError):
            await self._engine.transact(lambda t: cold_copies.give_up(t, wanted))
            raise
        if await self._engine.transact(lambda t: cold_copies.finish(t, wanted)):
            self._count_sent(size)

    async def _send_file(self, wanted: Object, name: str, told: Mapping[str, str]) -> int:
        """Sends a file; returns its size. Raises KvfsError, OSError."""
        with closing(self._files.open_unseen(wanted.ino, wanted.version)) as fd:
            size = os.fstat(fd).st_size
            await self._in_thread(lambda source: self._put(wanted, size, source, name, told), fd)
        return size

    def _count_sent(self, size: int) -> None:
        self.counters["cold_sent_files"] += 1
        self.counters["cold_sent_bytes"] += size

    def _put(self, wanted: Object, size: int, fd: int, name: str, told: Mapping[str, str]) -> None:
        found = checksum(fd, size)
        if found is None or found.combined != wanted.checksum:
            raise Corrupt(f"{self._files.path(wanted.ino, wanted.version)} is damaged: not sent")
        object_transfer.upload(
            *(self._endpoint, self._key(name), fd, size, self._keep_pace), trusted=True, told=told
        )

    def _go_on(self, _: int) -> None:
        if self._ending.is_set():
            raise Unavailable("the node stops")

    def _keep_pace(self, size: int) -> None:
        with self._pace_lock:
            wait_s = self._pace.spend(size, time.monotonic())
        self._ending.wait(wait_s)
        self._go_on(size)

    async def _collect(self) -> None:
        """Deletes objects that no record names. A store that is away is asked again later."""
        after = b""
        while not self.is_away and await self._may_collect():
            gone, after = await self._engine.read(lambda t: cold_copies.garbage(t, after, _BATCH))  # noqa: B023
            for each in gone:
                try:
                    await self.delete(str(each))
                except _AWAY:
                    return
            if gone:
                await transact_each(self._engine, gone, _inode_of, cold_copies.collected)
            if not after:
                break
        looks = trio.current_time() >= self._looks_at and not self.is_away
        if looks and await self._may_collect():
            self._looks_at = trio.current_time() + _LOOK_S
            await self._in_thread(lambda _: self._abort_forgotten())

    def _abort_forgotten(self) -> None:
        """Ends uploads that a kill, or a change of the file, kept from their end: what is stored of
        them costs, and no list of objects shows it. Raises KvfsError."""
        for each in self._endpoint.unfinished(self._key("")):
            if each.age_s > _FORGOTTEN_S:
                self._endpoint.abort(each.key, each.upload)

    async def _in_thread(self, step: Callable[[int], T], fd: int = -1) -> T:
        """Runs a step in a thread. Cancelled: the thread is left to end by its own deadlines, with
        a descriptor of its own."""
        own = os.dup(fd) if fd >= 0 else -1
        begun = threading.Event()

        def run() -> T:
            begun.set()
            try:
                return step(own)
            finally:
                _close(own)

        try:
            return await trio.to_thread.run_sync(run, abandon_on_cancel=True, limiter=self._threads)
        except trio.Cancelled:
            if not begun.is_set():
                _close(own)
            raise

    def _failed(self, error: KvfsError | OSError) -> None:
        self.counters["cold_failures"] += 1
        if isinstance(error, _AWAY):
            self._away_until = max(self._away_until, trio.current_time() + _AWAY_S)
        self._complaints.complain(error)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"


def _inode_of(each: Object) -> int:
    return each.ino


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
