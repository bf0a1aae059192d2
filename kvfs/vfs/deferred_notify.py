"""Notices to the node that nobody waits for: gathered for a moment, so that many commits cost one
round trip. Not for longer, nor of more bytes: the node can evict only files that it knows.

The node finds notices that a kill loses by its own sweeps: new files by those that are not sealed,
inodes that lost their last link by the orphans.
"""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from kvfs.base import forks

T = TypeVar("T")
log = logging.getLogger(__name__)
PERIOD_S: Final = 0.05
LIMIT: Final = 1024
LIMIT_BYTES: Final = 8 << 20


class DeferredNotify(Generic[T]):
    """Gathers notices. A thread calls `tell` with all that came within PERIOD_S. Any thread may use
    it; `close` it."""

    def __init__(self, tell: Callable[[Sequence[T]], None]) -> None:
        self._tell = tell
        self._thread: threading.Thread | None = None
        self._gathered: deque[T] = deque()
        self.begin_anew()
        forks.in_each_child(self)

    def add(self, items: Sequence[T], size_bytes: int) -> list[T]:
        """Adds notices, and returns those that the caller is to tell itself: none, or all, if they
        are many. Never waits."""
        self._gathered += items
        self._bytes += size_bytes
        if len(self._gathered) > LIMIT or self._bytes > LIMIT_BYTES:
            return self._taken()
        if not self._due.is_set():
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvfs-soon", daemon=True)
                self._thread.start()
            self._due.set()
        return []

    def flush(self) -> None:
        """Returns when everything added before has been told. Raises what `tell` raises."""
        with self._telling:
            if taken := self._taken():
                self._tell(taken)

    def close(self) -> None:
        """Does `flush`, and leaves no thread; idempotent. Raises what `tell` raises."""
        try:
            self.flush()
        finally:
            self._closing.set()
            self._due.set()
            if self._thread is not None:
                self._thread.join()

    def begin_anew(self) -> None:
        """Begins with nothing: in the child of a fork the gathered notices are the parent's, and
        thread and locks are not there."""
        self._telling = threading.Lock()
        self._gathered = deque()
        self._bytes = 0
        self._due = threading.Event()
        self._closing = threading.Event()
        self._thread = None

    def _taken(self) -> list[T]:
        """Returns all gathered notices. Each goes to one of the threads that ask at once."""
        self._bytes = 0
        taken: list[T] = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._gathered.popleft())
        return taken

    def _run(self) -> None:
        while not self._closing.is_set():
            self._due.wait()
            self._closing.wait(PERIOD_S)
            self._due.clear()
            try:
                self.flush()
            except Exception as error:
                log.warning("the node was not told of what changed, and will find out: %s", error)
