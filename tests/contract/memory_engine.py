"""The executable model of an engine: one sorted dictionary in memory, with optimistic commits.

A transaction reads a snapshot and gathers its writes beside it. The commit is refused, and the
function run again, when anything else was committed since the snapshot was taken. The asynchronous
methods yield between the function's run and its commit, so that concurrent tasks really do collide,
as they do on a distributed engine.
"""

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

import trio

from kvfs.base.errors import Conflict
from kvfs.meta.engine import Transaction
from kvfs.meta.gathered_writes import GatheredWrites

T = TypeVar("T")
_ATTEMPTS: Final = 1_000


class MemorySnapshot:
    """All commits up to one moment; never changed once made."""

    def __init__(self, values: dict[bytes, bytes]) -> None:
        self.values = values
        self.order = sorted(values)


class MemoryTransaction(GatheredWrites):
    """A snapshot with the transaction's own writes over it (None: deleted)."""

    def __init__(self, snapshot: MemorySnapshot, *, writable: bool) -> None:
        self._snapshot = snapshot
        super().__init__(writable=writable)

    def get(self, key: bytes, /) -> bytes | None:
        if key in self.writes:
            return self.writes[key]
        return self._snapshot.values.get(key)

    def get_many(self, keys: Sequence[bytes], /) -> list[bytes | None]:
        return [self.get(key) for key in keys]

    def scan(self, start: bytes, end: bytes, /) -> Iterator[tuple[bytes, bytes]]:
        order = self._snapshot.order
        committed = order[bisect_left(order, start) : bisect_left(order, end)]
        written = [key for key in self.writes if start <= key < end]
        for key in sorted({*committed, *written}):
            value = self.get(key)
            if value is not None:
                yield key, value

    def scan_keys(self, start: bytes, end: bytes, /) -> Iterator[bytes]:
        return (key for key, _ in self.scan(start, end))


class MemoryEngine:
    """An engine that forgets everything when it is dropped; for tests, and as the definition of the
    contract."""

    immediate = False
    reads_immediate = False

    def __init__(self) -> None:
        self._current = MemorySnapshot({})
        self._lock = threading.Lock()

    def shard(self, namespace_id: int) -> int:  # noqa: ARG002
        return 0

    def is_local(self, namespace_id: int) -> bool:  # noqa: ARG002
        return False

    def read_now(self, fn: Callable[[Transaction], T]) -> T:
        """As `read`, at once."""
        return fn(MemoryTransaction(self._current, writable=False))

    def transact_now(self, fn: Callable[[Transaction], T]) -> T:
        """As `transact`, at once."""
        for _ in range(_ATTEMPTS):
            base, transaction, result = self._attempt(fn)
            if self._commit(base, transaction.writes):
                return result
        raise Conflict(f"others committed first, {_ATTEMPTS} times in a row")

    async def read(self, fn: Callable[[Transaction], T]) -> T:
        """Run `fn` on the present snapshot. Cancelled: nothing happened."""
        await trio.lowlevel.checkpoint()
        return self.read_now(fn)

    async def transact(
        self,
        fn: Callable[[Transaction], T],
        *,
        private: int = 0,  # noqa: ARG002 -- a mirror's alone
        behind: bool = False,  # noqa: ARG002 -- a mirror's alone
    ) -> T:
        """Run `fn` and commit. Cancelled: nothing was committed."""
        for _ in range(_ATTEMPTS):
            base, transaction, result = self._attempt(fn)
            await trio.lowlevel.checkpoint()
            if self._commit(base, transaction.writes):
                return result
        raise Conflict(f"others committed first, {_ATTEMPTS} times in a row")

    def refresh_now(self) -> None:
        pass

    async def sync(self, namespace_id: int | None = None) -> None:  # noqa: ARG002
        """Nothing survives anything here; returns after a checkpoint."""
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """Nothing to release."""

    def _attempt(
        self, fn: Callable[[Transaction], T]
    ) -> tuple[MemorySnapshot, MemoryTransaction, T]:
        base = self._current
        transaction = MemoryTransaction(base, writable=True)
        return base, transaction, fn(transaction)

    def _commit(self, base: MemorySnapshot, writes: dict[bytes, bytes | None]) -> bool:
        if not writes:
            return True
        with self._lock:
            if self._current is not base:
                return False
            values = dict(base.values)
            for key, value in writes.items():
                if value is None:
                    values.pop(key, None)
                else:
                    values[key] = value
            self._current = MemorySnapshot(values)
            return True
