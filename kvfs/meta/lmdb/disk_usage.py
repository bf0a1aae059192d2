"""The disk space of a store's metadata."""

import contextlib
import os
from pathlib import Path
from typing import Final

_BLOCK: Final = 512


def metadata_bytes(directory: Path) -> int:
    """Returns the blocks of `data.mdb`, bases, journals and reserve. Some 15 µs. Raises OSError."""
    total = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # an old journal went meanwhile
                total += _BLOCK * entry.stat(follow_symlinks=False).st_blocks
    return total
