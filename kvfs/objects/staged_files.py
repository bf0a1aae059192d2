"""Data files in the making: what will be an object's body, or a part's.

A small body needs no transaction before its own: its inode number was reserved with many others
(`r` keys), and its data file has that name from the start. A large one has a record without a name,
which reserves its space, as `kvfs.vfs.stage` makes them.

| step | on disk | in the engine | left by a kill after it, and who mends it |
|---|---|---|---|
| 1 number taken; or record without a name | nothing | `r`; or orphan | as below |
| 2 data file made, written; durable: synced | the data | the same | node, when old and unused |
| 3 under its key (one transaction) | the data | published | nothing: the object is there |

Invariants
- A number is used once. A node that starts makes an orphan of each reserved number, so that step 3
  of who still lives fails with `stage_records.Dropped`; then the data are copied to a new number.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

from kvfs.base.errors import KvfsError, NoSpace
from kvfs.datastore import file_sync
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Inode
from kvfs.objects.lookup import Bucket
from kvfs.objects.mutations import FILE_MODE
from kvfs.session import byte_transfer
from kvfs.session.session import Session
from kvfs.tree import namespaces, reserved_inodes, tree
from kvfs.tree.inodes import BLOCK
from kvfs.vfs import stage_records
from kvfs.vfs.space_reservation import ReservationRefused, SpaceReservation
from kvfs.vfs.stage_records import WrittenData

T = TypeVar("T")
SMALL_BYTES: Final = 1 << 20
_NUMBERS: Final = 256
"""Reserved at a time."""
_CREDIT_BYTES: Final = 4 << 20
"""Found free at a time, for small bodies: this much more than a limit may be used by each process
within a second."""
_CREDIT_S: Final = 1.0
_GROWTH_BYTES: Final = 64 << 20


class StagedBody:
    """One body in the making. `fd` is its data file, open for reading and writing."""

    __slots__ = ("bucket", "fd", "ino", "reserved", "small")

    def __init__(self, bucket: Bucket, ino: int, reserved: int, *, small: bool) -> None:
        self.bucket = bucket
        self.ino = ino
        self.reserved = reserved
        """Bytes."""
        self.small = small
        """Its number is reserved, it has no record."""
        self.fd = -1


class Bodies:
    """Makes and discards bodies; any thread."""

    def __init__(self, session: Session, room: SpaceReservation) -> None:
        self._session = session
        self._room = room
        self._lock = threading.Lock()
        self._numbers: dict[int, deque[int]] = {}
        self._credit: dict[int, tuple[int, float]] = {}
        self._pid = os.getpid()

    def begin(self, bucket: Bucket, size_hint: int) -> StagedBody:
        """A new body of about so many bytes. Raises NoSpace, ReadOnly, Unavailable, OSError."""
        if size_hint <= SMALL_BYTES:
            self._spend(bucket.id, BLOCK * stage_records.blocks_of(size_hint))
            return self._small(bucket)
        return self._made(
            StagedBody(bucket, self._reserve(bucket, size_hint), size_hint, small=False)
        )

    def begin_now(self, bucket: Bucket, size_hint: int) -> StagedBody | None:
        """As `begin`, for an event loop; None where the body is not small, or the node must be
        asked for space first."""
        if size_hint > SMALL_BYTES or not self._spend_found(
            bucket.id, BLOCK * stage_records.blocks_of(size_hint)
        ):
            return None
        return self._small(bucket)

    def _small(self, bucket: Bucket) -> StagedBody:
        return self._made(StagedBody(bucket, self._number(bucket.id), SMALL_BYTES, small=True))

    def _made(self, body: StagedBody) -> StagedBody:
        """The body with its data file, which it makes."""
        try:
            body.fd = self._session.files.create(body.ino, 0)
        except BaseException:
            self.discard(body)
            raise
        return body

    def grow(self, body: StagedBody, size: int) -> None:
        """Call before the body is longer than `reserved`. Raises NoSpace, Unavailable."""
        if size <= body.reserved:
            return
        new = max(size, body.reserved + _GROWTH_BYTES)
        if body.small:
            self._spend(body.bucket.id, new)
        else:
            ino, old = body.ino, body.reserved
            self._with_room(
                lambda t, attempt: stage_records.grow(t, self._room, ino, old, new, attempt),
                self._session.write,
            )
        body.reserved = new

    def sync(self, body: StagedBody) -> None:
        """Makes the data of a durable bucket's body survive power loss. Raises OSError."""
        if body.bucket.durable:
            file_sync.sync(body.fd, datasync=True)

    def written(self, body: StagedBody) -> WrittenData:
        """The data file as it is now."""
        found = os.fstat(body.fd)
        return WrittenData(
            ino=body.ino,
            size=found.st_size,
            blocks=found.st_blocks,
            mtime_ns=found.st_mtime_ns,
            ctime_ns=found.st_ctime_ns,
            synced=body.bucket.durable,
        )

    def rescue(self, body: StagedBody) -> None:
        """Give a body that a starting node dropped another number, and its data with it."""
        lost, old_fd = body.ino, body.fd
        with self._lock:
            self._numbers.pop(body.bucket.id, None)  # the node dropped all that were reserved
        new = self.begin(body.bucket, body.reserved)
        try:
            os.lseek(new.fd, 0, os.SEEK_SET)
            byte_transfer.copy(old_fd, new.fd, lambda _: None)
            self.sync(new)
        except BaseException:
            self.discard(new)
            raise
        os.close(old_fd)
        self._session.files.unlink(lost, 0)
        body.ino, body.fd, body.small = new.ino, new.fd, new.small

    def close(self, body: StagedBody) -> None:
        """The body was published, or is discarded; idempotent."""
        if body.fd >= 0:
            os.close(body.fd)
            body.fd = -1

    def discard(self, body: StagedBody, *, in_doubt: bool = False) -> None:
        """Undo `begin`; of a published body it only closes the descriptor. What cannot be undone
        now is left to the node. `in_doubt`: a commit of it was tried whose answer did not come."""
        if body.fd < 0 and body.ino == 0:
            return
        self.close(body)
        ino, body.ino = body.ino, 0
        if not ino:
            return
        try:
            if body.small and not in_doubt:
                self._discard_small(body.bucket.id, ino)
            elif self._session.write(lambda t: _take_back(t, ino)):
                self._session.files.unlink(ino, 0)
        except (KvfsError, OSError):
            pass

    def _discard_small(self, namespace_id: int, ino: int) -> None:
        def is_published(t: Transaction) -> bool:
            return t.get(keys.inode(ino)) is not None and t.get(keys.orphan(ino)) is None

        if self._session.read(is_published):
            return
        self._session.files.unlink(ino, 0)
        if self._session.read(lambda t: t.get(keys.reserved(ino)) is not None):
            with self._lock:
                self._numbers.setdefault(namespace_id, deque()).append(ino)

    def with_room(self, bucket: Bucket, size: int, fn: Callable[[Transaction], T]) -> T:
        """Run a transaction that counts `size` bytes more, where there is space for them. Raises
        NoSpace, Unavailable, what `fn` raises."""

        def step(t: Transaction, attempt: int) -> T | ReservationRefused:
            return self._room.refuse(t, {bucket.id: size}, attempt) or fn(t)

        return self._with_room(step, self._session.write)

    def give_back(self) -> None:
        """Release the numbers that were not used; what fails is left to the node's next start."""
        with self._lock:
            mine = self._pid == os.getpid()
            unused = [ino for each in self._numbers.values() for ino in each if mine]
            self._numbers.clear()
        if not unused:
            return
        try:
            self._session.write(lambda t: reserved_inodes.release(t, unused))
        except KvfsError:
            pass

    def _number(self, namespace_id: int) -> int:
        with self._lock:
            if self._pid != os.getpid():  # after a fork they are the parent's
                self._numbers, self._pid = {}, os.getpid()
            numbers = self._numbers.setdefault(namespace_id, deque())
            if not numbers:
                first = self._session.write(
                    lambda t: reserved_inodes.reserve(t, namespace_id, _NUMBERS)
                )
                numbers.extend(range(first, first + _NUMBERS))
            return numbers.popleft()

    def _spend(self, namespace_id: int, size: int) -> None:
        """Take from what was found free of late, or look for more."""
        if self._spend_found(namespace_id, size):
            return
        try:
            self._admit(namespace_id, size + _CREDIT_BYTES)
        except NoSpace:
            self._admit(namespace_id, size)
            return
        with self._lock:
            self._credit[namespace_id] = _CREDIT_BYTES, time.monotonic() + _CREDIT_S

    def _spend_found(self, namespace_id: int, size: int) -> bool:
        """Whether so much of what was found free of late was left."""
        with self._lock:
            left, until = self._credit.get(namespace_id, (0, 0.0))
            if left < size or time.monotonic() >= until:
                return False
            self._credit[namespace_id] = left - size, until
            return True

    def _admit(self, namespace_id: int, size: int) -> None:
        wanted = {namespace_id: size}
        self._with_room(
            lambda t, attempt: self._room.refuse(t, wanted, attempt), self._session.read
        )

    def _reserve(self, bucket: Bucket, size: int) -> int:
        author = self._session.author()

        def fn(t: Transaction, attempt: int) -> int | ReservationRefused:
            blocks = stage_records.blocks_of(size)
            if refused := self._room.refuse(t, {bucket.id: BLOCK * blocks}, attempt):
                return refused
            ino = namespaces.allocate_inodes(t, bucket.id, 1)
            inode = Inode(
                mode=FILE_MODE,
                uid=author.uid,
                gid=author.gid,
                nlink=0,
                blocks=blocks,
                atime_ns=author.now,
                mtime_ns=author.now,
                ctime_ns=author.now,
                parent=0,
                name=b"",
                boot=author.boot,
            )
            tree.add_unlinked(t, bucket.root, ino, inode)
            return ino

        return self._with_room(fn, self._session.write)

    def _with_room(
        self,
        fn: Callable[[Transaction, int], T | ReservationRefused],
        run: Callable[[Callable[[Transaction], T | ReservationRefused]], T | ReservationRefused],
    ) -> T:
        attempt = 0
        while True:
            found = run(lambda t, attempt=attempt: fn(t, attempt))  # type: ignore[misc]
            if not isinstance(found, ReservationRefused):
                return found
            self._room.demand(found, attempt)
            attempt += 1


def _take_back(t: Transaction, ino: int) -> bool:
    """Remove what stands for a body that is not published; whether there was any. The engine takes
    it only where that is still so: beside a node of a cluster what is read may be older than a
    commit whose answer was lost."""
    if t.get(keys.reserved(ino)) is not None:
        t.delete(keys.reserved(ino))
        return True
    if t.get(keys.orphan(ino)) is not None:
        tree.reap(t, ino)
        return True
    return False
