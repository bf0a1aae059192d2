"""Changes that commute: they need no knowledge of the present value, so that two hosts which make
files in one directory, or in one namespace, do not contend.

| class | value | operand | merged |
|---|---|---|---|
| `s` | Usage | Usage, signed | the sum; of a namespace that is gone, nothing |
| `m` | mtime, ctime (8 each) of a directory | the same | of each the later |

A distributed engine applies the same rules where the values lie. Pure.
"""

from typing import Final, Protocol

from kvfs.meta import keys
from kvfs.meta.records import Usage, pack, unpack_usage

_USAGE: Final = keys.USAGE[0]
_TIMES: Final = keys.TIMES[0]
MERGED: Final = frozenset({_USAGE, _TIMES})
"""First bytes of these keys."""


class _Values(Protocol):
    def get(self, key: bytes, /) -> bytes | None: ...

    def put(self, key: bytes, value: bytes, /) -> object: ...


def merged(key: bytes, old: bytes | None, operand: bytes) -> bytes | None:
    """Returns the value afterwards; None: there is none, as before."""
    if key[0] == _USAGE:
        return None if old is None else _sum(old, operand)
    assert key[0] == _TIMES, key
    if old is None:
        return operand
    # Numbers of one length compare as their bytes do.
    return max(old[:8], operand[:8]) + max(old[8:], operand[8:])


def without(key: bytes, operands: bytes, operand: bytes) -> bytes:
    """Returns the rest of merged operands, when `operand` among them has reached the value they are
    merged into: times stay, which does no harm there."""
    if key[0] == _USAGE:
        taken = unpack_usage(operand)
        return _sum(operands, pack(Usage(bytes=-taken.bytes, inodes=-taken.inodes)))
    return operands


def merge(values: _Values, key: bytes, operand: bytes) -> None:
    """Applies the operand to the known values."""
    value = merged(key, values.get(key), operand)
    if value is not None:
        values.put(key, value)


def _sum(old: bytes, operand: bytes) -> bytes:
    before, change = unpack_usage(old), unpack_usage(operand)
    return pack(Usage(bytes=before.bytes + change.bytes, inodes=before.inodes + change.inodes))
