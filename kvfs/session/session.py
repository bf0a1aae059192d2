"""A store as this process has it open: one session for each store, shared by all its clients.

LMDB must not be opened twice in one process, so sessions are found by store and counted. The engine
is opened read-only, and again for writing at the first write: a process that only reads needs no
right to write, and disturbs nobody.

Invariants
- The engine is exchanged only while no transaction of this process is inside.
- LMDB does not survive a fork: the engine is closed before, and the process that uses the session
  next opens it again.

On the store of a node of a cluster the engine is a metadata replica: writes go through the node
(`replica_transactions`).
"""

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from kvfs.base.clock import file_time_ns
from kvfs.base.errors import KvfsError, ReadOnly, Unavailable
from kvfs.datastore import layout, places
from kvfs.datastore.index import NAME as INDEX_NAME
from kvfs.datastore.index import Index
from kvfs.datastore.leases.holder import ReadLeases
from kvfs.datastore.removal_reasons import GoneNames
from kvfs.datastore.tiered_files import TieredFiles
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.replica.replica_mark import read_mark
from kvfs.session.replica_transactions import ReplicaTransactions
from kvfs.tree import namespaces

T = TypeVar("T")
log = logging.getLogger(__name__)
WORKERS: Final = 8
"""Threads that move data at once, for all clients of a store in this process."""


class Author(NamedTuple):
    """The user that makes inodes, and the time."""

    uid: int
    gid: int
    now: int
    """Nanoseconds since the epoch."""
    boot: int
    """The running boot, as the store's disks see it."""


class Session:
    """The parts of one store. Methods may be called from any thread."""

    def __init__(self, store: layout.Store) -> None:
        self.store = store
        self.boot = places.boot_of(store)
        self.files = TieredFiles(store)
        self.gone = GoneNames(store.gone)
        """The reasons why names went, shared with the node and other processes of this store."""
        self.leases = ReadLeases(store.run)
        """The leases of this process on data files."""
        self.clients = 0
        """The number of clients that share it; `acquire` and `release` count."""
        self._engine: EmbeddedEngine | None = None
        self._writable = False
        self._refused: ReadOnly | None = None
        self._lock = threading.Lock()
        self._gate = threading.Condition(self._lock)
        """The condition of the same lock, which is taken by itself if nobody waits: half the
        price."""
        self._inside = 0
        self._exchanging = False
        """Whether nobody may enter, and those who leave say so."""
        self._pool: ThreadPoolExecutor | None = None
        self._replica: ReplicaTransactions | None = None
        self.checks_itself = True
        """Whether `read` checks how new a replica is; else its callers do."""

    def author(self) -> Author:
        """Returns the author of inodes made now."""
        return Author(os.geteuid(), os.getegid(), file_time_ns(), self.boot)

    def read(self, fn: Callable[[Transaction], T]) -> T:
        """Runs `fn` on a read-only view. Raises what `fn` raises, Busy, Unavailable, Corrupt;
        beside a node of a cluster also Unreached (see `ReplicaTransactions.read`)."""
        with self._lock:  # as `_enter`, which for each request would be a call more
            engine = self._engine
            if engine is None or self._exchanging:
                engine = self._entered(write=False)
            self._inside += 1
        try:
            if self._replica is None:
                return engine.read_now(fn)
            if not self.checks_itself:
                return self._replica.read_known(engine, fn)
            return self._replica.read(engine, fn)
        finally:
            with self._lock:
                self._inside -= 1
                if self._exchanging:
                    self._gate.notify_all()

    def read_as_it_is(self, fn: Callable[[Transaction], T]) -> T:
        """Like `read`, of this host's content, however old it is beside a node of a cluster."""
        engine = self._enter(write=False)
        try:
            return engine.read_now(fn)
        finally:
            self._leave()

    def foresee(self, fn: Callable[[Transaction], T]) -> T:
        """Runs `fn`, which looks at what a `write` to come will check again, on a read-only view
        that may be older beside a node of a cluster. Raises as `read`, but for Unreached."""
        engine = self._enter(write=False)
        try:
            if self._replica is None:
                return engine.read_now(fn)
            return self._replica.foresee(engine, fn)
        finally:
            self._leave()

    @property
    def replica(self) -> ReplicaTransactions | None:
        """The metadata replica of a node of a cluster; None: beside a lone node. Raises Busy,
        Unavailable, Corrupt."""
        if self._engine is None:
            self._enter(write=False)
            self._leave()
        return self._replica

    def generation(self) -> int:
        """See `EmbeddedEngine.generation`. Taken before a read, it is never newer than what was
        read. Raises Busy, Unavailable, Corrupt."""
        with self._lock:  # held: it takes less than to leave it and come back
            while self._exchanging:
                self._gate.wait()
            engine = self._engine
            return (self._exchange(False) if engine is None else engine).generation()

    def write(self, fn: Callable[[Transaction], T]) -> T:
        """Runs `fn` and commits: it survives SIGKILL when this returns. Raises what `read` raises,
        and ReadOnly, NoSpace; beside a node of a cluster what `ReplicaTransactions.write`
        raises."""
        with self._lock:
            engine = self._engine
            if engine is None or not self._writable or self._exchanging:
                engine = self._entered(write=True)
            self._inside += 1
        try:
            if self._replica is not None:
                return self._replica.write(engine, fn)
            return engine.transact_now(fn)
        finally:
            with self._lock:
                self._inside -= 1
                if self._exchanging:
                    self._gate.notify_all()

    def read_index(self, fn: Callable[[Index], T]) -> T:
        """Looks into the index of data files. Raises what `read` raises."""
        engine = self._enter(write=False)
        try:
            return fn(Index(engine.database(INDEX_NAME)))
        finally:
            self._leave()

    def use_index(self, fn: Callable[[Index], None]) -> None:
        """Changes the index of data files. Raises what `write` raises."""
        engine = self._enter(write=True)
        try:
            fn(Index(engine.database(INDEX_NAME)))
        finally:
            self._leave()

    def sync(self) -> None:
        """Makes every commit so far, by any process, survive power loss. Raises what `write`
        raises, and Unavailable if the disk refuses."""
        engine = self._enter(write=True)
        try:
            if self._replica is not None:
                self._replica.sync()
            engine.sync_now()
        finally:
            self._leave()

    @property
    def writable(self) -> bool:
        """Whether this process has written already."""
        return self._writable

    @property
    def pool(self) -> ThreadPoolExecutor:
        """Threads for moving data, started when first asked for."""
        with self._gate:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="kvfs")
            return self._pool

    def _enter(self, *, write: bool) -> EmbeddedEngine:
        with self._lock:
            engine = self._entered(write=write)
            self._inside += 1
            return engine

    def _entered(self, *, write: bool) -> EmbeddedEngine:
        """Returns the engine once it may be entered. The gate is held."""
        while self._exchanging:
            self._gate.wait()
        engine = self._engine
        if engine is None or (write and not self._writable):
            engine = self._exchange(write)
        return engine

    def _leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._exchanging:
                self._gate.notify_all()

    def _exchange(self, write: bool) -> EmbeddedEngine:
        """Opens the engine, in place of the one that is open. The gate is held."""
        if self._refused is not None:
            raise ReadOnly(str(self._refused))
        self._exchanging = True
        try:
            while self._inside:
                self._gate.wait()
            if self._engine is not None:
                self._engine.close()
                self._engine = None
            self._engine, self._writable = self._open(write)
            self._adopt(self._engine)
            return self._engine
        finally:
            self._exchanging = False
            self._gate.notify_all()

    def _settle(self) -> None:
        """Waits until nobody is inside; threads that come meanwhile wait behind. The gate is
        held."""
        while self._exchanging:
            self._gate.wait()
        self._exchanging = True
        try:
            while self._inside:
                self._gate.wait()
        finally:
            self._exchanging = False
            self._gate.notify_all()

    def _adopt(self, engine: EmbeddedEngine) -> None:
        """Finds out whether it is a replica, and of which node."""
        mark = engine.read_now(read_mark)
        if mark is None:
            return
        engine.node = keys.pack_node(mark.node)
        if self._replica is None:
            self._replica = ReplicaTransactions(self.store)

    def _open(self, write: bool) -> tuple[EmbeddedEngine, bool]:
        try:
            if write:
                return self._open_writable(), True
            try:
                return EmbeddedEngine(self.store.meta, readonly=True), False
            except Unavailable:
                # After a power cut it must be rebuilt before anybody reads: only a writer can.
                return self._open_writable(), True
        except ReadOnly as refused:
            if not write:
                raise
            # Reading goes on as before; the next write is refused without another attempt.
            self._refused = refused
            self._engine, self._writable = EmbeddedEngine(self.store.meta, readonly=True), False
            raise

    def _open_writable(self) -> EmbeddedEngine:
        if not (self.store.meta / "state").exists():
            raise Unavailable(
                f"the store {self.store.root} was never started: run `kvfs up --store "
                f"{self.store.root}` once"
            )
        engine = EmbeddedEngine(self.store.meta)
        try:
            engine.read_now(namespaces.check_format)
        except BaseException:
            engine.close()
            raise
        return engine

    def close(self) -> None:
        """Syncs what was written and lets go of the store."""
        with self._gate:
            self._settle()
            engine, self._engine = self._engine, None
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
        self.files.close()
        self.gone.close()
        self.leases.close()
        if self._replica is not None:
            self._replica.close()
        if engine is not None:
            engine.close()

    def before_fork(self) -> None:
        """Closes the engine; nobody enters until `after_fork`."""
        self._gate.acquire()
        self._settle()
        engine, self._engine, self._writable = self._engine, None, False
        if engine is None:
            return
        try:
            engine.close()
        except KvfsError as error:
            log.error("closing the store %s before a fork: %s", self.store.root, error)

    def after_fork(self, *, child: bool) -> None:
        """Admits others again; the parent's threads are not in the child."""
        if child:
            self._pool = None
            self.files.after_fork()
            self.leases.begin_anew()
        self._gate.release()


_sessions: dict[Path, Session] = {}
_lock = threading.Lock()


def acquire(root: Path) -> Session:
    """Returns the session of the store in `root`; `release` gives it back.

    Raises NotFound (no store there), Invalid, Corrupt.
    """
    where = Path(os.path.realpath(root))
    with _lock:
        session = _sessions.get(where)
        if session is None:
            session = _sessions[where] = Session(layout.open_store(where))
        session.clients += 1
        return session


def release(session: Session) -> None:
    """Counts one client fewer; the last one closes the session."""
    with _lock:
        session.clients -= 1
        if session.clients == 0:
            del _sessions[session.store.root]
            session.close()


def _before_fork() -> None:
    _lock.acquire()
    for session in _sessions.values():
        session.before_fork()


def _after_fork(*, child: bool) -> None:
    for session in _sessions.values():
        session.after_fork(child=child)
    _lock.release()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=partial(_after_fork, child=False),
    after_in_child=partial(_after_fork, child=True),
)
