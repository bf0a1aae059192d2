"""The form in which an object keeps the parts that it was assembled from: their sizes and
checksums.

| attribute | value |
|---|---|
| `parts`, `parts.1`, ... | sizes, in runs of equal ones: `8388608*127,1234` |
| `part-checksums`, `part-checksums.1`, ... | the checksums, in the object's algorithm |

1,000 runs or checksums each: an object may have 10,000 parts, and the value of an attribute is
limited.
"""

from collections.abc import Mapping, Sequence
from itertools import count, groupby
from typing import Final

_SIZES: Final = "parts"
_CHECKSUMS: Final = "part-checksums"
_AT_ONCE: Final = 1000


def attributes(sizes: Sequence[int], checksums: Sequence[str] = ()) -> dict[str, str]:
    """Returns the attributes that are kept: attribute -> value. `checksums` are those of all parts,
    or none."""
    runs = [(size, sum(1 for _ in equal)) for size, equal in groupby(sizes)]
    kept = _split(_SIZES, [str(size) if n == 1 else f"{size}*{n}" for size, n in runs])
    return kept | _split(_CHECKSUMS, checksums)


def sizes_of(kept: Mapping[str, str]) -> list[int]:
    """Returns the sizes of the parts; empty for an object that came whole."""
    found: list[int] = []
    for run in _joined(kept, _SIZES):
        size, _, times = run.partition("*")
        found += [int(size)] * int(times or 1)
    return found


def checksums_of(kept: Mapping[str, str]) -> list[str]:
    """Returns the checksums of the parts; empty if none are kept."""
    return _joined(kept, _CHECKSUMS)


def _split(name: str, items: Sequence[str]) -> dict[str, str]:
    return {
        f"{name}.{at // _AT_ONCE}" if at else name: ",".join(items[at : at + _AT_ONCE])
        for at in range(0, len(items), _AT_ONCE)
    }


def _joined(kept: Mapping[str, str], name: str) -> list[str]:
    found: list[str] = []
    for number in count():
        text = kept.get(f"{name}.{number}" if number else name)
        if not text:
            return found
        found += text.split(",")
    raise AssertionError
