"""Reused memory for payload between sockets and data files."""

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

BUFFER_BYTES: Final = 256 << 10
_IDLE_BUFFERS: Final = 8


class BufferPool:
    """Reused buffers of BUFFER_BYTES: as many as bodies are received at once, and a few that wait
    for the next ones. The others are mappings, which the system gets back at once: the heap keeps
    its memory."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    def take(self) -> memoryview:
        """Returns a buffer, to be given back."""
        try:
            return self._free.pop()
        except IndexError:  # asked for before, it could be gone: copies take theirs in threads
            return memoryview(mmap.mmap(-1, BUFFER_BYTES))

    def give_back(self, buffers: Sequence[memoryview]) -> None:
        """Takes back buffers that nobody uses any more."""
        if len(self._free) < _IDLE_BUFFERS:
            self._free += buffers

    @contextmanager
    def lent(self) -> Iterator[memoryview]:
        buffer = self.take()
        try:
            yield buffer
        finally:
            self.give_back((buffer,))
