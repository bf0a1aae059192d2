"""Copies metadata from one engine to another, whole or one namespace.

Invariants
- The copied metadata existed at one moment: the source is read twice, and refused if the two
  differ.
- The target is compared with it key by key, through a digest, before it counts as a copy.
- What is one node's own of namespaces with `--coherence peer` is not copied: for a server it would
  be everybody's. Nor is in which shards namespaces are: a copy lies together.
- Nor is which node alone changes names: it would keep the rest of a copy from being written.
- Until then a mark (`keys.copying`) says that it is none, and the record without which nobody opens
  it (the schema version, or the namespace) is missing. A copy that was cut short is begun anew.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeVar

import xxhash

from kvfs.base.errors import Conflict, Corrupt, Exists, NotSupported
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.local_keys import everybodys, peer_spaces

T = TypeVar("T")
Pair = tuple[bytes, bytes]
Range = tuple[bytes, bytes]
Progress = Callable[[int], None]
"""Told the bytes of keys and values that are done."""
_PAGE_KEYS: Final = 2_000
_PAGE_BYTES: Final = 1 << 20


_OF_SHARDS: Final = tuple((kind, keys.after(kind)) for kind in (keys.INTENTION, keys.PLACE))


class Blocking(Protocol):
    """An engine's blocking face."""

    def read_now(self, fn: Callable[[Transaction], T]) -> T: ...
    def transact_now(self, fn: Callable[[Transaction], T]) -> T: ...
    def refresh_now(self) -> None: ...


class EnginePart(NamedTuple):
    """The keys that are copied."""

    mark: bytes
    """The key that marks the target as unfinished."""
    ranges: Sequence[Range]
    apart: frozenset[bytes]
    """Keys in the ranges that `begin` and `finish` handle."""


class CopyResult(NamedTuple):
    """The result of a copy; `finish` has still to be called."""

    keys: int
    bytes: int
    digest: str


def whole(besides: Iterable[Range] = ()) -> EnginePart:
    """Returns the part that is everything, but for these ranges."""
    apart = frozenset({keys.VERSION, keys.copying(0)})
    return EnginePart(keys.copying(0), list(_between((*_OF_SHARDS, *besides))), apart)


def of_shard(namespace_id: int, nodes: Iterable[int]) -> EnginePart:
    """Returns what a namespace has in a shard of its own, in a cluster of these nodes."""
    space = keys.pack_u16(namespace_id)
    prefixes = [kind + space for kind in keys.OF_NAMESPACES if kind[0] not in keys.OF_REGISTRY]
    prefixes += [keys.HELD + keys.pack_node(node) + space for node in nodes]
    ranges = [(prefix, keys.after(prefix)) for prefix in prefixes]
    return EnginePart(keys.copying(namespace_id), ranges, frozenset())


def of_namespace(namespace_id: int) -> EnginePart:
    """Returns all records of one namespace."""
    prefixes = [kind + namespace_id.to_bytes(2) for kind in keys.OF_NAMESPACES]
    ranges = [(prefix, keys.after(prefix)) for prefix in prefixes]
    return EnginePart(keys.copying(namespace_id), ranges, frozenset({keys.namespace(namespace_id)}))


def refuse_unfinished(t: Transaction, besides: bytes | None = None) -> None:
    """Raises Conflict if a copy was cut short, unless its mark is `besides`."""
    for mark, _ in t.scan(*keys.COPYING):
        if mark != besides:
            what = "of all metadata" if mark == keys.copying(0) else "of one namespace"
            raise Conflict(f"an unfinished copy {what} lies there: finish it with the same command")


def refuse_used(t: Transaction, part: EnginePart) -> None:
    """Raises Exists if the target holds any of the keys to be copied, and is no unfinished copy."""
    if t.get(part.mark) is None and any(True for each in part.ranges for _ in t.scan(*each)):
        raise Exists("there are metadata already: --replace removes them first")


def copy(source: Blocking, target: Blocking, part: EnginePart, progress: Progress) -> CopyResult:
    """Makes the target's part equal to the source's. It must bear the mark.

    Raises Conflict if the source changes meanwhile, Corrupt if the target differs at the end, and
    what engines raise; it must be begun anew then.
    """
    if target.read_now(lambda t: t.get(part.mark)) is None:
        raise NotSupported("a copy begins with its mark")
    for page in _pages(target, part):
        target.transact_now(partial(_delete, page))
    before = _Digest()
    spaces = source.read_now(peer_spaces)
    for page in _pages(source, part, spaces):
        target.transact_now(partial(_put, page))
        before.add(page)
        progress(before.bytes)
    for each in (source, target):
        each.refresh_now()
    after, copied = _Digest(), _Digest()
    for page in _pages(source, part, spaces):
        after.add(page)
    for page in _pages(target, part):
        copied.add(page)
    if before.value() != after.value():
        raise Conflict("the source changed while it was copied: stop what uses it and begin again")
    if copied.value() != before.value():
        raise Corrupt("the copy differs from its source: begin again, and check the target")
    return CopyResult(before.keys, before.bytes, before.value())


class _Digest:
    """A digest of keys and values in their order."""

    def __init__(self) -> None:
        self.keys = 0
        self.bytes = 0
        self._hash = xxhash.xxh3_128()

    def add(self, page: Sequence[Pair]) -> None:
        for key, value in page:
            self._hash.update(b"%d:%d:%b%b" % (len(key), len(value), key, value))
            self.bytes += len(key) + len(value)
        self.keys += len(page)

    def value(self) -> str:
        return self._hash.hexdigest()


def _pages(
    engine: Blocking, part: EnginePart, spaces: Container[bytes] = ()
) -> Iterator[list[Pair]]:
    """Yields all pairs of a part, a page in a transaction; of `spaces` (`peer_spaces`) only what
    they share."""
    for start, end in part.ranges:
        position: bytes | None = start
        while position is not None:
            page, position = engine.read_now(partial(_page, position, end, part.apart))
            if spaces:
                page = list(everybodys(page, spaces))
            if page:
                yield page


def _between(gaps: Iterable[Range]) -> Iterator[Range]:
    """Yields the ranges of all keys that are in none of these."""
    start = b""
    for first, last in sorted(gaps):
        if start < first:
            yield start, first
        start = max(start, last)
    yield start, b"\xff"


def _put(page: Sequence[Pair], t: Transaction) -> None:
    for key, value in page:
        t.put(key, value)


def _delete(page: Sequence[Pair], t: Transaction) -> None:
    t.get_many([key for key, _ in page])  # in one round trip
    for key, _ in page:
        t.delete(key)


def _page(
    start: bytes, end: bytes, apart: frozenset[bytes], t: Transaction
) -> tuple[list[Pair], bytes | None]:
    """Returns some pairs, and where to go on; None: that was all."""
    page: list[Pair] = []
    size = 0
    for key, value in t.scan(start, end):
        if len(page) == _PAGE_KEYS or size >= _PAGE_BYTES:
            return page, key
        if key not in apart and not keys.is_exclusive(key):
            page.append((key, value))
            size += len(key) + len(value)
    return page, None
