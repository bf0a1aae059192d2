"""The time when a node of a cluster last heard its engine, told to every process of the store: its
metadata replica held everything then that was committed.

A file of one number, seconds of CLOCK_BOOTTIME, which a power cut sets back to 0, and of one more
for each namespace with a shard of its own, after its number: of two, the first counts, and the
second is of an earlier, longer content that is being cut off. A node that was killed leaves the
last ones, which are soon old.
"""

import contextlib
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

_NUMBER: Final = struct.Struct("<d")
_OF_NAMESPACE: Final = struct.Struct("<Hd")


class HeardWriter:
    """The node's end of the clock."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._length = -1

    def tell(self, heard_at: float, apart: Mapping[int, float] = MappingProxyType({})) -> None:
        """Tells of all namespaces, but those told of `apart`. Raises OSError."""
        packed = (_OF_NAMESPACE.pack(*each) for each in apart.items())
        told = _NUMBER.pack(heard_at) + b"".join(packed)
        os.pwrite(self._fd, told, 0)
        if len(told) != self._length:
            os.ftruncate(self._fd, len(told))
            self._length = len(told)

    def close(self) -> None:
        """Ends the clock's writing end."""
        try:
            with contextlib.suppress(OSError):  # a full disk; it is soon old
                self.tell(0.0)
        finally:
            os.close(self._fd)


def heard_at(path: Path, namespace_id: int = 0) -> float:
    """Returns the last time that the node gave for a namespace; 0: it gave none."""
    try:
        packed = path.read_bytes()
    except OSError:
        return 0.0
    head, rest = packed[: _NUMBER.size], packed[_NUMBER.size :]
    if len(head) < _NUMBER.size or len(rest) % _OF_NAMESPACE.size:
        return 0.0
    for number, told_at in _OF_NAMESPACE.iter_unpack(rest):
        if number == namespace_id:
            return float(told_at)
    return float(_NUMBER.unpack(head)[0])
