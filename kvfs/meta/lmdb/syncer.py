"""Syncs the journal of one process's commits in the background, and rotates it when it is long.

Every commit is on disk `PERIOD_S` after it was made, plus the time that the disk takes: the
possible loss by a power cut is bounded even if nobody asks for a sync.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import lmdb

from kvfs.base.errors import KvfsError, Unavailable
from kvfs.meta.lmdb.checkpoints import base_path, read_position, rotate
from kvfs.meta.lmdb.journal import Position, generations, journal_path, mark_synced
from kvfs.meta.lmdb.long_readers import LongReaders
from kvfs.meta.lmdb.trust_state import StateFile

PERIOD_S: Final = 1.0
_ATTEMPTS: Final = 10
_log = logging.getLogger(__name__)


class Syncer:
    """Syncs the journal of one writing engine. `limit_bytes`: a journal longer than this, and than
    half of its base, is replaced by a new base."""

    def __init__(
        self, environment: lmdb.Environment, directory: Path, state: StateFile, limit_bytes: int
    ) -> None:
        self._readers = LongReaders()
        self.long_reader: str | None = None
        """The message about a reader for which the file grows, as of the last period with a
        commit."""
        self.failure: str | None = None
        """The reason why nothing more is promised to survive a power cut: the disk refused a sync.
        Else None."""
        self._environment = environment
        self._directory = directory
        self._state = state
        self._least_limit = self.limit = limit_bytes
        """Length of the journal from which it is replaced."""
        self._syncing = threading.Lock()
        self._rotating = threading.Lock()
        self._synced = -1
        """Sequence number of the last record known to be on disk."""
        self._marked = self._mark_on_disk = -1
        """The last record that the journal says was on disk, in the page cache and on disk."""
        self.is_due = False
        """Whether a commit has been noted that is not on disk yet."""
        self._long = False
        self._closing = False
        self._wake = threading.Event()
        self._soon = threading.Event()
        self._thread: threading.Thread | None = None
        self._journals: dict[int, int] = {}
        """Descriptors of the journals, by generation. They are kept, since the kernel tells each
        descriptor that was open by then of a lost write, and no later one."""
        try:
            self._set_limit()
            self._open_journals()
        except BaseException:
            self.close()
            raise

    def committed(self, position: Position) -> None:
        """Notes a commit: the first since a sync, and each beyond the limit; others need not be
        noted. Callers take turns."""
        if not self.is_due:
            self.is_due = True
            self._begin_period()
        if position.end > self.limit and not self._long:
            self._long = True
            self._soon.set()

    def sync(self) -> None:
        """Returns when everything committed before the call is on disk; concurrent callers share a
        sync.

        Raises Unavailable if the disk refused, now or before.
        """
        wanted = read_position(self._environment).sequence
        with self._syncing:
            if self.failure is not None:
                raise Unavailable(self.failure)
            if self._synced < wanted:
                self._synced = self._sync_journal()

    def rotate(self) -> None:
        """Replaces the journal by a new base; waits while another process does it.

        Raises OSError, lmdb.Error.
        """
        with self._rotating, self._state.locked():
            rotate(self._environment, self._directory)
        self._set_limit()

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        """Like `StateFile.alone`, with no rotation of this process meanwhile."""
        with self._rotating, self._state.alone() as alone:
            yield alone

    def stop(self) -> None:
        """Ends the thread; idempotent. The caller must sync what it had not."""
        self._closing = True
        self._wake.set()
        self._soon.set()
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Releases the journals, after `stop` and the last `sync`; idempotent."""
        while self._journals:
            os.close(self._journals.popitem()[1])

    def _rotate_unless_another_does(self) -> None:
        if not self._rotating.acquire(blocking=False):  # a file lock does not tell threads apart
            return
        try:
            with self._state.try_locked() as locked:
                if locked:
                    rotate(self._environment, self._directory)
        finally:
            self._rotating.release()
        self._set_limit()

    def _sync_journal(self) -> int:
        for _ in range(_ATTEMPTS):
            position = read_position(self._environment)
            try:
                if position.generation not in self._journals:
                    self._open_journals()
            except OSError as error:  # descriptors or memory ran out: nothing is lost by that
                raise Unavailable(
                    f"the journal in {self._directory} cannot be opened: {error.strerror}"
                ) from error
            if position.generation not in self._journals:
                continue  # another process has just replaced it by a base
            self._sync_all(position)
            return position.sequence
        raise Unavailable(
            f"the journal in {self._directory} is not there: close the engine and open it"
        )

    def _open_journals(self) -> None:
        """Opens each journal that is not replaced meanwhile by a base. Raises OSError."""
        for generation in generations(self._directory, "journal"):
            if generation not in self._journals:
                path = journal_path(self._directory, generation)
                with contextlib.suppress(FileNotFoundError):
                    self._journals[generation] = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def _sync_all(self, position: Position) -> None:
        """Syncs the journals up to this generation: the older ones are needed for as long as they
        exist. Raises Unavailable, from then on always: the kernel reports a lost write once and
        calls the page clean then."""
        marked = self._marked
        for generation, fd in list(self._journals.items()):
            if generation > position.generation:
                continue
            try:
                os.fdatasync(fd)
            except OSError as error:
                self.failure = f"the disk refused to sync {self._directory}: {error.strerror}"
                raise Unavailable(self.failure) from error
            if not os.fstat(fd).st_nlink:  # a base has replaced it
                os.close(self._journals.pop(generation))
        self._mark_on_disk = marked
        if (newest := self._journals.get(position.generation)) is not None:
            with contextlib.suppress(OSError):  # without it damage is found later, or told as less
                mark_synced(newest, position.sequence)
                self._marked = position.sequence

    def _sync_mark(self, *, is_idle: bool) -> None:
        """Has the mark reach the disk with the next sync; if none comes within a period, by one of
        its own."""
        with self._syncing:
            if self._mark_on_disk == self._marked or self.failure is not None:
                return
            if is_idle:
                self._sync_all(read_position(self._environment))
            else:
                self._wake.set()

    def _set_limit(self) -> None:
        size = 0
        for generation in generations(self._directory, "base"):
            with contextlib.suppress(FileNotFoundError):  # another process has just replaced it
                size = base_path(self._directory, generation).stat().st_size
        self.limit = max(self._least_limit, size // 2)

    def _begin_period(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="journal sync", daemon=True)
            self._thread.start()
        self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._soon.wait(PERIOD_S)
            if self._closing:
                return
            self._end_period()

    def _look_at_readers(self) -> None:
        self._environment.reader_check()  # those of processes that have ended
        newest = self._environment.info()["last_txnid"]
        found = self._readers.look(self._environment.readers(), newest, time.monotonic())
        if found is not None and self.long_reader is None:
            _log.warning("%s", found)
        self.long_reader = found

    def _end_period(self) -> None:
        self._wake.clear()
        self._soon.clear()
        self.is_due = False
        try:
            synced = self._synced
            self.sync()
            self._sync_mark(is_idle=synced == self._synced)
            if self._long:
                self._long = False
                self._rotate_unless_another_does()
            self._look_at_readers()
        except (KvfsError, OSError, lmdb.Error) as error:
            _log.error("the metadata's journal: %s", error)
