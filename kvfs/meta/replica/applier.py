"""Writes the log's entries into the metadata replica.

Invariants
- Entries are applied whole, in their order, each once; with them, in the same commit, goes the mark
  that says how far the replica has come.
- Entries applied to a replica that is not whole may be of keys that were not read yet.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.records import Namespace
from kvfs.meta.redis.log import LogEntry
from kvfs.meta.replica.local_writes import Privates
from kvfs.meta.replica.replica_mark import ReplicaMark, write_mark

_NAMESPACE = keys.NAMESPACE[0]
_END = b"\xff"
"""Beyond every key of the metadata."""


class Applied(NamedTuple):
    """A key that another process changed."""

    key: bytes
    old: bytes | None
    new: bytes | None


class Applier:
    """The applier of one replica. `is_ours`: whether a token is that of a commit which this node is
    making just now, so that it need not be told."""

    def __init__(
        self,
        local: EmbeddedEngine,
        mark: ReplicaMark,
        is_ours: Callable[[bytes], bool],
        on_applied: Callable[[Sequence[Applied]], None],
        privates: Privates,
        on_filled: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_applied` is told what others changed; `on_filled`, that more may have changed than it
        was told."""
        self._on_filled = on_filled
        self._local = local
        self._privates = privates
        self._is_ours = is_ours
        self._on_applied = on_applied
        self.mark = mark
        self.refusal: str | None = None
        """The reason why the local file did not take the log's entries, the last time."""
        self.namespaces: dict[int, Namespace | None] = {}
        """Decoded records of the replica, until one of them changes."""

    def follows(self, entries: Sequence[LogEntry]) -> bool:
        """Returns whether entries, of which some may be applied already, continue the applied
        ones."""
        new = [each for each in entries if each.number > self.mark.position]
        return not new or (
            new[0].number == self.mark.position + 1 and new[0].before == self.mark.token
        )

    def apply(self, entries: Sequence[LogEntry]) -> bool:
        """Applies the new entries, which must follow; returns whether there were any. Raises
        NoSpace, Unavailable, Corrupt of the local file."""
        new = [each for each in entries if each.number > self.mark.position]
        if not new:
            return False
        last = new[-1]
        mark = msgspec.structs.replace(self.mark, position=last.number, token=last.token)
        told: list[Applied] = []

        def fn(t: Transaction) -> None:
            for entry in new:
                listen = None if self._is_ours(entry.token) else told
                for writes in entry.writes:
                    was_private = self._privates.settle(t, writes)
                    self._write(t, writes, listen, is_there=was_private)
            write_mark(t, mark)

        self._commit(fn, mark)
        if told:
            self._on_applied(told)
        return True

    def begin(self, position: int, token: bytes) -> None:
        """Begins to read the replica anew, as of this entry or later."""
        mark = msgspec.structs.replace(self.mark, position=position, token=token, filled=b"")
        self._commit(lambda t: write_mark(t, mark), mark)

    def fill(self, names: Sequence[bytes], values: Sequence[bytes], *, is_last: bool) -> None:
        """Fills in all pairs from where it is filled up to the last of these, or to the end."""
        start = self.mark.filled
        assert start is not None, "it has begun"
        end = _END if is_last else names[-1] + b"\0"
        mark = msgspec.structs.replace(self.mark, filled=end)

        def fn(t: Transaction) -> None:
            there = dict(zip(names, values, strict=True))
            for key in [key for key, _ in t.scan(start, end) if key not in there]:
                if not self._privates.is_new(key):
                    self._privates.put(t, key, None)
            self.namespaces.clear()
            for key, value in there.items():
                if key < _END and (t.get(key) != value or key in self._privates.owners):
                    self._privates.settle(t, (key, value))
                    self._privates.put(t, key, value)
            write_mark(t, mark)

        self._commit(fn, mark)

    def finish(self) -> None:
        """Marks it as whole."""
        mark = msgspec.structs.replace(self.mark, filled=None)
        self._commit(lambda t: write_mark(t, mark), mark)
        self._on_filled()

    def _commit(self, fn: Callable[[Transaction], None], mark: ReplicaMark) -> None:
        try:
            self._local.transact_now(fn)
        except BaseException as error:
            self._privates.load()
            self.refusal = str(error)
            raise
        self.refusal = None
        self.mark = mark

    def _write(
        self,
        t: Transaction,
        writes: Sequence[bytes | None],
        told: list[Applied] | None,
        *,
        is_there: bool,
    ) -> None:
        """Writes pairs. `is_there`: most of them are as they are here already, and a look costs
        less than a write."""
        pairs = iter(writes)
        for key, value in zip(pairs, pairs, strict=True):
            assert key is not None, "a key"
            if key[0] == _NAMESPACE:
                self.namespaces.clear()
            if told is not None:
                old = t.get(key)
                if old != value:
                    told.append(Applied(key, old, value))
            if not is_there or t.get(key) != value or key in self._privates.shadows:
                self._privates.put(t, key, value)
