"""The embedded metadata engine: LMDB, memory-mapped, opened by any number of processes of one node
at once.

Invariants
- A commit is in the page cache when `transact` returns, so it survives SIGKILL; it is not on disk
  until a checkpoint.
- `read_now` and `transact_now` never wait for the disk; `transact_now` may wait for another
  process's commit (some 10 microseconds).
- What LMDB or the system refuses leaves this module as a KvfsError that names the file and the
  remedy.

The unnamed database holds the metadata. Other databases (`EmbeddedEngine.database`) have names that
start with 0xff, which no scan of the metadata reaches, and share its commits' safety.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import lmdb
import trio

from kvfs.errors import Invalid, Unavailable
from kvfs.meta.boot import boot_id
from kvfs.meta.checkpoint import (
    Checkpointer,
    CheckpointFile,
    require_consistent,
    restore,
    sync_directory,
)
from kvfs.meta.interface import Transaction
from kvfs.meta.lmdb_errors import translated
from kvfs.meta.lmdb_file import find_damage, read_metas

T = TypeVar("T")
_MAP_SIZE: Final = 1 << 40
_MIN_MAP_SIZE: Final = 1 << 30
_MAX_READERS: Final = 512
_MAX_DATABASES: Final = 8
_CHECKED_PAGES: Final = 16_384
"""Looked at when it is opened: all of a file up to 64 MiB, the upper levels of a larger one, in 40
ms."""
_MANY: Final = 16
"""From this many keys on, one C call for all beats a call for each (0.22 against 0.26 microseconds
a key)."""


class EmbeddedTransaction:
    """LMDB's own bound methods under the names of the contract: a call costs what LMDB costs."""

    __slots__ = ("_raw", "delete", "get", "put")

    def __init__(self, raw: "lmdb.Transaction[bytes]") -> None:
        self._raw = raw
        self.get: Callable[[bytes], bytes | None] = raw.get
        self.put: Callable[[bytes, bytes], object] = raw.put
        self.delete: Callable[[bytes], bool] = raw.delete

    def get_many(self, keys: Sequence[bytes], /) -> list[bytes | None]:
        if len(keys) < _MANY:
            return [self.get(key) for key in keys]
        with self._raw.cursor() as cursor:
            found = dict(cursor.getmulti(keys))
        return [found.get(key) for key in keys]

    def scan(self, start: bytes, end: bytes, /) -> Iterator[tuple[bytes, bytes]]:
        with self._raw.cursor() as cursor:
            if not cursor.set_range(start):
                return
            for pair in cursor:
                if pair[0] >= end:
                    return
                yield pair


class Database:
    """One of the ordered maps in the engine's file."""

    def __init__(self, engine: "EmbeddedEngine", handle: Any) -> None:
        self._begin = engine.environment.begin
        self._checkpointer = engine.checkpointer
        self._path = engine.path
        self._handle = handle

    def read_now(self, fn: Callable[[Transaction], T]) -> T:
        """Run `fn` on a read-only view, at once. Errors raised by `fn` pass through."""
        try:
            raw = self._begin(self._handle)
            try:
                return fn(EmbeddedTransaction(raw))
            finally:
                raw.abort()
        except lmdb.Error as error:
            raise translated(error, self._path) from error

    def transact_now(self, fn: Callable[[Transaction], T]) -> T:
        """Run `fn` and commit, at once; an error raised by `fn` aborts and passes through.

        `fn` must not call the engine. Raises NoSpace, ReadOnly, Corrupt, Unavailable.
        """
        checkpointer = self._checkpointer
        if checkpointer is None:
            return self._commit(fn)
        try:
            checkpointer.hold()
        except (OSError, lmdb.Error) as error:
            raise translated(error, self._path) from error
        committed = False
        try:
            result = self._commit(fn)
            committed = True
            return result
        finally:
            checkpointer.release(committed=committed)

    def _commit(self, fn: Callable[[Transaction], T]) -> T:
        try:
            raw = self._begin(self._handle, None, True)
            try:
                result = fn(EmbeddedTransaction(raw))
            except BaseException:
                raw.abort()
                raise
            raw.commit()
            return result
        except lmdb.Error as error:
            raise translated(error, self._path) from error


class EmbeddedEngine:
    """LMDB in the directory `path` (made if missing, 0700).

    `map_size` bounds the file and takes address space only; where the system refuses that much,
    less is taken. `boot` stands for the running boot's id. Raises ReadOnly, NoSpace, Corrupt,
    Unavailable.
    """

    immediate = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        map_size: int = _MAP_SIZE,
        readonly: bool = False,
        boot: int | None = None,
    ) -> None:
        self.path = Path(path)
        self.fallback: str | None = None
        """Why commits are synced one by one, where checkpoints cannot be had; else None."""
        self.restored = False
        """Whether opening it put the last checkpoint back, after a reboot."""
        self.checkpointer: Checkpointer | None = None
        self._readonly = readonly
        self._map_size = map_size
        boot = boot_id() if boot is None else boot
        try:
            self.environment = self._open_to_read(boot) if readonly else self._open_to_write(boot)
        except (OSError, lmdb.Error) as error:
            raise translated(error, self.path) from error
        self._databases: dict[bytes, Database] = {}
        main = Database(self, None)
        self.read_now = main.read_now
        self.transact_now = main.transact_now

    async def read(self, fn: Callable[[Transaction], T]) -> T:
        """Run `fn` on a read-only view; never suspends."""
        return self.read_now(fn)

    async def transact(self, fn: Callable[[Transaction], T]) -> T:
        """Run `fn` and commit; never suspends, so it cannot be cancelled halfway."""
        return self.transact_now(fn)

    async def sync(self) -> None:
        """Everything committed before the call survives power loss when this returns.

        Cancelled: the sync goes on in its thread, unobserved. Raises Unavailable where the disk
        refuses.
        """
        await trio.to_thread.run_sync(self.sync_now, abandon_on_cancel=True)

    def sync_now(self) -> None:
        """As `sync`, waiting for the disk in this thread."""
        if self.checkpointer is None:
            return
        try:
            self.checkpointer.take()
        except (OSError, lmdb.Error) as error:
            raise translated(error, self.path) from error

    @property
    def failure(self) -> str | None:
        """Why nothing more is promised to survive a power cut (the disk refused a sync), or
        None."""
        return None if self.checkpointer is None else self.checkpointer.failure

    def database(self, name: bytes) -> Database:
        """Another ordered map in the same file, made if missing. `name` starts with 0xff."""
        if not name.startswith(b"\xff"):
            raise Invalid("a database's name starts with 0xff, beyond every key of the metadata")
        if name not in self._databases:
            self._databases[name] = Database(self, self._open_database(name))
        return self._databases[name]

    def find_damage(self) -> str | None:
        """Look at every page's header; what is wrong, or None. Takes some 2 us a page of 4 KiB."""
        fd = os.open(self.path / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)
        try:
            with self.environment.begin() as held:
                metas = [meta for meta in read_metas(fd) if meta.txnid == held.id()]
                return find_damage(fd, metas[0], metas[0].last_page) if metas else None
        finally:
            os.close(fd)

    def close(self) -> None:
        """Take a last checkpoint and release the file; idempotent. No transaction may be open."""
        checkpointer, self.checkpointer = self.checkpointer, None
        try:
            if checkpointer is not None:
                checkpointer.close()
        except (OSError, lmdb.Error) as error:
            raise translated(error, self.path) from error
        finally:
            self.environment.close()

    def _open_to_write(self, boot: int) -> lmdb.Environment:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = CheckpointFile(self.path)
        try:
            with file.locked():
                self.restored = restore(self.path, file, boot)
                environment = self._environment(synced=False)
                if not _known_format(self.path):
                    environment.close()
                    file.close()
                    self.fallback = (
                        "this LMDB's file format is not known here: each commit is synced"
                    )
                    return self._environment(synced=True)
                sync_directory(self.path)
                return self._first_checkpoint(environment, file, boot)
        except BaseException:
            file.close()
            raise

    def _first_checkpoint(
        self, environment: lmdb.Environment, file: CheckpointFile, boot: int
    ) -> lmdb.Environment:
        checkpointer = Checkpointer(environment, file, boot)
        try:
            checkpointer.take_locked(_CHECKED_PAGES)
        except BaseException:
            environment.close()
            raise
        self.checkpointer = checkpointer
        return environment

    def _open_to_read(self, boot: int) -> lmdb.Environment:
        data = self.path / "data.mdb"
        if not data.exists():
            raise Unavailable(
                f"there are no metadata in {self.path}: start the node once to make them"
            )
        require_consistent(self.path, boot)
        return self._environment(synced=False)

    def _environment(self, *, synced: bool) -> lmdb.Environment:
        map_size = self._map_size
        while True:
            try:
                return lmdb.Environment(
                    str(self.path),
                    map_size=map_size,
                    readonly=self._readonly,
                    metasync=synced,
                    sync=synced,
                    mode=0o600,
                    create=not self._readonly,
                    max_readers=_MAX_READERS,
                    max_dbs=_MAX_DATABASES,
                    max_spare_txns=4,
                )
            except lmdb.MemoryError:
                if map_size <= _MIN_MAP_SIZE:
                    raise
                map_size //= 4

    def _open_database(self, name: bytes) -> Any:
        """Making one is a commit, so it takes the pin as a commit does."""
        checkpointer = self.checkpointer
        try:
            if checkpointer is None:
                return self.environment.open_db(name, create=not self._readonly)
            checkpointer.hold()
            try:
                return self.environment.open_db(name)
            finally:
                checkpointer.release(committed=True)
        except (OSError, lmdb.Error) as error:
            raise translated(error, self.path) from error


def _known_format(path: Path) -> bool:
    fd = os.open(path / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return bool(read_metas(fd))
    finally:
        os.close(fd)
