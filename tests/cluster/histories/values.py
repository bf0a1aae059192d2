"""Contents that tell by themselves who wrote them, and whether all of it is there."""

import contextlib
import itertools
from typing import Final

from tests.cluster.histories.events import EMPTY, TORN

_WIDTH: Final = 16
_SMALL: Final = 4096 // _WIDTH
_MIDDLING: Final = 300_000 // _WIDTH
_LARGE: Final = 5_500_000 // _WIDTH
"""More than a chunk, and than the least part of an upload."""


def content(value: int) -> bytes:
    """Its size follows from the value: most are small, some have several pages, a few chunks."""
    assert value > 0
    kind = value % 16
    times = _LARGE if kind == 0 else _MIDDLING if kind < 4 else _SMALL
    return b"%016x" % value * (times + value % 7)


def line(value: int) -> bytes:
    """One that is appended."""
    return b"%016x\n" % value


def values_of(data: bytes) -> list[int]:
    """Those of the lines of a file; TORN for what is none."""
    lines = data.split(b"\n")
    return [_value(each) for each in lines if each]


def _value(text: bytes) -> int:
    with contextlib.suppress(ValueError):
        if len(text) == _WIDTH:
            return int(text, 16)
    return TORN


def value_of(data: bytes | bytearray) -> int:
    """The value, EMPTY or TORN: then it is printed what there is."""
    if not data:
        return EMPTY
    with contextlib.suppress(ValueError):
        value = int(data[:_WIDTH], 16)
        if value > 0 and data == content(value):
            return value
    print(f"torn: {_parts(data)}")
    return TORN


def _parts(data: bytes | bytearray) -> str:
    """How many bytes in a row are of which value."""
    pieces = (bytes(data[at : at + _WIDTH]) for at in range(0, len(data), _WIDTH))
    runs = ((piece, sum(map(len, same))) for piece, same in itertools.groupby(pieces))
    return ", ".join(f"{size} of {piece!r}" for piece, size in itertools.islice(runs, 8))
