"""Files in the making: invisible until they are whole, and then put under their names at once.

| step of a put | on disk | in the engine | left by a kill after it, and who mends it |
|---|---|---|---|
| 1 record without a name, space reserved | nothing | orphan | the record: see below |
| 2 data file made | empty file | orphan | record and data file: see below |
| 3 data written; durable: synced | the data | orphan | the same |
| 4 under its name, with a notice | the data | published | nothing: the put is complete |
| 5 durable: the engine synced | the data | published | nothing |
| 6 what `finish` does | | | see there |

The record comes before the data file, so that no data file is ever without one. Leftovers of a
killed process are dropped by the running node a minute later, when no process has the data file
open, else by the next start.

Invariants
- The new file has a new inode number: a reader of the old one goes on doing so.
- All files of one call appear in one transaction, or none does.
- A node that starts meanwhile takes the record for a dead process's and drops it. Then the data are
  copied, by the kernel, from the file that we still hold into one with a new record.
"""

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

from kvfs.base.errors import Conflict, KvfsError, NoSpace
from kvfs.datastore import file_sync
from kvfs.datastore.layout import translate
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.session import byte_transfer
from kvfs.session.session import Session
from kvfs.tree import tree
from kvfs.vfs import stage_records
from kvfs.vfs.post_commit import Changed, Finisher
from kvfs.vfs.space_reservation import ReservationRefused, SpaceReservation
from kvfs.vfs.stage_records import Dropped, Options, StagingTarget, WrittenData

T = TypeVar("T")
_ATTEMPTS: Final = 3
_GROWTH_BYTES: Final = 64 << 20
"""Reserved at a time for a file whose size is not known beforehand."""


class Draft:
    """One file in the making. `fd` is its data file, open for reading and writing."""

    __slots__ = ("durable", "fd", "ino", "options", "reserved", "target")

    def __init__(
        self, target: StagingTarget, options: Options, ino: int, reserved: int, durable: bool
    ) -> None:
        self.target = target
        self.options = options
        self.ino = ino
        self.reserved = reserved
        """Bytes."""
        self.durable = durable
        self.fd = -1


class Drafts:
    """Makes, publishes and discards drafts for one client; any thread."""

    def __init__(self, session: Session, room: SpaceReservation, finisher: Finisher) -> None:
        self._session = session
        self._room = room
        self._finisher = finisher

    def begin(self, wanted: Sequence[tuple[StagingTarget, int]], options: Options) -> list[Draft]:
        """Steps 1 and 2 for these files of so many bytes.

        Raises NotFound, NotADirectory, IsADirectory, Exists, NotPermitted, NameTooLong, Invalid,
        NoSpace, ReadOnly, Unavailable; then nothing is left.
        """
        for _ in range(_ATTEMPTS):
            drafts = self._reserve(wanted, options)
            try:
                for draft in drafts:
                    draft.fd = self._create(draft)
                if len(self._unfinished(drafts)) == len(drafts):
                    return drafts
            except BaseException:
                self.discard(drafts)
                raise
            self.abandon(drafts)
        raise _hindered()

    def publish(self, drafts: list[Draft]) -> None:
        """Step 3's sync, and steps 4 to 6; the data files are closed.

        Raises as `begin`, and Conflict; then `discard` follows. Raises Unavailable also when all is
        done but the node did not answer in time.
        """
        for _ in range(_ATTEMPTS):
            try:
                changed = self._place(drafts)
                break
            except Dropped:
                self._rescue(drafts)
        else:
            raise _hindered()
        _close(drafts)
        if any(draft.durable for draft in drafts):
            self._session.sync()
        self._finisher.finish(changed)

    def discard(self, drafts: Iterable[Draft]) -> None:
        """Undo `begin`, but for drafts that were published. What cannot be undone now is left to
        the node.

        Whether one was is the engine's to say, by the commit that removes its record: beside a
        node of a cluster what is read may be older than a commit whose answer was lost."""
        drafts = list(drafts)
        _close(drafts)

        def reap(t: Transaction) -> list[Draft]:
            mine = _unnamed(t, drafts)
            for draft in mine:
                tree.reap(t, draft.ino)
            return mine

        try:
            for draft in self._session.write(reap):
                self._session.files.unlink(draft.ino, 0)
        except (KvfsError, OSError):
            pass

    def abandon(self, drafts: list[Draft]) -> None:
        """As `discard`, where a node dropped some: their data files have no record."""
        for draft in drafts:
            self._session.files.unlink(draft.ino, 0)
        self.discard(drafts)

    def grow(self, draft: Draft, size: int) -> None:
        """Call before the file is longer than was reserved. Raises NoSpace, Unavailable."""
        if size <= draft.reserved:
            return
        ino, old, new = draft.ino, draft.reserved, max(size, draft.reserved + _GROWTH_BYTES)
        with _naming([draft.target]):
            self._with_room(
                lambda t, attempt: stage_records.grow(t, self._room, ino, old, new, attempt)
            )
        draft.reserved = new

    def sync(self, draft: Draft) -> None:
        """Makes a durable file's data survive power loss. Raises OSError."""
        if draft.durable:
            file_sync.sync(draft.fd, datasync=True)

    def failed(self, draft: Draft, error: OSError) -> Exception:
        """The error to raise for the system's error on its data file."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            meant = translate(error, self._session.store.root)
            return type(meant)(f"{draft.target}: {meant}")
        return error

    def _reserve(
        self, wanted: Sequence[tuple[StagingTarget, int]], options: Options
    ) -> list[Draft]:
        author = self._session.author()

        def fn(t: Transaction, attempt: int) -> list[stage_records.Reserved] | ReservationRefused:
            self._finisher.clear(t)
            return stage_records.reserve(t, self._room, wanted, options, author, attempt)

        with _naming([target for target, _ in wanted]):
            reserved = self._with_room(fn)
        return [
            Draft(target, options, one.ino, size, one.durable)
            for (target, size), one in zip(wanted, reserved, strict=True)
        ]

    def _place(self, drafts: list[Draft]) -> Changed:
        files = [_written(draft) for draft in drafts]
        changed = Changed()
        author = self._session.author()

        def fn(t: Transaction) -> None:
            for draft, file in zip(drafts, files, strict=True):
                stage_records.place(t, draft.target, file, draft.options, author, changed)
            self._finisher.post(t, changed, author.now)

        self._session.write(fn)
        return changed

    def _create(self, draft: Draft) -> int:
        try:
            return self._session.files.create(draft.ino, 0)
        except OSError as error:
            raise self.failed(draft, error) from error

    def _unfinished(self, drafts: list[Draft]) -> list[Draft]:
        """As `_unnamed`, read by itself."""
        return self._session.read(lambda t: _unnamed(t, drafts))

    def _rescue(self, drafts: list[Draft]) -> None:
        """Give those that were dropped a new record and data file."""
        alive = {draft.ino for draft in self._unfinished(drafts)}
        for draft in drafts:
            if draft.ino in alive:
                continue
            (new,) = self.begin([(draft.target, draft.reserved)], draft.options)
            try:
                os.lseek(new.fd, 0, os.SEEK_SET)
                byte_transfer.copy(draft.fd, new.fd, lambda _: None)
                self.sync(new)
            except BaseException:
                self.discard([new])
                raise
            os.close(draft.fd)
            draft.ino, draft.fd = new.ino, new.fd

    def _with_room(self, fn: Callable[[Transaction, int], T | ReservationRefused]) -> T:
        attempt = 0
        while True:
            found = self._session.write(lambda t, attempt=attempt: fn(t, attempt))  # type: ignore[misc]
            if not isinstance(found, ReservationRefused):
                return found
            self._room.demand(found, attempt)
            attempt += 1


def _unnamed(t: Transaction, drafts: Sequence[Draft]) -> list[Draft]:
    """Returns those whose record is there, without a name."""
    return [draft for draft in drafts if t.get(keys.orphan(draft.ino)) is not None]


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


@contextmanager
def _naming(targets: Sequence[StagingTarget]) -> Iterator[None]:
    """Names the targets in an error for lack of space."""
    try:
        yield
    except NoSpace as error:
        others = f" and {len(targets) - 1} more" if len(targets) > 1 else ""
        raise NoSpace(f"{targets[0]}{others}: {error}") from None


def _close(drafts: Iterable[Draft]) -> None:
    for draft in drafts:
        if draft.fd >= 0:
            os.close(draft.fd)
            draft.fd = -1


def _hindered() -> Conflict:
    return Conflict("starting nodes dropped the new file again and again: try once more")
