"""The cache of what a process has read of a store: buckets, objects, the holders of keys.

Each value is kept with the reads that found it. While no process has committed to the metadata, it
is as it was (`EmbeddedEngine.generation`); after a commit its reads are made again and compared,
which takes a fraction of decoding them. So nothing stale is told, and a caller that was given the
same object twice knows that nothing about it has changed.

A request asks for the generation once, when it comes, and everything that it gets is as of that or
newer. Its reads are made in one transaction (`StoreCache.look`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

from kvfs.meta.engine import Transaction
from kvfs.session.session import Session

V = TypeVar("V")
Pair = tuple[bytes, bytes]
Name = bytes | tuple[bytes, bytes] | tuple[str, str]
"""The name of a bucket; of an object: bucket and key; of a key's holder: access key and session
token."""
NOW: Final = 1 << 64
"""A generation that never comes: the validity of a value is checked anew."""
_LIMIT: Final = 8192


class _Scan:
    """A scan, as far as it was followed."""

    __slots__ = ("end", "ended", "pairs", "start")

    def __init__(self, start: bytes, end: bytes) -> None:
        self.start = start
        self.end = end
        self.pairs: list[Pair] = []
        self.ended = False

    def follow(self, t: Transaction) -> Iterator[Pair]:
        for pair in t.scan(self.start, self.end):
            self.pairs.append(pair)
            yield pair
        self.ended = True

    def is_same(self, t: Transaction) -> bool:
        if self.ended:
            return list(t.scan(self.start, self.end)) == self.pairs
        found = t.scan(self.start, self.end)
        return not any(next(found, None) != pair for pair in self.pairs)


class _Noting:
    """A transaction that notes its reads."""

    __slots__ = ("_t", "keys", "node", "scans", "values")

    def __init__(self, t: Transaction) -> None:
        self._t = t
        self.node = t.node
        self.keys: list[bytes] = []
        self.values: list[bytes | None] = []
        self.scans: list[_Scan] = []

    def get(self, key: bytes, /) -> bytes | None:
        value = self._t.get(key)
        self.keys.append(key)
        self.values.append(value)
        return value

    def get_many(self, keys: Sequence[bytes], /) -> list[bytes | None]:
        return [self.get(key) for key in keys]

    def scan(self, start: bytes, end: bytes, /) -> Iterator[Pair]:
        scan = _Scan(start, end)
        self.scans.append(scan)
        return scan.follow(self._t)

    def scan_keys(self, start: bytes, end: bytes, /) -> Iterator[bytes]:
        return (key for key, _ in self.scan(start, end))

    def put(self, _key: bytes, _value: bytes, /) -> object:
        raise AssertionError("what is remembered is only read")

    def put_all(self, _pairs: Sequence[tuple[bytes, bytes]], /) -> None:
        raise AssertionError("what is remembered is only read")

    def delete(self, _key: bytes, /) -> bool:
        raise AssertionError("what is remembered is only read")

    def merge(self, _key: bytes, _operand: bytes, /) -> None:
        raise AssertionError("what is remembered is only read")


class Entry:
    """A value, and when it was last known to be right."""

    __slots__ = ("_keys", "_scans", "_values", "generation", "shown", "value")

    def __init__(self, generation: int, reads: _Noting, value: Any) -> None:
        self.generation = generation
        self._keys = reads.keys
        self._values = reads.values
        self._scans = reads.scans
        self.value = value
        self.shown: Any = None
        """A result derived from the value, kept while it is the same."""

    def is_same(self, t: Transaction) -> bool:
        """Returns whether all of it would be read again."""
        if list(map(t.get, self._keys)) != self._values:
            return False
        for scan in self._scans:  # noqa: SIM110 -- a generator costs a call for each
            if not scan.is_same(t):
                return False
        return True


Wanted = tuple[Name, Callable[[Transaction], Any]]
"""A value that a request will ask for, and the function that reads it."""


class StoreCache:
    """The cache of one store's process; any thread. At most `limit` values; one for which `keeps`
    says no is read anew each time."""

    def __init__(
        self,
        session: Session,
        limit: int = _LIMIT,
        keeps: Callable[[Any], bool] = lambda _: True,
    ) -> None:
        self._session = session
        self._limit = limit
        self._keeps = keeps
        self._entries: dict[Name, Entry] = {}
        self.entry = self._entries.get
        """Returns the entry of a name, however old; None: there is none."""
        self.generation = session.generation
        """Returns the present generation. Raises what `Session.generation` raises."""

    def get(self, name: Name, read: Callable[[Transaction], V], generation: int = NOW) -> V:
        """Returns the result of `read` as of this generation or newer; the same object while that
        is the same. Raises what it raises, and what `Session.read` raises."""
        asked = self._session.generation() if generation == NOW else generation
        entry = self._entries.get(name)
        if entry is not None and entry.generation >= asked:
            value: V = entry.value
            return value
        return self._session.read(lambda t: self._read(t, name, read, asked))

    def look(self, generation: int, wanted: Sequence[Wanted]) -> None:
        """Reads in one transaction those of these values that are missing as of this generation. A
        value that cannot be read is left to the caller that asks for it. Raises what `Session.read`
        raises."""
        stale = [
            each
            for each in wanted
            if (entry := self._entries.get(each[0])) is None or entry.generation < generation
        ]
        if not stale:
            return

        def read(t: Transaction) -> None:
            for name, how in stale:
                try:
                    self._read(t, name, how, generation)
                except Exception:  # noqa: S112 -- it is raised where the value is asked for
                    continue

        self._session.read(read)

    def _read(
        self, t: Transaction, name: Name, read: Callable[[Transaction], V], generation: int
    ) -> V:
        entry = self._entries.get(name)
        value: V
        if entry is not None and entry.is_same(t):
            entry.generation = max(generation, entry.generation)
            value = entry.value
            return value
        noting = _Noting(t)
        value = read(noting)
        if self._keeps(value):
            if len(self._entries) >= self._limit:
                self._entries.clear()
            self._entries[name] = Entry(generation, noting, value)
        return value

    def replace(self, name: Name, value: V, better: V) -> None:
        """Keeps `better` in place of `value`, if that is kept; it follows from the same reads."""
        entry = self._entries.get(name)
        if entry is not None and entry.value is value:
            entry.value = better
            entry.shown = None
