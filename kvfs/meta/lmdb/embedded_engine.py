"""The embedded metadata engine: LMDB, memory-mapped, opened by any number of processes of one node
at once.

Invariants
- A commit is in the page cache when `transact` returns, so it survives SIGKILL; it is not on disk
  until a checkpoint.
- `read_now` and `transact_now` never wait for the disk; `transact_now` may wait for another
  process's commit (some 10 microseconds).
- A transaction of any process that writes finds, and commits, what was put off
  (`deferred_commits`); so does each read of the process that put it off.
- Refusals by LMDB or the system leave this module as a KvfsError that names the file and the
  remedy.

The unnamed database holds the metadata. Other databases (`EmbeddedEngine.database`) have names that
start with 0xff, which no scan of the metadata reaches, and share its commits' safety.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeVar

import lmdb
import trio

from kvfs.base.errors import Invalid, KvfsError
from kvfs.meta import keys, schema
from kvfs.meta.engine import Transaction, Tried
from kvfs.meta.lmdb.checkpoints import find_base_damage
from kvfs.meta.lmdb.deferred_commits import COMMIT_BYTES, DeferredCommits
from kvfs.meta.lmdb.journal import (
    FIRST,
    GENERATION_KEY,
    POSITION,
    POSITION_KEY,
    JournalWriter,
    Position,
    Writes,
    last_values,
    unpack_position,
)
from kvfs.meta.lmdb.lmdb_errors import translated
from kvfs.meta.lmdb.lmdb_transactions import ReadTransaction, WriteTransaction
from kvfs.meta.lmdb.open_engine import EngineOpener, OpenedEngine, look_for_damage
from kvfs.meta.lmdb.reserve import Reserve, give_up, is_full
from kvfs.meta.lmdb.syncer import Syncer
from kvfs.meta.lmdb.trust_state import StateFile, TrustState

T = TypeVar("T")
_MAP_SIZE: Final = 1 << 40
_JOURNAL_BYTES: Final = 32 << 20
"""Length from which a journal is replaced: some 150,000 commits, replayed in 1 s."""
_NONE: Final = (0,)


def _deferred(path: Path, boot: int) -> DeferredCommits:
    """Opens the file of deferred commits, even on a full disk if the reserve allows: a process that
    committed without a look at them would undo them."""
    try:
        return DeferredCommits(path, boot)
    except OSError as error:
        if is_full(error, path) and give_up(path):
            return DeferredCommits(path, boot)
        raise


def _opened(opener: EngineOpener) -> OpenedEngine:
    """Opens the file, even on a full disk if the reserve allows. Raises what `open_to_write`
    raises."""
    try:
        return opener.open_to_write()
    except (OSError, lmdb.Error) as error:
        if is_full(error, opener.path) and give_up(opener.path):
            return opener.open_to_write()
        raise


class Database:
    """One of the ordered maps in the engine's file."""

    def __init__(self, engine: "EmbeddedEngine", name: bytes, handle: Any) -> None:
        self._begin = engine.environment.begin
        self._engine = engine
        self._lock = engine.lock
        self._path = engine.path
        self._name = name
        self._handle = handle

    def read_now(self, fn: Callable[[Transaction], T]) -> T:
        """Runs `fn` on a read-only view, at once. Errors raised by `fn` pass through."""
        engine = self._engine
        if engine.unseen is not None and not self._name:  # in other databases nothing is put off
            view = engine.unsettled_view
            if view is not None and view[0] == threading.get_ident():
                return fn(view[1])  # of a read within a read
            try:
                engine.settle()
            except KvfsError:  # which whoever changes something is told
                return self._read_unsettled(fn)
        try:
            raw = self._begin(self._handle)
            try:
                return fn(ReadTransaction(raw, engine.node))
            finally:
                raw.abort()
        except lmdb.Error as error:
            raise translated(error, self._path) from error

    def _read_unsettled(self, fn: Callable[[Transaction], T]) -> T:
        """Like `read_now`, over what was put off and cannot be committed now: in a transaction that
        is given up."""
        engine = self._engine
        try:
            with self._lock:
                raw = self._begin(self._handle, None, True)
                try:
                    engine.take_deferred(raw, [])
                    view = ReadTransaction(raw, engine.node)
                    engine.unsettled_view = threading.get_ident(), view
                    return fn(view)
                finally:
                    engine.unsettled_view = None
                    raw.abort()
        except lmdb.Error as error:
            raise translated(error, self._path) from error

    def transact_now(self, fn: Callable[[WriteTransaction], T], unseen: bool = False) -> T:
        """Runs `fn` and commits, at once; an error raised by `fn` aborts and passes through.
        `unseen`: see `EmbeddedEngine.transact_unseen`.

        `fn` must not call the engine. Raises NoSpace, ReadOnly, Corrupt, Unavailable.
        """
        engine = self._engine
        try:
            with self._lock:
                raw = self._begin(self._handle, None, True)
                try:
                    transaction = WriteTransaction(raw, engine.node)
                    writes, taken = transaction.writes, 0
                    if engine.deferred_counts[0]:
                        if not self._name:
                            taken = engine.take_deferred(raw, writes)
                        elif engine.has_deferred(raw):
                            raw.abort()
                            return self._transact_settled(fn)
                    result = fn(transaction)
                    if writes and not (unseen and engine.defer(raw, writes, taken)):
                        engine.commit(raw, self._name, self._handle, writes, taken)
                    return result
                finally:
                    raw.abort()
        except lmdb.Error as error:
            if is_full(error, self._path) and give_up(self._path):
                return self.transact_now(fn, unseen)
            raise translated(error, self._path) from error

    def _transact_settled(self, fn: Callable[[WriteTransaction], T]) -> T:
        """Like `transact_now`, of another database than the metadata, whose lock is held and before
        which commits to those were put off."""
        engine = self._engine
        while True:
            engine.settle_locked()
            raw = self._begin(self._handle, None, True)
            try:
                if engine.deferred_counts[0] and engine.has_deferred(raw):
                    continue
                transaction = WriteTransaction(raw, engine.node)
                result = fn(transaction)
                if transaction.writes:
                    engine.commit(raw, self._name, self._handle, transaction.writes)
                return result
            finally:
                raw.abort()


class EmbeddedEngine:
    """LMDB in the directory `path` (made if missing, 0700).

    `map_size` bounds the file and takes address space only; if the system refuses that much, less
    is taken. `boot` is `path`'s boot by `boot_of`; `journal_bytes` is the length from which a
    journal is replaced by a new base. Raises ReadOnly, NoSpace, Corrupt, Unavailable, NotSupported
    (metadata of another schema, files of another version).
    """

    immediate = True
    reads_immediate = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        map_size: int = _MAP_SIZE,
        readonly: bool = False,
        boot: int | None = None,
        journal_bytes: int = _JOURNAL_BYTES,
        past_damage: bool = False,
    ) -> None:
        self.path = Path(path)
        self.rebuilt: str | None = None
        """The reason why opening it had to rebuild the file from base and journal, or None."""
        self.damage: dict[str, str] = {}
        """Losses of base and journals then, certain or possible, by the kinds of `fsck`."""
        self.node = b""
        """The node that `Transaction.node` names: set by the user of the file as a cluster's
        replica."""
        self._readonly = readonly
        self.lock = threading.Lock()
        """Writers of this process take turns; LMDB makes those of different processes do."""
        self._journal = JournalWriter(self.path)
        self._ended: tuple[bytes, Position] = b"", FIRST
        """The end of this process's last commit, packed and not."""
        self.unseen: tuple[bytes, dict[bytes, bytes | None]] | None = None
        """The last commit (`COMMIT_BYTES`) where they are not made yet, and the last values of all
        that was put off when this process did so last; None once it knows that they are made."""
        self.unsettled_view: tuple[int, ReadTransaction] | None = None
        """The thread that reads over what cannot be committed now, holding `lock`; its view."""
        self._unseen_count = 0
        """The number of commits that were put off then."""
        self._deferred: DeferredCommits | None = None
        self.deferred_counts: Sequence[int] = _NONE
        """Words of which the first is the number of commits put off. Only looked at by others."""
        self._state: StateFile | None = None
        self._syncer: Syncer | None = None
        opener = EngineOpener(self.path, map_size, boot, past_damage=past_damage)
        with contextlib.ExitStack() as opened:
            try:
                self._open(opener, journal_bytes, opened)
            except (OSError, lmdb.Error) as error:
                raise translated(error, self.path) from error
            opened.pop_all()
        self._databases: dict[bytes, Database] = {}
        main = Database(self, b"", self._main)
        self.read_now = main.read_now
        self.transact_now = main.transact_now
        try:
            self.read_now(schema.check)
            if self.deferred_counts[0]:
                self.settle()
        except BaseException:
            self.close()
            raise

    def _open(self, opener: EngineOpener, journal_bytes: int, opened: contextlib.ExitStack) -> None:
        """Opens everything; `opened` closes it again, where something cannot be opened. Raises what
        `EngineOpener` raises."""
        if self._readonly:
            self.environment = opener.open_to_read()
            opened.callback(self.environment.close)
        else:
            self.environment, self._state, self.rebuilt, self.damage = _opened(opener)
            opened.callback(self._state.close)
            opened.callback(self.environment.close)
            self._syncer = Syncer(self.environment, self.path, self._state, journal_bytes)
            opened.callback(self._syncer.close)
            self._deferred = _deferred(self.path, opener.boot)
            self.deferred_counts = self._deferred.counted
        self.boot = opener.boot
        """The running boot, as the filesystem of the store sees it (`boot.boot_of`)."""
        self._main = self.environment.open_db(None)
        self._begin = self.environment.begin
        self._reserve = Reserve(self.path, self.environment)

    def is_local(self, namespace_id: int) -> bool:  # noqa: ARG002 -- a replica's alone
        """Returns False: all is this node's own."""
        return False

    def shard(self, namespace_id: int) -> int:  # noqa: ARG002 -- a replica's alone
        """Returns 0: there are none."""
        return 0

    async def read(self, fn: Callable[[Transaction], T]) -> T:
        """Runs `fn` on a read-only view; never suspends."""
        return self.read_now(fn)

    async def transact(
        self,
        fn: Callable[[Transaction], T],
        *,
        private: int = 0,  # noqa: ARG002 -- a replica's alone
        behind: bool = False,  # noqa: ARG002 -- a replica's alone
    ) -> T:
        """Runs `fn` and commits; never suspends, so it cannot be cancelled halfway."""
        return self.transact_now(fn)

    def try_now(
        self, fn: Callable[[Transaction], object], *, private: int = 0, behind: bool = False
    ) -> Tried:
        """Runs `fn` and commits, at once; what only its maker may see yet (an inode as `private`,
        and not `behind`) like `transact_unseen`."""
        return Tried(True, self.transact_now(fn, private > 0 and not behind))

    def transact_unseen(self, fn: Callable[[Transaction], T]) -> T:
        """Like `transact_now`, for what no other process is to see before this one commits
        something else: it is put off until then, or until another process commits, and costs no
        commit."""
        return self.transact_now(fn, True)

    def first_now(self, *wanted: bytes) -> bytes | None:
        """Returns the value of the first of these keys that exists, at once and in one view; None:
        none does. For the hot paths: it makes no object of a transaction."""
        unseen = self.unseen
        try:
            raw = self._begin(self._main)
            try:
                if unseen is not None:
                    commit, put_off = unseen
                    if commit == raw.get(POSITION_KEY, b"", self._main)[-COMMIT_BYTES:]:
                        for key in wanted:
                            value = put_off[key] if key in put_off else raw.get(key)
                            if value is not None:
                                return value
                        return None
                for key in wanted:
                    value = raw.get(key)
                    if value is not None:
                        return value
                return None
            finally:
                raw.abort()
        except lmdb.Error as error:
            raise translated(error, self.path) from error

    def refresh_now(self) -> None:
        """Does nothing: what is read is the file's own (`engine_copy`)."""

    async def sync(self, namespace_id: int | None = None) -> None:  # noqa: ARG002 -- all is one
        """Makes everything committed before the call survive power loss.

        Cancelled: the sync goes on in its thread, unobserved. Raises Unavailable if the disk
        refuses.
        """
        await trio.to_thread.run_sync(self.sync_now, abandon_on_cancel=True)

    def sync_now(self) -> None:
        """Like `sync`, waiting for the disk in this thread."""
        if self.unseen is not None:
            self.settle()
        if self._syncer is not None:
            self._syncer.sync()

    def rotate_now(self) -> None:
        """Replaces the journal by a new base now, so that a start after a power cut has nothing to
        replay."""
        try:
            if self._syncer is not None:
                self._syncer.rotate()
        except (OSError, lmdb.Error) as error:
            raise translated(error, self.path) from error

    def upgrade_now(self) -> bool:
        """Makes the metadata those of this version (`schema.upgrade`): one commit, after which no
        earlier version opens them. Returns False, and does nothing, while another process may write
        them, which could be of the earlier version. Raises what `transact_now` raises."""
        if self._syncer is None or self.read_now(schema.found) in (0, keys.SCHEMA):
            return True
        with self._syncer.alone() as alone:
            if alone:
                self.transact_now(schema.upgrade)
        return alone

    def generation(self) -> int:
        """Returns a number that grows with each commit to the metadata (other databases do not
        count), by any process: while it stays, everything read stays true. 0.4 us."""
        try:
            raw = self.environment.begin(self._main)
            try:
                return int.from_bytes(raw.get(GENERATION_KEY, b""), "little")
            finally:
                raw.abort()
        except lmdb.Error as error:
            raise translated(error, self.path) from error

    @property
    def restored(self) -> bool:
        """Whether opening it rebuilt it: after a power cut, unsynced commits may be lost."""
        return self.rebuilt is not None

    @property
    def failure(self) -> str | None:
        """The reason why nothing more is promised to survive a power cut (the disk refused a sync),
        or None."""
        return None if self._syncer is None else self._syncer.failure

    @property
    def long_reader(self) -> str | None:
        """The message about a reader for which the file grows (`long_readers`), or None."""
        return None if self._syncer is None else self._syncer.long_reader

    @property
    def reserve_left(self) -> float:
        """The remaining share of the space that was kept for a full disk; 1 while it can be filled
        up. As of the last commit."""
        return self._reserve.left

    def database(self, name: bytes) -> Database:
        """Returns another ordered map in the same file, made if missing. `name` starts with
        0xff."""
        if not name.startswith(b"\xff") or name in (POSITION_KEY, GENERATION_KEY):
            raise Invalid("a database's name starts with 0xff, beyond every key of the metadata")
        if name not in self._databases:
            try:
                with self.lock:
                    handle = self.environment.open_db(name, create=not self._readonly)
            except lmdb.Error as error:
                raise translated(error, self.path) from error
            self._databases[name] = Database(self, name, handle)
        return self._databases[name]

    def find_damage(self) -> str | None:
        """Checks every page's header; returns the damage, or None. Takes some 2 us a page of 4
        KiB."""
        return look_for_damage(self.environment, self.path)

    def find_base_damage(self) -> str | None:
        """Reads the base from which a start after a power cut would rebuild; returns its damage, or
        None."""
        try:
            return find_base_damage(self.path)
        except OSError as error:
            raise translated(error, self.path) from error

    def close(self) -> None:
        """Syncs, and releases the file; idempotent. No transaction may be open."""
        syncer, self._syncer = self._syncer, None
        state, self._state = self._state, None
        try:
            if syncer is not None and state is not None:
                syncer.stop()
                with state.locked():
                    self._close_in_order(syncer, state)
        except (OSError, lmdb.Error) as error:
            raise translated(error, self.path) from error
        finally:
            self.environment.close()
            self._journal.close()
            self._reserve.close()
            if self._deferred is not None:
                self.deferred_counts = _NONE
                self._deferred.close()
            if syncer is not None:
                syncer.close()
            if state is not None:
                state.close()

    def _close_in_order(self, syncer: Syncer, state: StateFile) -> None:
        """Syncs LMDB's file itself, as the last writer, so that no start needs to rebuild it. What
        was put off is committed first: another boot would end it, and leave its data files."""
        if self.deferred_counts[0]:
            with contextlib.suppress(KvfsError):  # then the file does not count as closed in order
                self.settle()
        syncer.sync()
        if state.try_alone():
            self.environment.sync(True)
            state.write(TrustState(self.boot, clean=not self._holds_deferred()))

    def _holds_deferred(self) -> bool:
        with self.environment.begin(self._main) as raw:
            packed = raw.get(POSITION_KEY, b"")
        return self._deferred is not None and self._deferred.holds_after(packed)

    def settle(self) -> None:
        """Commits what was put off. Raises NoSpace, ReadOnly, Corrupt, Unavailable."""
        try:
            with self.lock:
                self.settle_locked()
        except lmdb.Error as error:
            raise translated(error, self.path) from error

    def settle_locked(self) -> None:
        """Like `settle`, for `Database`, whose lock is held. Raises lmdb.Error as well."""
        raw = self._begin(self._main, None, True)
        try:
            writes: Writes = []
            if taken := self.take_deferred(raw, writes):
                self.commit(raw, b"", self._main, writes, taken)
        finally:
            raw.abort()

    def has_deferred(self, raw: "lmdb.Transaction[bytes]") -> bool:
        """Returns whether what is counted as put off is not committed yet; else counts nothing. The
        transaction writes: nobody else changes the count."""
        deferred = self._deferred
        assert deferred is not None
        if deferred.holds_after(raw.get(POSITION_KEY, b"", self._main)):
            return True
        deferred.clear()  # a commit wrote it, or a power cut ended it
        self.unseen = None
        return False

    def take_deferred(self, raw: "lmdb.Transaction[bytes]", writes: Writes) -> int:
        """Writes what is counted as put off and not committed yet, as the first of what a
        transaction writes; returns how many keys and values that is."""
        known, last = self.unseen, raw.get(POSITION_KEY, b"", self._main)[-COMMIT_BYTES:]
        if known and known[0] == last and self._unseen_count == self.deferred_counts[0]:
            put_off = known[1]  # nobody else has put anything off since
        elif self.has_deferred(raw):
            assert self._deferred is not None
            put_off = last_values(self._deferred.all())
        else:
            return 0
        for key, value in put_off.items():
            if value is None:
                raw.delete(key)
            else:
                raw.put(key, value)
            writes += (key, value)
        return len(writes)

    def defer(self, raw: "lmdb.Transaction[bytes]", writes: Writes, taken: int) -> bool:
        """Puts off a commit of what was written after the first so many, which are put off already.
        Returns False where it must be made now: there may be no space later, or others may commit
        without a look at it."""
        packed = raw.get(POSITION_KEY, b"", self._main)
        known, before = self._ended
        if packed != known:
            if not packed:
                return False
            before = unpack_position(packed)
        reserve = self._reserve
        if reserve.left < 1 or before.end >= reserve.until:
            return False
        if raw.get(keys.VERSION) != schema.PRESENT:  # others may commit by earlier programs
            return False
        if before.generation != reserve.generation or self._deferred is None:
            return False
        commit = packed[-COMMIT_BYTES:]
        if not self._deferred.add(commit, writes[taken:]):
            return False
        self.unseen, self._unseen_count = (commit, last_values(writes)), self.deferred_counts[0]
        return True

    def commit(
        self,
        raw: "lmdb.Transaction[bytes]",
        name: bytes,
        handle: Any,
        writes: Writes,
        taken: int = 0,
    ) -> None:
        """Appends a transaction's writes to the journal, notes in it where that ends, and commits
        it. The first so many writes were put off before, and had their place then.

        For `Database`, whose lock is held. Killed in between, the record is overwritten by the
        next; refused, it is taken back.
        """
        packed = raw.get(POSITION_KEY, b"", self._main)
        known, before = self._ended
        if packed != known:  # other processes have committed since
            before = unpack_position(packed)
        reserve = self._reserve
        if before.end >= reserve.until or before.generation != reserve.generation:
            self._keep_reserve(before, handle, writes, taken)
        if taken:
            writes = list(chain.from_iterable(last_values(writes).items()))
        try:
            position = self._journal.append(before, name, writes)
        except OSError as error:
            if not (is_full(error, self.path) and give_up(self.path)):
                raise translated(error, self.path) from error
            position = self._append_again(before, name, writes)
        try:
            packed = POSITION.pack(*position)
            raw.put(POSITION_KEY, packed, db=self._main)
            if not name:
                raw.put(GENERATION_KEY, position.sequence.to_bytes(8, "little"), db=self._main)
            raw.commit()
            self._ended = packed, position
        except BaseException:
            raw.abort()
            self._take_back(before)
            raise
        if taken:  # it is counted until the next transaction: the lock is another's by now
            self.unseen = None
        syncer = self._syncer
        if syncer is not None and (not syncer.is_due or position.end > syncer.limit):
            syncer.committed(position)

    def _take_back(self, before: Position) -> None:
        """Takes back the record of a refused commit from the journal: a power cut must not bring it
        back. Waits for the disk; such refusals are rare."""
        try:
            raw = self.environment.begin(write=True)  # nobody appends meanwhile
            try:
                if unpack_position(raw.get(POSITION_KEY, b"", self._main)) == before:
                    self._journal.take_back(before)
            finally:
                raw.abort()
        except (OSError, lmdb.Error) as error:
            if self._syncer is not None:
                self._syncer.failure = (
                    f"a commit that was refused stays in the journal in {self.path}: {error}"
                )

    def _keep_reserve(self, position: Position, handle: Any, writes: Writes, taken: int) -> None:
        """Fills up the reserve for times without space; if that is impossible, raises NoSpace for a
        commit that may not use it. The first so many writes were put off before."""
        with contextlib.suppress(OSError):
            self._reserve.fill(position, is_replica=bool(self.node))
        if self._reserve.left < 1 and len(writes) > taken:
            put_off = last_values(writes[:taken])
            with self.environment.begin(handle) as raw:
                self._reserve.admit(
                    lambda key: put_off[key] if key in put_off else raw.get(key), writes[taken:]
                )

    def _append_again(self, position: Position, name: bytes, writes: Writes) -> Position:
        try:
            return self._journal.append(position, name, writes)
        except OSError as error:
            raise translated(error, self.path) from error
