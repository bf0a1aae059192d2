"""Keys of objects, and their entries in the engine.

The segments of a key, split at '/', are names in the engine as they are, so that a depth-first scan
meets keys in the order of their bytes. A segment of 480 bytes or more is continued in a directory
that adds no '/' to the key (`name_escaping.SPLIT`). Other entries of the system beside objects have
a NUL in their names:

| name | content |
|---|---|
| segment, NUL, id | a version that is not the current one, or a delete marker |
| NUL `uploads`, in a bucket's directory | a directory for each upload that was begun |
| NUL `completed`, there too | the results of recently completed uploads |
"""

from typing import Final

import msgspec

from kvfs.base.errors import Invalid
from kvfs.tree.name_escaping import NUL, SPLIT, is_continuation

MAX_KEY: Final = 1024
UPLOADS: Final = b"\0uploads"
COMPLETED: Final = b"\0completed"


class KeyPlace(msgspec.Struct, frozen=True):
    """The place of a key in its bucket."""

    directories: tuple[bytes, ...]
    """The names of its directories, from the top."""
    name: bytes
    """The name of the file; may be empty."""


def check_key(key: bytes) -> None:
    """Raises Invalid unless it is UTF-8 of 1 to 1,024 bytes without a NUL."""
    if not 0 < len(key) <= MAX_KEY:
        raise Invalid(f"a key has 1 to {MAX_KEY} bytes, this one {len(key)}")
    if NUL in key:
        raise Invalid("a key holds no NUL byte")
    try:
        key.decode()
    except UnicodeDecodeError as error:
        raise Invalid(f"a key is UTF-8, this one is not at its byte {error.start}") from None


def place_of(key: bytes) -> KeyPlace:
    """Splits a key, or the start of one."""
    *above, name = key.split(b"/")
    if len(key) < SPLIT:
        return KeyPlace(tuple(above), name)
    directories: list[bytes] = []
    for segment in above:
        rest = _continue(directories, segment)
        directories.append(rest)
    rest = _continue(directories, name)
    return KeyPlace(tuple(directories), rest)


def joined(prefix: bytes, directory: bytes) -> bytes:
    """Returns the start of all keys in a directory, from that of its parent's and its entry (with
    '/')."""
    return prefix + (directory[:SPLIT] if is_continuation(directory) else directory)


def _continue(directories: list[bytes], segment: bytes) -> bytes:
    while len(segment) >= SPLIT:
        directories.append(segment[:SPLIT] + NUL)
        segment = segment[SPLIT:]
    return segment
