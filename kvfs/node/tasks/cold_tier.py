"""The cold tier of a node: sealed files are sent to an object store, and fetched from there when
they are read again.

`tree.copies.cold_copies` has the steps and the repair after a kill. This module moves the bytes, in
threads of its own, and collects garbage.

Invariants
- Returned content is verified, chunk by chunk, against the checksum of its record before it counts.
- Nobody waits for a store that is away: after a failure nothing is sent for a while, and a fetch
  ends by the endpoint's patience.
- At most UPLOADS files are sent at once, and never faster than the set rate.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

import trio

from kvfs.base.errors import AccessDenied, Corrupt, Invalid, KvfsError, NotFound, Unavailable
from kvfs.base.retry import Persistence
from kvfs.datastore.checksum import checksum
from kvfs.datastore.files import DataFiles
from kvfs.meta.engine import Engine
from kvfs.meta.records import Flag, Inode
from kvfs.policy.pace import Pace
from kvfs.transfer.cold import object_transfer
from kvfs.transfer.cold.endpoint import ColdLocation, Endpoint, Patience
from kvfs.tree.copies import cold_copies
from kvfs.tree.copies.cold_copies import Object

T = TypeVar("T")
log = logging.getLogger(__name__)
UPLOADS: Final = 4
_THREADS: Final = 16
_AWAY_S: Final = 5.0
_PERIOD_S: Final = 10.0
_BATCH: Final = 256
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
        self._nursery: trio.Nursery | None = None
        self._sending: set[Object] = set()
        self._sent = trio.Event()
        """Set, and replaced, when one of these has ended."""
        self._away_until = 0.0
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
        return bool(self._sending)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Sends the requested files and collects garbage, until cancelled: files on their way are
        garbage at the next start."""
        after, first = b"", True
        while after or first:
            after = await self._engine.transact(lambda t: cold_copies.abandon(t, after, _BATCH))  # noqa: B023
            first = False
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            collecting = Persistence(log.warning, "the cold tier keeps what nobody needs")
            try:
                while True:
                    await collecting.attempt(self._collect)
                    await trio.sleep(_PERIOD_S)
            finally:
                self._away_until = math.inf  # a file that is begun now would find no task
                self._ending.set()

    async def demote(self, wanted: Sequence[Object], deadline_s: float) -> list[Object]:
        """Sends these files, some at once; returns those that the tier has then. Files that were
        not begun by the deadline, or while the store is away, are not sent; those begun go on."""
        with trio.move_on_after(deadline_s):
            for each in wanted:
                while each not in self._sending and len(self._sending) >= UPLOADS:
                    await self._sent.wait()
                if self.is_away:
                    break
                self._begin(each)
            while any(each in self._sending for each in wanted):
                await self._sent.wait()
        return await self._engine.read(lambda t: cold_copies.there(t, wanted))

    def _begin(self, wanted: Object) -> None:
        assert self._nursery is not None
        if wanted not in self._sending:
            self._sending.add(wanted)
            self._nursery.start_soon(self._send, wanted)

    async def fetch(self, ino: int, inode: Inode, fd: int) -> bytes | None:
        """Fills a new file with the content of this record; returns the checksums of its chunks.
        None: the tier does not have it. Raises Unavailable, NotFound (the object has gone),
        Corrupt, OSError."""
        if not inode.flags & Flag.COLD:
            return None
        kept = Object(ino, inode.version, inode.checksum)
        if self.is_away:
            raise Unavailable(f"the cold tier, which has inode {ino:#x}, did not answer lately")
        try:
            chunks = await self._in_thread(lambda target: self._fetch(kept, inode.size, target), fd)
        except _AWAY as error:
            self._failed(error)
            raise Unavailable(f"the cold tier cannot be read: {error}") from error
        except NotFound as error:
            self._complaints.complain(error)
            raise
        self.counters["cold_fetched_files"] += 1
        self.counters["cold_fetched_bytes"] += inode.size
        return chunks

    def _fetch(self, kept: Object, size: int, fd: int) -> bytes:
        object_transfer.download(self._endpoint, self._key(kept), size, fd, self._go_on)
        found = checksum(fd, size)
        if found is None or found.combined != kept.checksum:
            raise Corrupt(f"the cold tier has other content under {self._key(kept)}")
        return found.chunks

    async def _send(self, wanted: Object) -> None:
        try:
            if await self._engine.transact(lambda t: cold_copies.begin(t, wanted)):
                await self._upload(wanted)
        except (KvfsError, OSError) as error:
            self._failed(error)
        finally:
            self._sending.discard(wanted)
            self._sent.set()
            self._sent = trio.Event()

    async def _upload(self, wanted: Object) -> None:
        try:
            fd = self._files.open_unseen(wanted.ino, wanted.version)
            try:
                size = os.fstat(fd).st_size
                await self._in_thread(lambda source: self._put(wanted, size, source), fd)
            finally:
                os.close(fd)
        except (KvfsError, OSError):
            await self._engine.transact(lambda t: cold_copies.give_up(t, wanted))
            raise
        if await self._engine.transact(lambda t: cold_copies.finish(t, wanted)):
            self.counters["cold_sent_files"] += 1
            self.counters["cold_sent_bytes"] += size

    def _put(self, wanted: Object, size: int, fd: int) -> None:
        found = checksum(fd, size)
        if found is None or found.combined != wanted.checksum:
            raise Corrupt(f"{self._files.path(wanted.ino, wanted.version)} is damaged: not sent")
        object_transfer.upload(
            self._endpoint, self._key(wanted), fd, size, self._keep_pace, trusted=True
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
                    await self._delete(each)
                except _AWAY as error:
                    self._failed(error)
                    return
            if gone:
                await self._engine.transact(lambda t: cold_copies.collected(t, gone))  # noqa: B023
                self.counters["cold_deleted_objects"] += len(gone)
            if not after:
                return

    async def _delete(self, gone: Object) -> None:
        await self._in_thread(lambda _: self._endpoint.delete(self._key(gone)))

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

    def _key(self, each: Object) -> str:
        return f"{self._prefix}/{each}"


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
