"""What the node is told of, but nobody waits for: gathered for a moment, so that many commits cost
one round trip. Not for longer, nor of more bytes: the node can evict only what it knows.

What a kill loses, the node finds by its own sweeps: new files by those that are not sealed, what
lost its last link by the orphans.
"""

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)
_PERIOD_S: Final = 0.05
_LIMIT: Final = 1024
_LIMIT_BYTES: Final = 8 << 20


class Soon(Generic[T]):
    """`tell` is called in a thread, with all that came within _PERIOD_S. Any thread."""

    def __init__(self, tell: Callable[[Sequence[T]], None]) -> None:
        self._tell = tell
        self._telling = threading.Lock()
        self._gathered: deque[T] = deque()
        self._bytes = 0
        self._due = False
        self._pid = os.getpid()

    def add(self, items: Sequence[T], size_bytes: int) -> list[T]:
        """Never waits. What the caller is to tell itself: nothing, or all, where that is much."""
        self._mine()
        self._gathered += items
        self._bytes += size_bytes
        if len(self._gathered) > _LIMIT or self._bytes > _LIMIT_BYTES:
            return self._taken()
        if not self._due:  # of two threads that see this both start a timer, which does no harm
            self._due = True
            timer = threading.Timer(_PERIOD_S, self._flush)
            timer.daemon = True
            timer.start()
        return []

    def flush(self) -> None:
        """All that was added before has been told when it returns. Raises what `tell` raises."""
        self._mine()
        with self._telling:
            if taken := self._taken():
                self._tell(taken)

    def _taken(self) -> list[T]:
        """All that has gathered. Each goes to one of the threads that ask at once."""
        self._bytes = 0
        taken: list[T] = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._gathered.popleft())
        return taken

    def _mine(self) -> None:
        """After a fork what was gathered is the parent's, and its timer and lock are not here."""
        if self._pid != os.getpid():
            self._gathered, self._telling = deque(), threading.Lock()
            self._bytes, self._due, self._pid = 0, False, os.getpid()

    def _flush(self) -> None:
        self._due = False
        try:
            self.flush()
        except Exception as error:
            log.warning("the node was not told of %s; it will find out", error)
