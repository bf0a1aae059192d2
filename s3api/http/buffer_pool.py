"""Reused memory for payload between sockets and data files."""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

BUFFER_BYTES: Final = 256 << 10
_IDLE_BUFFERS: Final = 8


class BufferPool:
    """Reused buffers of BUFFER_BYTES: as many as bodies are received at once, and a few that wait
    for the next ones. The others are mappings, which the system gets back at once: the heap keeps
    its memory."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    @contextmanager
    def lent(self) -> Iterator[memoryview]:
        try:
            buffer = self._free.pop()
        except IndexError:  # asked for before, it could be gone: copies take theirs in threads
            buffer = mmap.mmap(-1, BUFFER_BYTES)
        try:
            yield memoryview(buffer)
        finally:
            if len(self._free) < _IDLE_BUFFERS:
                self._free.append(buffer)
