"""Files in the making: invisible until they are whole, then put under their names at once. Every
door beside the node stages here.

| step of a put | on disk | in the engine | left by a kill after it, and its repair |
|---|---|---|---|
| 1 a small file: a number taken that was reserved | nothing | `r` | the node, an hour later |
| 1 another: record without a name, space reserved | nothing | orphan | see below |
| 2 data file made | empty file | the same | see below |
| 3 data written; durable: synced | the data | the same | the same |
| 4 under its name, with a notice | the data | published | nothing: the put is complete |
| 5 durable: the engine synced | the data | published | nothing |
| 6 the steps of `post_commit` | | | see there |

A small file needs only the transaction of step 4: its data file has the name of a number that was
reserved with many others. A larger one has a record before its first byte, so that its space counts
in every process. The running node drops the remains of a killed process a minute later, when no
process has the data file open, else the next start does.

Invariants
- A new file has a new inode number, which is used once: a reader of the old one goes on reading it.
- All files of one call appear in one transaction, or none does.
- A node that starts meanwhile takes number and record for a dead process's and drops them: step 4
  raises `stage_records.Dropped`. Then the kernel copies the data from the file that we still hold
  into one with a new number.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, TypeVar

import msgspec

from kvfs.base import forks
from kvfs.base.errors import Conflict, KvfsError, NoSpace, Unavailable
from kvfs.datastore import file_sync
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import NAMESPACE_SHIFT
from kvfs.session import byte_transfer
from kvfs.session.session import Session
from kvfs.tree import reserved_inodes, tree
from kvfs.tree.inodes import BLOCK
from kvfs.vfs import stage_records
from kvfs.vfs.post_commit import Changed, Finisher
from kvfs.vfs.space_reservation import ReservationRefused, SpaceReservation
from kvfs.vfs.stage_records import PAGE_BYTES, Dropped, NewFile, WrittenData, blocks_of

T = TypeVar("T")
SMALL_BYTES: Final = 1 << 20
_ATTEMPTS: Final = 3
_MOST_NUMBERS: Final = 256
"""Numbers reserved at a time by a process that needs many: at first one, then sixteen."""
_NUMBERS_S: Final = 1800.0
"""Age from which on no number is used: the node releases those that nobody uses for twice as
long."""
_CREDIT_BYTES: Final = 4 << 20
"""Most bytes found free at a time, for small files: each process may exceed a limit by this much
within a second."""
_CREDIT_S: Final = 1.0
_GROWTH_BYTES: Final = 64 << 20
"""Bytes reserved at a time for a file whose size is not known beforehand."""


class Draft(msgspec.Struct, eq=False):
    """One file in the making."""

    ino: int
    """The inode number; 0: it was published, or is discarded."""
    reserved: int
    """Reserved bytes."""
    durable: bool
    numbered: bool
    """Whether it has a reserved number, and no record."""
    is_synced: bool = False
    fd: int = -1
    """Its data file, open for reading and writing."""


class Drafts:
    """Makes, publishes and discards drafts of one store; any thread. Its transactions may be run
    more than once."""

    def __init__(self, session: Session, room: SpaceReservation, finisher: Finisher) -> None:
        self._session = session
        self._room = room
        self._finisher = finisher
        self.begin_anew()
        forks.in_each_child(self)

    def begin_anew(self) -> None:
        """Begins with nothing: in the child of a fork the numbers are the parent's, and the lock
        may be held by a thread that is not there."""
        self._lock = threading.Lock()
        self._numbers: dict[int, deque[int]] = {}
        self._batches: dict[int, int] = {}
        self._until: dict[int, float] = {}
        """The end of the use of each namespace's numbers."""
        self._credit: dict[int, tuple[int, float]] = {}

    # ---- steps 1 and 2

    def begin(self, wanted: Callable[[Transaction], Sequence[NewFile]]) -> list[Draft]:
        """Returns drafts of these files, with records and space. `wanted` is called in the
        transaction.

        Raises what it raises, NoSpace, ReadOnly, Unavailable, OSError; then nothing is left."""
        author = self._session.author()

        def fn(t: Transaction, attempt: int) -> list[Draft] | ReservationRefused:
            self._finisher.clear(t)
            files = wanted(t)
            reserved = stage_records.reserve(t, self._room, files, author, attempt)
            if isinstance(reserved, ReservationRefused):
                return reserved
            return [
                Draft(ino, file.size, durable=file.durable, numbered=False)
                for ino, file in zip(reserved, files, strict=True)
            ]

        drafts = self._with_room(fn, self._session.write)
        try:
            for draft in drafts:
                draft.fd = self._session.files.create(draft.ino, 0)
        except BaseException:
            self.discard(drafts)
            raise
        return drafts

    def begin_small(self, files: Sequence[NewFile]) -> list[Draft]:
        """Begins drafts of files of one namespace, each of no more than SMALL_BYTES: mostly without
        a transaction. Raises what `begin` raises."""
        number = files[0].parent >> NAMESPACE_SHIFT
        self._spend(number, BLOCK * sum(map(blocks_of, [file.size for file in files])))
        drafts: list[Draft] = []
        try:
            for file in files:
                drafts.append(self._numbered(number, file.durable, len(files) - len(drafts)))
        except BaseException:
            self.discard(drafts)
            raise
        return drafts

    def begin_small_now(self, file: NewFile) -> Draft | None:
        """Like `begin_small`, for an event loop; None if the node must be asked for space first."""
        number = file.parent >> NAMESPACE_SHIFT
        if not self._spend_found(number, -(-file.size // PAGE_BYTES) * PAGE_BYTES):
            return None
        return self._numbered(number, file.durable)

    def begin_one(self, file: NewFile) -> Draft:
        """Returns a draft of one file, whose size tells whether it is small. Raises what `begin`
        raises."""
        if file.size <= SMALL_BYTES:
            return self.begin_small([file])[0]
        return self.begin(lambda _: [file])[0]

    def _numbered(self, namespace_id: int, durable: bool, lacking: int = 1) -> Draft:
        """Returns a draft with its data file. `lacking`: so many are made one after the other."""
        ino = self._take_number(namespace_id, lacking)
        draft = Draft(ino, SMALL_BYTES, durable=durable, numbered=True)
        try:
            draft.fd = self._session.files.create(ino, 0)
        except BaseException:
            self.discard([draft])
            raise
        return draft

    # ---- step 3

    def grow(self, draft: Draft, size: int) -> None:
        """Reserves space before the file grows beyond `reserved`. Raises NoSpace, Unavailable."""
        if size <= draft.reserved:
            return
        ino, old, new = draft.ino, draft.reserved, max(size, draft.reserved + _GROWTH_BYTES)
        if draft.numbered:
            self._spend(ino >> NAMESPACE_SHIFT, new)
        else:
            self._with_room(
                lambda t, attempt: stage_records.grow(t, self._room, ino, old, new, attempt),
                self._session.write,
            )
        draft.reserved = new

    def sync(self, draft: Draft) -> None:
        """Makes the data of a durable file survive power loss. Raises OSError."""
        if draft.durable and not draft.is_synced:
            file_sync.sync(draft.fd, datasync=True)
            draft.is_synced = True

    # ---- steps 4 to 6

    def publish(
        self,
        drafts: Sequence[Draft],
        place: Callable[[Sequence[WrittenData], Transaction, Changed], T],
        later: list[Changed] | None = None,
    ) -> T:
        """Commits what `place` does with the files, durable ones of which are on disk before. They
        are published when it returns, and gone if anything is raised before that. `later`: the node
        is not told, but `Finisher.finish` can be.

        Raises what `place` raises, NoSpace, ReadOnly, Unavailable, Conflict, OSError; Unavailable
        also when all is done but the node did not answer in time."""
        durable = False
        try:
            for draft in drafts:
                if draft.durable:
                    durable = True
                    self.sync(draft)
            attempts = _ATTEMPTS
            while True:
                try:
                    written = list(map(_written, drafts))
                    result, changed = self._finisher.commit(partial(place, written))
                    break
                except Dropped:
                    attempts -= 1
                    if not attempts:
                        raise _hindered() from None
                    self._rescue(drafts)
        except BaseException as error:
            self.discard(drafts, in_doubt=_is_in_doubt(error))
            raise
        for draft in drafts:
            os.close(draft.fd)
            draft.ino, draft.fd = 0, -1
        if durable:
            self._session.sync()
        if later is None:
            self._finisher.finish(changed)
        else:
            later.append(changed)
        return result

    def _rescue(self, drafts: Sequence[Draft]) -> None:
        """Gives drafts that a starting node dropped other numbers, and moves their data with
        them."""
        with self._lock:
            self._numbers.clear()  # the node dropped all that were reserved
        alive = self._session.read(lambda t: [_is_alive(t, draft.ino) for draft in drafts])
        for draft, is_alive in zip(drafts, alive, strict=True):
            if is_alive:
                continue
            number = draft.ino >> NAMESPACE_SHIFT
            self._spend(number, draft.reserved)
            new = self._numbered(number, draft.durable)
            try:
                os.lseek(new.fd, 0, os.SEEK_SET)
                byte_transfer.copy(draft.fd, new.fd, byte_transfer.go_on)
                self.sync(new)
            except BaseException:
                self.discard([new])
                raise
            os.close(draft.fd)
            self._session.files.unlink(draft.ino, 0)
            draft.ino, draft.fd, draft.numbered = new.ino, new.fd, True

    # ---- what is not published

    def discard(self, drafts: Iterable[Draft], *, in_doubt: bool = False) -> None:
        """Undoes `begin`; does nothing for published drafts. Idempotent. Parts that cannot be
        undone now are left to the node. `in_doubt`: a commit of them was tried whose answer did not
        come."""
        numbered: list[int] = []
        recorded: list[int] = []
        for draft in drafts:
            if draft.fd >= 0:
                os.close(draft.fd)
                draft.fd = -1
            if draft.ino:
                (numbered if draft.numbered and not in_doubt else recorded).append(draft.ino)
                draft.ino = 0
        try:
            if numbered:
                self._give_back_numbers(numbered)
            if recorded:
                for ino in self._session.write(lambda t: _take_back(t, recorded)):
                    self._session.files.unlink(ino, 0)
        except (KvfsError, OSError):
            pass

    def give_back(self) -> None:
        """Releases unused numbers; failures are left to the node."""
        with self._lock:
            unused = [ino for each in self._numbers.values() for ino in each]
            self._numbers.clear()
        if not unused:
            return
        try:
            self._session.write(lambda t: reserved_inodes.release(t, unused))
        except KvfsError:
            pass

    def _give_back_numbers(self, inos: Sequence[int]) -> None:
        def fn(t: Transaction) -> list[tuple[bool, bool]]:
            return [(_is_published(t, ino), t.get(keys.reserved(ino)) is not None) for ino in inos]

        for ino, (is_published, is_reserved) in zip(inos, self._session.read(fn), strict=True):
            if is_published:
                continue
            self._session.files.unlink(ino, 0)
            if is_reserved:
                with self._lock:
                    self._numbers.setdefault(ino >> NAMESPACE_SHIFT, deque()).append(ino)

    # ---- numbers and space

    def _take_number(self, namespace_id: int, lacking: int) -> int:
        """Returns a reserved number. If there is none, at least so many are reserved."""
        with self._lock:
            numbers = self._numbers.setdefault(namespace_id, deque())
            if not numbers or time.monotonic() >= self._until.get(namespace_id, 0.0):
                old = list(numbers)
                numbers.clear()
                batch = max(lacking, self._batches.get(namespace_id, 1))
                self._batches[namespace_id] = min(16 * batch, _MOST_NUMBERS)

                def fn(t: Transaction) -> int:
                    reserved_inodes.release(t, old)
                    return reserved_inodes.reserve(t, namespace_id, batch)

                self._until[namespace_id] = time.monotonic() + _NUMBERS_S
                first = self._session.write(fn)
                numbers.extend(range(first, first + batch))
            return numbers.popleft()

    def with_room(self, namespace_id: int, size: int, fn: Callable[[Transaction], T]) -> T:
        """Runs a transaction that counts `size` bytes more, if there is space for them. Raises
        NoSpace, Unavailable, what `fn` raises."""

        def step(t: Transaction, attempt: int) -> T | ReservationRefused:
            return self._room.refuse(t, {namespace_id: size}, attempt) or fn(t)

        return self._with_room(step, self._session.write)

    def _spend(self, namespace_id: int, size: int) -> None:
        """Spends space that was found free lately, or looks for more."""
        if self._spend_found(namespace_id, size):
            return
        spare = self._session.read(lambda t: self._room.spare(t, namespace_id))
        credit = min(_CREDIT_BYTES, spare)
        try:
            self._admit(namespace_id, size + credit)
        except NoSpace:
            self._admit(namespace_id, size)
            return
        with self._lock:
            self._credit[namespace_id] = credit, time.monotonic() + _CREDIT_S

    def _spend_found(self, namespace_id: int, size: int) -> bool:
        """Returns whether so much of the space found free lately was left."""
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


def _written(draft: Draft) -> WrittenData:
    found = os.fstat(draft.fd)
    return WrittenData(
        ino=draft.ino,
        size=found.st_size,
        blocks=found.st_blocks,
        mtime_ns=found.st_mtime_ns,
        ctime_ns=found.st_ctime_ns,
        synced=draft.durable,
    )


def _hindered() -> Conflict:
    return Conflict("starting nodes dropped the new file again and again: try once more")


def _is_in_doubt(error: BaseException) -> bool:
    """Returns whether a commit that ended so may have taken place."""
    return isinstance(error, Unavailable) or not isinstance(error, Exception)


def _is_alive(t: Transaction, ino: int) -> bool:
    """Returns whether no node has dropped the draft with this number."""
    return t.get(keys.reserved(ino)) is not None or t.get(keys.orphan(ino)) is not None


def _is_published(t: Transaction, ino: int) -> bool:
    return t.get(keys.inode(ino)) is not None and t.get(keys.orphan(ino)) is None


def _take_back(t: Transaction, inos: Sequence[int]) -> list[int]:
    """Removes the records of drafts that are not published; returns those that had any. The engine
    accepts it only if that is still so: beside a node of a cluster a read may be older than a
    commit whose answer was lost."""
    mine = []
    for ino in inos:
        if t.delete(keys.reserved(ino)):
            mine.append(ino)
        elif t.get(keys.orphan(ino)) is not None:
            tree.reap(t, ino)
            mine.append(ino)
    return mine
