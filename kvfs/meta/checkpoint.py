"""Makes an LMDB file that is committed to without syncing survive a power cut, whole.

LMDB never overwrites a page that a read transaction may still see. So a writing process holds a
read transaction, the *pin*, at or before the last *checkpoint*: a copy of the meta record of some
transaction, made after every page up to it was synced. After a power cut that record is put back,
and the file is exactly the snapshot of the checkpoint.

| step of a checkpoint | after a power cut there is |
|---|---|
| 1 take the next pin, copy the meta record of its transaction | the last checkpoint |
| 2 fdatasync data.mdb | the last checkpoint |
| 3 write the record into the older slot of data.mdb.checkpoint, fdatasync | the last or this one |
| 4 drop the old pin | this checkpoint |

Invariants
- A process commits only while it holds a pin at or before the last checkpoint; any such pin
  protects the checkpoint, also when the process that took it has been killed.
- Checkpoints of all processes happen one after another, under a lock on data.mdb.checkpoint, so
  their transaction numbers only grow.
- The first process that opens the file after a reboot (the boot id in the newest slot is another)
  restores the checkpoint, under that lock, before LMDB sees the file.
- A kill needs none of this: commits are in the page cache.
- Locks are taken in the order `_taking`, the file's lock, LMDB's own; `_lock` is held for no I/O.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import lmdb

from kvfs.errors import Corrupt, KvfsError, Unavailable
from kvfs.meta import lmdb_file
from kvfs.meta.lmdb_errors import damaged
from kvfs.meta.lmdb_file import Meta

PERIOD_S: Final = 1.0
"""A commit is part of a checkpoint after at most this, plus the time that the disk takes."""
COMMITS: Final = 1_000
"""Or after so many commits: bounds what the pin makes the file grow, by some 25 MB."""
_IDLE_S: Final = 5.0
_MAGIC: Final = b"KVFSCKP1"
_SLOT: Final = struct.Struct(f"<8sQQ{lmdb_file.META_SIZE}s")
"""magic, sequence number, boot id, meta record; a 16-byte BLAKE2b digest of these follows."""
_DIGEST_SIZE: Final = 16
_SLOT_SPACING: Final = 4096
_log = logging.getLogger(__name__)


class Slot(NamedTuple):
    """A checkpoint as it is recorded."""

    sequence: int
    boot: int
    meta: Meta


class CheckpointFile:
    """`data.mdb.checkpoint`: two slots, written in turn. Made when missing. Raises OSError."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "data.mdb.checkpoint"
        self.made = not self.path.exists()
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with self.locked():
            if os.fstat(self._fd).st_size < 2 * _SLOT_SPACING:
                os.pwrite(self._fd, bytes(2 * _SLOT_SPACING), 0)
                os.fsync(self._fd)
                sync_directory(directory)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Alone among all processes (and, within one, the threads that share this object need a
        lock of their own). Waits for at most another's checkpoint."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def newest(self) -> Slot | None:
        """The last checkpoint; None when there is no valid one."""
        slots = [read_slot(self._fd, index) for index in (0, 1)]
        valid = [slot for slot in slots if slot is not None]
        return max(valid, key=lambda slot: slot.sequence, default=None)

    def write(self, slot: Slot) -> None:
        """Replace the older slot; on disk when this returns."""
        packed = _SLOT.pack(_MAGIC, slot.sequence, slot.boot, slot.meta.raw)
        os.pwrite(self._fd, packed + _digest(packed), slot.sequence % 2 * _SLOT_SPACING)
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def read_slot(fd: int, index: int) -> Slot | None:
    """Slot 0 or 1 of an open checkpoint file; None when it is empty or torn."""
    stored = os.pread(fd, _SLOT.size + _DIGEST_SIZE, index * _SLOT_SPACING)
    packed, digest = stored[: _SLOT.size], stored[_SLOT.size :]
    if len(packed) < _SLOT.size or _digest(packed) != digest:
        return None
    magic, sequence, boot, raw = _SLOT.unpack(packed)
    meta = lmdb_file.parse(raw)
    return None if magic != _MAGIC or meta is None else Slot(sequence, boot, meta)


def restore(directory: Path, file: CheckpointFile, boot: int) -> bool:
    """Before LMDB opens the file, under the file's lock: after a reboot, put the last checkpoint
    back.

    Returns whether it did. Raises Corrupt, OSError.
    """
    data = directory / "data.mdb"
    slot = file.newest()
    if slot is None:
        _forget_unfinished(data, file)
        return False
    if not data.exists():
        raise Corrupt(f"{data} is missing: restore its directory from a backup")
    if slot.boot == boot:
        return False
    fd = os.open(data, os.O_RDWR | os.O_CLOEXEC)
    try:
        lmdb_file.write_metas(fd, slot.meta)
        os.fsync(fd)
    finally:
        os.close(fd)
    file.write(Slot(slot.sequence + 1, boot, slot.meta))
    return True


def _forget_unfinished(data: Path, file: CheckpointFile) -> None:
    """No checkpoint was ever finished, so nothing was ever acknowledged; but do not trust that
    blindly."""
    if file.made or not data.exists():
        return
    fd = os.open(data, os.O_RDONLY | os.O_CLOEXEC)
    try:
        meta = lmdb_file.newest(fd)
    finally:
        os.close(fd)
    if meta is not None and meta.txnid > 0:
        raise Corrupt(
            f"{file.path} is damaged, so {data} may be torn: restore their directory from a backup,"
            f" or, if the power was not cut since it was last used, delete {file.path.name}"
        )
    data.unlink()
    data.with_name("lock.mdb").unlink(missing_ok=True)


def require_consistent(directory: Path, boot: int) -> None:
    """For a reader, who cannot restore. Raises Unavailable when a restore is due."""
    try:
        fd = os.open(directory / "data.mdb.checkpoint", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        slots = [slot for slot in (read_slot(fd, 0), read_slot(fd, 1)) if slot is not None]
    finally:
        os.close(fd)
    slot = max(slots, key=lambda slot: slot.sequence, default=None)
    if slot is not None and slot.boot == boot:
        return
    fd = os.open(directory / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)
    try:
        meta = lmdb_file.newest(fd)
    finally:
        os.close(fd)
    if slot is None or meta is None or meta.txnid != slot.meta.txnid:
        raise Unavailable(
            f"the metadata in {directory} were not closed before the machine went down:"
            " start the node once, with the right to write them"
        )


class Checkpointer:
    """Holds the pin of one process and takes its checkpoints, mostly in a thread of its own.

    Raises Unavailable where the disk refused to sync: from then on nothing more is promised to
    survive a power cut, and `failure` says so.
    """

    def __init__(self, environment: lmdb.Environment, file: CheckpointFile, boot: int) -> None:
        self.failure: str | None = None
        self.taken = 0
        """Checkpoints that this process wrote."""
        self._environment = environment
        self._file = file
        self._boot = boot
        self._data = Path(environment.path()) / "data.mdb"
        self._data_fd = os.open(self._data, os.O_RDONLY | os.O_CLOEXEC)
        self._lock = threading.Lock()
        self._taking = threading.Lock()
        self._pin: lmdb.Transaction[bytes] | None = None
        self._pinned = -1
        """The transaction number of the last checkpoint known here."""
        self._pending = 0
        self._wake = threading.Event()
        self._full = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None

    def hold(self) -> None:
        """Begin to write: returns with the lock taken and the pin in place; `release` follows."""
        self._lock.acquire()
        while self._pin is None:
            self._lock.release()
            self.take()
            self._lock.acquire()

    def release(self, *, committed: bool) -> None:
        """The write has ended."""
        if committed:
            self._pending += 1
            if self._pending == 1:
                self._begin_period()
            elif self._pending == COMMITS:
                self._full.set()
        self._lock.release()

    def take(self) -> None:
        """Everything committed before the call survives power loss when this returns.

        Callers that wait for one another share a checkpoint.
        """
        wanted = self._environment.info()["last_txnid"]
        with self._taking:
            if self._pin is None or self._pinned < wanted:
                with self._file.locked():
                    self.take_locked()

    def take_locked(self, check_pages: int = 0) -> None:
        """As `take`, for a caller who holds the checkpoint file's lock.

        Looks at up to `check_pages` pages first; raises Corrupt when they are damaged.
        """
        if self.failure is not None:
            raise Unavailable(self.failure)
        pin, meta = self._new_pin()
        try:
            self._check(meta, check_pages)
            slot = self._file.newest()
            if slot is None or (slot.boot, slot.meta.txnid) != (self._boot, meta.txnid):
                self._write_through(meta, 0 if slot is None else slot.sequence + 1)
        except BaseException:
            pin.abort()
            raise
        with self._lock:
            old, self._pin, self._pinned = self._pin, pin, meta.txnid
        if old is not None:
            old.abort()
        self._environment.reader_check()

    def close(self) -> None:
        """Take a last checkpoint when something was committed, and end the thread."""
        self._closing = True
        self._wake.set()
        self._full.set()
        if self._thread is not None:
            self._thread.join()
        try:
            if self._pending and self.failure is None:
                self.take()
        finally:
            self._drop_pin()
            self._file.close()
            os.close(self._data_fd)

    def _read_meta(self, txnid: int) -> Meta | None:
        """The meta record of a transaction, while it is in one of the two pages."""
        metas = lmdb_file.read_metas(self._data_fd)
        return next((meta for meta in metas if meta.txnid == txnid), None)

    def _new_pin(self) -> "tuple[lmdb.Transaction[bytes], Meta]":
        # While we are the writer, nobody can replace the meta record of the newest transaction.
        with self._environment.begin(write=True):
            pin = self._environment.begin()
            meta = self._read_meta(pin.id())
        if meta is None:
            pin.abort()
            raise Corrupt(f"LMDB's transaction {pin.id()} has no meta record of a known format")
        return pin, meta

    def _check(self, meta: Meta, pages: int) -> None:
        damage = lmdb_file.find_damage(self._data_fd, meta, pages) if pages else None
        if damage is not None:
            raise Corrupt(damaged(self._data, damage))

    def _write_through(self, meta: Meta, sequence: int) -> None:
        try:
            self._environment.sync(True)
            self._file.write(Slot(sequence, self._boot, meta))
        except (OSError, lmdb.Error) as error:
            # The kernel reports a lost write once and then calls the page clean: never try again.
            self.failure = f"the disk refused to sync {self._data}: {error}"
            raise Unavailable(self.failure) from error
        self.taken += 1

    def _begin_period(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
            self._thread.start()
        self._wake.set()

    def _run(self) -> None:
        while True:
            woken = self._wake.wait(_IDLE_S)
            if woken:
                self._full.wait(PERIOD_S)
            if self._closing:
                return
            if woken:
                self._end_period()
            else:
                self._yield_to_others()

    def _end_period(self) -> None:
        with self._lock:
            self._wake.clear()
            self._full.clear()
            self._pending = 0
        try:
            self.take()
        except (KvfsError, OSError, lmdb.Error) as error:
            _log.error("no checkpoint: %s", error)

    def _yield_to_others(self) -> None:
        """We are idle: once others have written, our pin would only make their file grow."""
        if self._environment.info()["last_txnid"] != self._pinned:
            self._drop_pin()

    def _drop_pin(self) -> None:
        with self._lock:
            if self._pending and not self._closing:
                return
            pin, self._pin = self._pin, None
        if pin is not None:
            pin.abort()


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _digest(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=_DIGEST_SIZE).digest()
