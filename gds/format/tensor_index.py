"""The part of a tensor that an index needs. Pure.

Of the dimensions that an index cuts, the one of which it leaves the least is cut in the file; the
rest is cut from what was read."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from gds.plan.tensor_parallel import TensorPart


class Narrowed(NamedTuple):
    """The part to read, and how to index it."""

    part: TensorPart | None
    """The part; None: all of it."""
    rest: tuple[Any, ...]


def is_basic(index: Any) -> bool:
    """Returns whether the index has only whole numbers, slices and at most one ellipsis. (A bool is
    an int to Python, to torch it is a mask.) Any other index needs the whole tensor."""
    others = [item for item in _items(index) if type(item) not in (int, slice)]
    return not others or (len(others) == 1 and others[0] is Ellipsis)


def narrow(index: Any, shape: Sequence[int]) -> Narrowed:
    """Returns the part that an index needs. `index`: a basic one, as torch takes it for a tensor of
    this shape, and not empty."""
    items = _without_ellipsis(_items(index), len(shape))
    wanted = [_span(item, size) for item, size in zip(items, shape, strict=True)]
    shares = [len(span) / size for span, size in zip(wanted, shape, strict=True)]
    least = min(shares, default=1)
    if least == 1:
        return Narrowed(None, items)
    at = shares.index(least)
    span, item = wanted[at], items[at]
    rest = slice(None, None, item.step) if isinstance(item, slice) else 0
    part = TensorPart(at, ((span.start, span.stop),))
    return Narrowed(part, (*items[:at], rest, *items[at + 1 :]))


def _items(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _without_ellipsis(items: tuple[Any, ...], dimensions: int) -> tuple[Any, ...]:
    """Returns an item for each dimension."""
    at = items.index(Ellipsis) if Ellipsis in items else len(items)
    before, behind = items[:at], items[at + 1 :]
    return (*before, *(slice(None),) * (dimensions - len(before) - len(behind)), *behind)


def _span(item: int | slice, size: int) -> range:
    """Returns the range from the first wanted element to behind the last one."""
    if isinstance(item, slice):
        found = range(*item.indices(size))
        return range(found[0], found[-1] + 1)
    return range(item % size, item % size + 1)


def scaled(part: TensorPart, by: int) -> TensorPart:
    """Returns the part in elements of which `by` are one element here."""
    spans = tuple((begin * by, end * by) for begin, end in part.spans)
    return TensorPart(part.dimension, spans)
