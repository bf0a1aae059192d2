"""The question to a home: who holds these names. No I/O.

| method | parameters | answer |
|---|---|---|
| `ask-homes` | `AskedHolders` | `ToldHolders` |

Fingerprints are 8 bytes each, origins 2, little-endian. Of each fingerprint the answer has how many
holders follow (2 bytes, the highest bit: the node does not know all), then the holders.
"""

import sys
from array import array
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from kvfs.base.errors import Invalid
from kvfs.holdings.fingerprints import BITS
from kvfs.node.names.name_protocol import converted

MOST_ASKED: Final = 4096
"""Fingerprints of a request."""
_IS_PART: Final = 1 << 15
_IS_BIG: Final = sys.byteorder == "big"


class AskedHolders(msgspec.Struct, array_like=True):
    """The request `ask-homes`."""

    most: int
    """Holders to tell of each."""
    packed: bytes


class HolderNews(NamedTuple):
    """The holders of a name, as a home tells of them."""

    holders: list[int]
    is_all: bool
    """Whether it knows all; else another home may know more of them, as where it is none."""


class ToldHolders(msgspec.Struct, array_like=True):
    """Its answer."""

    lagging: list[int]
    """Nodes of which the home lacks something now."""
    packed: bytes


def pack_asked(fingerprints: Sequence[int], most: int) -> AskedHolders:
    """Returns the request."""
    return AskedHolders(min(most, _IS_PART - 1), _bytes_of(array("Q", fingerprints)))


def parse_asked(params: Any) -> tuple[list[int], int]:
    """Returns the fingerprints of a request, and how many holders to tell of each. Raises
    Invalid."""
    asked = converted(params, "homes", AskedHolders)
    if len(asked.packed) % 8 or len(asked.packed) > 8 * MOST_ASKED:
        raise Invalid(f"a home is asked with {len(asked.packed)} bytes of names")
    fingerprints = _array_of("Q", asked.packed).tolist()
    if not 0 < asked.most < _IS_PART or any(each >> BITS for each in fingerprints):
        raise Invalid("a home is asked for what there is not")
    return fingerprints, asked.most


def pack_told(found: Sequence[HolderNews], lagging: list[int]) -> ToldHolders:
    """Returns the answer to a question about these names."""
    numbers = array("H")
    for holders, is_all in found:
        numbers.append(len(holders) if is_all else len(holders) | _IS_PART)
        numbers.extend(holders)
    return ToldHolders(lagging, _bytes_of(numbers))


def parse_told(answer: Any, count: int) -> tuple[list[HolderNews], list[int]]:
    """Returns what a home told of `count` fingerprints, and which nodes it lacks something of.
    Raises Invalid."""
    told = converted(answer, "homes", ToldHolders)
    if len(told.packed) % 2:
        raise Invalid("a home tells half a number")
    numbers = _array_of("H", told.packed).tolist()
    found: list[HolderNews] = []
    at = 0
    while at < len(numbers):
        size, is_all = numbers[at] & _IS_PART - 1, numbers[at] < _IS_PART
        at += 1
        found.append(HolderNews(numbers[at : at + size], is_all))
        at += size
    if len(found) != count or at != len(numbers):
        raise Invalid("a home tells of other names than were asked for")
    return found, told.lagging


def _bytes_of(numbers: "array[int]") -> bytes:
    if _IS_BIG:
        numbers.byteswap()
    return numbers.tobytes()


def _array_of(code: str, packed: bytes) -> "array[int]":
    numbers = array(code)
    numbers.frombytes(packed)
    if _IS_BIG:
        numbers.byteswap()
    return numbers
