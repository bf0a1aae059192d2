"""The contract of a metadata engine: ordered keys, and transactions.

Semantics (lookup, rename, publish ...) are written once, in `kvfs.tree`, as plain functions of
a `Transaction`. An engine runs such a function against one consistent view and commits what it
wrote, all or nothing.

Invariants
- The function may be run more than once (optimistic retry), so it must do nothing but read and
  write through its argument.
- Keys are at most 511 bytes; order is that of the bytes.
- A transaction sees its own writes.
- A commit survives SIGKILL of every process once `transact` has returned, and power loss once a
  later `sync` has.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Transaction(Protocol):
    """One consistent view; writable when it came from `Engine.transact`."""

    @property
    def node(self) -> bytes:
        """The number of the node whose engine this is (2 bytes), in a cluster; empty on a lone
        node, whose records name no node."""

    def get(self, key: bytes, /) -> bytes | None:
        """Returns the value, or None."""

    def get_many(self, keys: Sequence[bytes], /) -> list[bytes | None]:
        """Returns the values in the order of `keys`, None where there is none. One round trip on a
        distributed engine."""

    def scan(self, start: bytes, end: bytes, /) -> Iterator[tuple[bytes, bytes]]:
        """Yields pairs with start <= key < end in ascending order. Lazy: stop reading when you have
        enough.

        The keys scanned must not be written before the iterator is exhausted or dropped.
        """

    def scan_keys(self, start: bytes, end: bytes, /) -> Iterator[bytes]:
        """Yields the keys that `scan` would give, for callers that do not want the values, which
        may be large."""

    def put(self, key: bytes, value: bytes, /) -> object:
        """Inserts or replaces."""

    def delete(self, key: bytes, /) -> bool:
        """Removes a key, and returns whether it was there."""

    def merge(self, key: bytes, operand: bytes, /) -> None:
        """Changes the value by a rule of the key's class (`merge_operators.merged`). Merges into
        one key never conflict with each other; so the value read of such a key may have changed
        when the transaction is committed."""


class Engine(Protocol):
    """A store of metadata."""

    @property
    def immediate(self) -> bool:
        """Whether `read` and `transact` finish without ever suspending (an embedded engine):
        callers may then drive the coroutine to its end in one step, outside any task."""

    @property
    def reads_immediate(self) -> bool:
        """Whether `read` never suspends, and `transact` goes aside before it does
        (`kvfs.base.detach`)."""

    async def read(self, fn: Callable[[Transaction], T]) -> T:
        """Runs `fn` on a read-only view. Errors raised by `fn` pass through."""

    async def transact(
        self, fn: Callable[[Transaction], T], *, private: int = 0, behind: bool = False
    ) -> T:
        """Runs `fn`, commits, and returns its result; an error raised by `fn` aborts and passes
        through.

        `private` names an inode that `fn` makes or changes, of which other nodes need not know
        before another transaction touches it, and with `behind` soon: an engine that has other
        nodes may then be faster, and no more than that.

        Cancelled: either nothing or everything was committed. Raises Unavailable, NoSpace,
        ReadOnly, Corrupt.
        """

    async def sync(self) -> None:
        """Makes everything committed before the call survive power loss."""

    def close(self) -> None:
        """Releases files and locks; idempotent."""
