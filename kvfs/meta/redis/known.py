"""What is known of a distant engine. No I/O.

Invariants
- All that a `Known` holds of one shard was true at one moment, that of its `Moment`.
- Absence is known like presence: a key's value is None, or a span covers where it would be.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter, itemgetter
from typing import Final, NamedTuple

from kvfs.meta.redis.sharding import Layout

Pair = tuple[bytes, bytes]
Writes = Mapping[bytes, bytes | None]
"""What a transaction writes; None: deleted."""
_key: Final = itemgetter(0)
_start: Final = attrgetter("start")


class Range(NamedTuple):
    """Keys asked for: the first `limit` with start <= key < end."""

    start: bytes
    end: bytes
    limit: int


class Span(NamedTuple):
    """All pairs with start <= key < end, in one shard."""

    start: bytes
    end: bytes
    pairs: list[Pair]

    def within(self, start: bytes, end: bytes) -> Iterator[Pair]:
        """The pairs of a part."""
        for index in range(bisect_left(self.pairs, start, key=_key), len(self.pairs)):
            if self.pairs[index][0] >= end:
                return
            yield self.pairs[index]


class Moment(NamedTuple):
    """When what is known of a shard was true: after the commit `token`, and as somebody heard who
    asked, or committed, in the `asked`-th request."""

    token: bytes
    asked: int


class Missing(BaseException):
    """Leaves a function that read what is not known; not an Exception, so that no handler of the
    function's own takes it for an error."""

    def __init__(self, keys: Iterable[bytes] = (), ranges: Iterable[Range] = ()) -> None:
        super().__init__()
        self.keys = tuple(keys)
        self.ranges = tuple(ranges)


class Known:
    """Values and spans, each shard's true at one moment."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.values: dict[bytes, bytes | None] = {}
        self.spans: list[Span] = []
        """By start; they do not overlap."""
        self.moments: dict[int, Moment] = {}

    def __len__(self) -> int:
        return len(self.values)

    def clear(self) -> None:
        """Forget everything."""
        self.values.clear()
        self.spans.clear()
        self.moments.clear()

    def forget(self, shard: int) -> None:
        """Forget all of a shard."""
        if self.layout is Layout.SINGLE:
            self.clear()
            return
        of = self.layout.shard_of
        self.values = {key: value for key, value in self.values.items() if of(key) != shard}
        self.spans = [span for span in self.spans if of(span.start) != shard]
        self.moments.pop(shard, None)

    def is_at(self, shard: int, token: bytes) -> bool:
        """Whether what is known of a shard is as of the commit `token`."""
        moment = self.moments.get(shard)
        return moment is not None and moment.token == token

    def is_since(self, shard: int, asked: int) -> bool:
        """Whether it was still so when somebody asked after request `asked`."""
        moment = self.moments.get(shard)
        return moment is not None and moment.asked > asked

    def get(self, key: bytes) -> bytes | None:
        """The value. Raises Missing."""
        try:
            return self.values[key]
        except KeyError:
            if self.span_of(key) is None:
                raise Missing([key]) from None
            return None

    def unknown(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those of `keys` that `get` would miss."""
        values = self.values
        if not self.spans:
            return [key for key in keys if key not in values]
        return [key for key in keys if key not in values and self.span_of(key) is None]

    def span_of(self, key: bytes) -> Span | None:
        """The span that covers `key`."""
        index = bisect_right(self.spans, key, key=_start) - 1
        if index >= 0 and key < self.spans[index].end:
            return self.spans[index]
        return None

    def between(self, start: bytes, end: bytes) -> list[Pair]:
        """All pairs of a range that spans cover."""
        found: list[Pair] = []
        while start < end:
            span = self.span_of(start)
            assert span is not None, "it was read"
            first = bisect_left(span.pairs, start, key=_key)
            found += span.pairs[first : bisect_left(span.pairs, end, key=_key)]
            start = span.end
        return found

    def count(self, start: bytes, end: bytes) -> int:
        """How many pairs of a range are known."""
        touching = (span for span in self.spans if span.start < end and start < span.end)
        return sum(1 for span in touching for _ in span.within(start, end))

    def write(self, changes: Writes) -> None:
        """These were committed, and nothing else since."""
        self.values.update(changes)
        for key, value in changes.items():
            span = self.span_of(key)
            if span is None:
                continue
            index = bisect_left(span.pairs, key, key=_key)
            if index < len(span.pairs) and span.pairs[index][0] == key:
                del span.pairs[index]
            if value is not None:
                insort(span.pairs, (key, value), key=_key)

    def learn(self, keys: Iterable[bytes], values: Iterable[bytes | None]) -> None:
        """Values that were fetched."""
        self.values.update(zip(keys, values, strict=True))

    def learn_range(self, asked: Range, pairs: list[Pair]) -> None:
        """What a range held; where it held as much as its limit, the span ends behind the last."""
        end = asked.end if len(pairs) < asked.limit else pairs[-1][0] + b"\0"
        self.values.update(pairs)
        start = asked.start
        while (span := self.span_of(start)) is not None:
            start = span.end
        index = bisect_left(self.spans, start, key=_start)
        if index < len(self.spans):
            end = min(end, self.spans[index].start)
        if start < end:
            self.spans.insert(index, Span(start, end, [p for p in pairs if start <= p[0] < end]))
