"""Results of reads of the engine, remembered as long as they would be read again.

With each thing stands what was read to find it. While no commit to the metadata was made, by
whichever process, it is as it was (`EmbeddedEngine.generation`); after one its reads are made again
and compared, which takes a fraction of decoding them. So nothing stale is told, and a caller that
was given the same object twice knows that nothing about it has changed.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from kvfs.meta.engine import Transaction
from kvfs.session.session import Session

K = TypeVar("K")
V = TypeVar("V")
Pair = tuple[bytes, bytes]


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
        found = t.scan(self.start, self.end)
        if any(next(found, None) != pair for pair in self.pairs):
            return False
        return not self.ended or next(found, None) is None


class _Reads:
    """The reads of one transaction."""

    __slots__ = ("gets", "scans")

    def __init__(self) -> None:
        self.gets: list[tuple[bytes, bytes | None]] = []
        self.scans: list[_Scan] = []

    def are_same(self, t: Transaction) -> bool:
        """Whether all of it would be read again."""
        get = t.get
        for key, value in self.gets:
            if get(key) != value:
                return False
        return all(scan.is_same(t) for scan in self.scans)


class _Noting:
    """A transaction that notes what it reads."""

    __slots__ = ("_reads", "_t")

    def __init__(self, t: Transaction, reads: _Reads) -> None:
        self._t = t
        self._reads = reads

    def get(self, key: bytes, /) -> bytes | None:
        value = self._t.get(key)
        self._reads.gets.append((key, value))
        return value

    def get_many(self, keys: Sequence[bytes], /) -> list[bytes | None]:
        return [self.get(key) for key in keys]

    def scan(self, start: bytes, end: bytes, /) -> Iterator[Pair]:
        scan = _Scan(start, end)
        self._reads.scans.append(scan)
        return scan.follow(self._t)

    def scan_keys(self, start: bytes, end: bytes, /) -> Iterator[bytes]:
        return (key for key, _ in self.scan(start, end))

    def put(self, _key: bytes, _value: bytes, /) -> object:
        raise AssertionError("what is remembered is only read")

    def delete(self, _key: bytes, /) -> bool:
        raise AssertionError("what is remembered is only read")

    def merge(self, _key: bytes, _operand: bytes, /) -> None:
        raise AssertionError("what is remembered is only read")

    @property
    def node(self) -> bytes:
        return self._t.node


class _Seen(Generic[V]):
    __slots__ = ("generation", "reads", "value")

    def __init__(self, generation: int, reads: _Reads, value: V) -> None:
        self.generation = generation
        self.reads = reads
        self.value = value


class Remembering(Generic[K, V]):
    """A cache of at most `limit` things, by key; any thread. One for which `keeps` says no is read
    anew each time."""

    def __init__(
        self, session: Session, limit: int, keeps: Callable[[V], bool] = lambda _: True
    ) -> None:
        self._session = session
        self._limit = limit
        self._keeps = keeps
        self._seen: dict[K, _Seen[V]] = {}

    def get(self, key: K, read: Callable[[Transaction], V]) -> V:
        """The present result of `read`; the same object while that is the same. Raises what it
        raises, and as `Session.read`."""
        generation = self._session.generation()
        seen = self._seen.get(key)
        if seen is not None:
            if seen.generation == generation:
                return seen.value
            if self._session.read(seen.reads.are_same):
                seen.generation = generation
                return seen.value
        reads = _Reads()
        value = self._session.read(lambda t: read(_Noting(t, reads)))
        if self._keeps(value):
            if len(self._seen) >= self._limit:
                self._seen.clear()
            self._seen[key] = _Seen(generation, reads, value)
        return value

    def replace(self, key: K, value: V, better: V) -> None:
        """Remembers `better` in place of `value`, if that is remembered; it follows from the same
        reads."""
        seen = self._seen.get(key)
        if seen is not None and seen.value is value:
            seen.value = better
