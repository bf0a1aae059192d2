"""The ids of versions: 22 characters, those of a later version sort first.

The first 11 hold the time (nanoseconds since the epoch, complemented) in a base 64 whose digits are
in the order of ASCII, the others are random, or `null` for a version that was written while the
bucket kept no versions: such a one has the id "null" to the outside, and at most one exists for a
key. Times are made to grow from version to version of one key, whatever the clock says.
"""

import os
from typing import Final

from kvfs.tree.name_escaping import NUL

NULL: Final = "null"
_DIGITS: Final = b"-0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz"
_VALUES: Final = {digit: value for value, digit in enumerate(_DIGITS)}
_TIME: Final = 11
_RANDOM: Final = 11
_END: Final = (1 << 64) - 1
_NULL_END: Final = b"null"


def make(time_ns: int, *, null: bool) -> bytes:
    """Returns a new id."""
    return _encode(_END - time_ns, _TIME) + (_NULL_END if null else _random())


def time_of(version: bytes) -> int:
    """Returns the time that `make` was given."""
    value = 0
    for digit in version[:_TIME]:
        value = value << 6 | _VALUES[digit]
    return _END - value


def is_valid(version: bytes) -> bool:
    """Returns whether `make` could have made it."""
    return len(version) == _TIME + _RANDOM and all(digit in _VALUES for digit in version)


def is_null(version: bytes) -> bool:
    return version[_TIME:] == _NULL_END


def outside(version: bytes) -> str:
    """Returns the id as callers know it."""
    return NULL if is_null(version) else version.decode("ascii")


def entry_name(name: bytes, version: bytes) -> bytes:
    """Returns the name under which a version of the file `name` is kept that is not the current
    one."""
    return name + NUL + version


def _encode(value: int, digits: int) -> bytes:
    return bytes(_DIGITS[value >> 6 * at & 63] for at in reversed(range(digits)))


def _random() -> bytes:
    return bytes(_DIGITS[byte & 63] for byte in os.urandom(_RANDOM))
