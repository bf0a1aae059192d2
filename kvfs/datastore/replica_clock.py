"""The time when a node of a cluster last heard its engine, told to every process of the store: its
metadata replica held everything then that was committed.

A file of one number, seconds of CLOCK_BOOTTIME, which a power cut sets back to 0. A node that was
killed leaves the last one, which is soon old.
"""

import contextlib
import os
import struct
from pathlib import Path
from typing import Final

_NUMBER: Final = struct.Struct("<d")


class HeardWriter:
    """The node's end of the clock."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def tell(self, heard_at: float) -> None:
        """Raises OSError."""
        os.pwrite(self._fd, _NUMBER.pack(heard_at), 0)

    def close(self) -> None:
        """Ends the clock's writing end."""
        try:
            with contextlib.suppress(OSError):  # a full disk; it is soon old
                self.tell(0.0)
        finally:
            os.close(self._fd)


def heard_at(path: Path) -> float:
    """Returns the last time that the node gave; 0: it gave none."""
    try:
        packed = path.read_bytes()
    except OSError:
        return 0.0
    return float(_NUMBER.unpack(packed)[0]) if len(packed) == _NUMBER.size else 0.0
