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

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import msgspec

from kvfs.base.errors import KvfsError
from kvfs.meta.records import namespace_of

T = TypeVar("T")
MOVED: Final = -1
"""As `private` of a transaction: the file to which it gives another name, whichever that is, of a
namespace that is not local."""


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

    def put_all(self, pairs: Sequence[tuple[bytes, bytes]], /) -> None:
        """Does `put` for each of these, in one call."""

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

    def is_local(self, namespace_id: int, /) -> bool:
        """Returns whether the names and files of a namespace are this node's own, beside others
        that are not: then no transaction changes both. Never on a lone node."""

    def shard(self, namespace_id: int) -> int:
        """Returns the shard of a namespace's names and files: one transaction changes those of one,
        unless it changes a namespace itself. 0 on a lone node, and for all that have none of their
        own."""

    async def read(self, fn: Callable[[Transaction], T]) -> T:
        """Runs `fn` on a read-only view. Errors raised by `fn` pass through."""

    async def transact(
        self, fn: Callable[[Transaction], T], *, private: int = 0, behind: bool = False
    ) -> T:
        """Runs `fn`, commits, and returns its result; an error raised by `fn` aborts and passes
        through.

        `private` names an inode that `fn` makes or changes, of which other nodes need not know
        before another transaction touches it, and with `behind` soon: an engine that has other
        nodes may then be faster, and no more than that. MOVED names the file that `fn` moves, of
        whose new name they need not know before that either, but soon if they know the file.

        Cancelled: either nothing or everything was committed. Raises Unavailable, NoSpace,
        ReadOnly, Corrupt.
        """

    async def sync(self, namespace_id: int | None = None) -> None:
        """Makes everything committed before the call survive power loss; with a namespace, that of
        it and of those in its shard."""

    def close(self) -> None:
        """Releases files and locks; idempotent."""


class Tried(msgspec.Struct, frozen=True):
    """The outcome of a transaction that may be committed on this node alone. (A named tuple would
    cost a Python call each.)"""

    is_done: bool
    result: Any = None


NOT_DONE: Final = Tried(False)


class NearEngine(Protocol):
    """An engine that commits at once what no other host has to know before it is committed."""

    def try_now(
        self, fn: Callable[[Transaction], object], *, private: int = 0, behind: bool = False
    ) -> Tried:
        """Does what `Engine.transact` does, if that waits for nothing; not done, and without
        effect, where other nodes, or the server, have to be asked. Raises what `transact`
        raises."""


Item = TypeVar("Item")


def apart(
    engine: Engine, items: Iterable[Item], inode_of: Callable[[Item], int]
) -> list[list[Item]]:
    """Returns the items in lists of which each can be changed by one transaction: local ones first,
    which need no other node, then those of each shard."""
    found: dict[tuple[bool, int], list[Item]] = {}
    for each in items:
        space = namespace_of(inode_of(each))
        found.setdefault((not engine.is_local(space), engine.shard(space)), []).append(each)
    return [found[place] for place in sorted(found)]


async def transact_each(
    engine: Engine,
    items: Iterable[Item],
    inode_of: Callable[[Item], int],
    fn: Callable[[Transaction, list[Item]], list[T]],
) -> list[T]:
    """Runs `fn` on all items, in one transaction for those that are local and one for those of each
    shard; returns its results in that order. Raises what `Engine.transact` raises, when it has
    tried the others: they may be changed then."""
    results: list[T] = []
    failure: KvfsError | None = None
    for part in apart(engine, items, inode_of):
        try:
            results += await engine.transact(partial(_on, fn, part))
        except KvfsError as error:  # one shard's server may be away, and not another's
            failure = failure or error
    if failure is not None:
        raise failure
    return results


def itself(ino: int) -> int:
    """Returns the inode of an item that is one (`transact_each`)."""
    return ino


def _on(fn: Callable[[Transaction, list[Item]], T], part: list[Item], t: Transaction) -> T:
    return fn(t, part)
