"""Reads of files, gathered so that a read costs no commit: the node evicts the files that were used
longest ago. And counts of missed names, by reason, gathered so that a miss costs no round trip.

They are told to the node a second after the first of them, or after a thousand reads, with the next
read or miss; the rest is told when the client is closed. Without a node, a process that has written
anyway writes the reads to the index itself; one that only reads lets them go: nothing is evicted
then, and nobody counts misses.
"""

import os
import time
from collections.abc import Sequence
from typing import Final

from kvfs.base.errors import KvfsError, NotFound
from kvfs.datastore.index import Index
from kvfs.session.session import Session
from kvfs.vfs.miss_counters import Misses
from kvfs.vfs.node_client import NodeClient

_LIMIT: Final = 1024
_MISSES_LIMIT: Final = 16_384
_PERIOD_S: Final = 1.0


class Touches:
    """The touches of one client; any thread. A race of two threads may lose a touch, which does no
    harm."""

    def __init__(self, session: Session, node: NodeClient, *, known: bool = False) -> None:
        """`known`: the node sees the reads itself."""
        self._session = session
        self._node = node
        self._known = known
        self._gathered: dict[int, None] = {}
        self._misses = Misses(session.gone)
        self._missing: list[bytes | NotFound] = []
        self._pid = os.getpid()
        self._due = 0.0
        """The time when they are told; 0: nothing waits."""

    def add(self, *inos: int) -> None:
        """Notes that these files were just read. The telling is left to a thread."""
        if self._known:
            return
        gathered = self._gathered
        for ino in inos:
            gathered.pop(ino, None)
            gathered[ino] = None
        if not self._due or time.monotonic() >= self._due or len(gathered) >= _LIMIT:
            self._tell_soon(at_once=len(gathered) >= _LIMIT)

    def missed(self, missing: Sequence[bytes | NotFound]) -> None:
        """Notes that names with these entries are missing, or directories of names for these
        errors. A thread finds out why, and tells, unless there are very many at once."""
        if self._known:
            return
        self._missing += missing
        if len(self._missing) >= _MISSES_LIMIT:
            self._look_up()
        self._tell_soon()

    def found_nothing(self, error: NotFound) -> None:
        """Notes an error that a caller gets."""
        if self._known:
            return
        if error.at is not None and type(error) is NotFound:
            self.missed((error.at,))
            return
        self._misses.found_nothing(error)
        self._tell_soon()

    def _tell_soon(self, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if not self._due:
            self._due = now + _PERIOD_S
        if at_once or now >= self._due:
            self._due = now + _PERIOD_S
            self._session.pool.submit(self.flush)

    def _look_up(self) -> None:
        """Finds out why names were missed."""
        missing, self._missing = self._missing, []
        if self._pid != os.getpid():  # the parent of a fork counts what was gathered until now
            self._pid = os.getpid()
            self._misses.take()
        else:
            self._misses.missed_all(missing)

    def flush(self) -> None:
        """Tells them now. Failure has no consequence."""
        gathered, self._gathered, self._due = self._gathered, {}, 0.0
        self._look_up()
        misses = self._misses.take()
        if not gathered and not misses:
            return
        if self._node.touched(gathered, misses) or not self._session.writable:
            return

        def fn(index: Index) -> None:
            for ino in gathered:
                index.touch(ino)
            index.flush()

        try:
            self._session.use_index(fn)
        except KvfsError:
            pass
