"""A transaction of keys that are this node's own (`kvfs.meta.local_keys`): it is left at the first
write of any other, and notes what each key was before. Several requests of a block run in one, so
it has no call for what a look into a set tells."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from kvfs.meta import keys
from kvfs.meta.engine_layer import EngineLayer, space_of
from kvfs.meta.lmdb.lmdb_transactions import WriteTransaction
from kvfs.meta.local_keys import ROOT, is_local_key, is_namespaces_own, local_beginnings
from kvfs.meta.merge_operators import merged


class LocalChange(NamedTuple):
    """A key that was changed here alone."""

    key: bytes
    old: bytes | None
    new: bytes | None


class SharedKey(Exception):
    """The transaction is not local. It leaves the transaction past all handlers of errors."""


class Ending(Exception):
    """A local key was to be written, of a namespace that is closed: its keys become everybody's.
    It leaves the transaction past all handlers of errors; its caller runs it later."""


_change_of: Final = tuple.__new__
"""Makes a named tuple without a call of Python for each key."""


class LocalSpaces:
    """The namespaces whose keys are this node's own."""

    def __init__(self) -> None:
        self.ids: set[bytes] = set()
        """As keys have them."""
        self.numbers: set[int] = set()
        """The same, unpacked."""
        self.beginnings: set[bytes] = set()
        """The beginnings of most of their keys (`local_beginnings`)."""

    def add(self, space: bytes) -> None:
        """Adds the namespace with this id."""
        self.ids.add(space)
        self.numbers.add(keys.unpack_node(space))
        self.beginnings.update(local_beginnings(space))

    def discard(self, space: bytes) -> None:
        """Removes the namespace with this id."""
        self.ids.discard(space)
        self.numbers.discard(keys.unpack_node(space))
        self.beginnings.difference_update(local_beginnings(space))

    def replace(self, numbers: Iterable[int]) -> None:
        """Makes it these namespaces alone."""
        for each in (self.ids, self.numbers, self.beginnings):
            each.clear()
        for number in numbers:
            self.add(keys.pack_u16(number))


class LocalTransaction:
    """A writable transaction that is left, by `SharedKey`, at the first write of a shared key."""

    __slots__ = (
        "_beginnings",
        "_get_now",
        "_ids",
        "_put",
        "_t",
        "_writes",
        "changes",
        "get",
        "is_local_matter",
        "node",
    )

    def __init__(self, t: WriteTransaction, spaces: LocalSpaces) -> None:
        self._t = t
        self._put = t.put_unnoted
        self._writes = t.writes
        self._get_now = t.get
        self._ids = spaces.ids
        self._beginnings = spaces.beginnings
        self.node = t.node
        self.changes: list[LocalChange] = []
        self.is_local_matter = False
        """Whether it read or wrote a local key."""
        self.get: Callable[[bytes], bytes | None] = self._get

    def _get(self, key: bytes) -> bytes | None:
        self._look(key)
        return self._get_now(key)

    def get_many(self, names: Sequence[bytes], /) -> list[bytes | None]:
        for key in () if self.is_local_matter else names:
            self._look(key)
        return self._t.get_many(names)

    def scan(self, start: bytes, end: bytes, /) -> Iterator[tuple[bytes, bytes]]:
        self._look(start)
        return self._t.scan(start, end)

    def scan_keys(self, start: bytes, end: bytes, /) -> Iterator[bytes]:
        self._look(start)
        return self._t.scan_keys(start, end)

    def put(self, key: bytes, value: bytes, /) -> None:
        if key[:3] not in self._beginnings or key[3:9] == ROOT:
            self._check(key)
        self.is_local_matter = True
        self.changes.append(_change_of(LocalChange, (key, self._get_now(key), value)))
        self._put(key, value)
        self._writes += (key, value)

    def put_all(self, pairs: Sequence[tuple[bytes, bytes]], /) -> None:
        get, beginnings, changes = self._get_now, self._beginnings, self.changes
        for key, value in pairs:
            if key[:3] not in beginnings or key[3:9] == ROOT:
                self._check(key)
            changes.append(_change_of(LocalChange, (key, get(key), value)))
        self.is_local_matter = True
        self._t.put_all(pairs)

    def delete(self, key: bytes, /) -> bool:
        there = self._get_now(key)
        if there is None:
            return False  # to remove what is not there is no change, of whomever
        if key[:3] not in self._beginnings or key[3:9] == ROOT:
            self._check(key)
        self.is_local_matter = True
        self.changes.append(_change_of(LocalChange, (key, there, None)))
        return self._t.delete(key)

    def merge(self, key: bytes, operand: bytes, /) -> None:
        old = self.get(key)
        value = merged(key, old, operand)
        if value is None:
            return
        if key[:3] not in self._beginnings or key[3:9] == ROOT:
            self._check(key)
        self.is_local_matter = True
        self.changes.append(_change_of(LocalChange, (key, old, value)))
        self._put(key, value)
        self._writes += (key, value)

    def _check(self, key: bytes) -> None:
        """Raises SharedKey."""
        if not is_local_key(key, self._ids):
            raise SharedKey

    def _look(self, key: bytes) -> None:
        if not self.is_local_matter and is_local_key(key, self._ids):
            self.is_local_matter = True
            self.get = self._get_now  # nobody asks any more


class ClosingTransaction(LocalTransaction):
    """A transaction of local keys while namespaces end having such: it is left, by `Ending`, at the
    first write of a key of one that is closed."""

    __slots__ = ("_layer",)

    def __init__(self, t: WriteTransaction, spaces: LocalSpaces, layer: EngineLayer) -> None:
        super().__init__(t, spaces)
        self._layer = layer

    def put(self, key: bytes, value: bytes, /) -> None:
        self._check_open(key)
        super().put(key, value)

    def put_all(self, pairs: Sequence[tuple[bytes, bytes]], /) -> None:
        for key, _ in pairs:
            self._check_open(key)
        super().put_all(pairs)

    def delete(self, key: bytes, /) -> bool:
        self._check_open(key)
        return super().delete(key)

    def merge(self, key: bytes, operand: bytes, /) -> None:
        self._check_open(key)
        super().merge(key, operand)

    def _check_open(self, key: bytes) -> None:
        """Raises Ending."""
        if not is_local_key(key, self._ids) or is_namespaces_own(key):
            return
        if self._layer.is_closed(space_of(key)):
            raise Ending
