"""Data on their way to the disk before anybody waits for them.

What is synced at the end of a long write otherwise waits in the page cache until then, up to a
fifth of the memory: the sync takes as long as the disk needs for it, with the writer's peer waiting
for an answer. sync_file_range(2) with SYNC_FILE_RANGE_WRITE only starts the writing: no metadata,
no flush of the disk, no promise. Where the C library has no such call, nothing is started.
"""

import ctypes
from typing import Final

_WRITE: Final = 2
_call = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _call is not None:
    _call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def start_writing(fd: int, offset: int, size: int) -> None:
    """Start to write these bytes to the disk; may wait while its queue is full."""
    if _call is not None and size:
        _call(fd, offset, size, _WRITE)
