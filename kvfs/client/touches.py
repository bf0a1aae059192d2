"""Which files were read, gathered so that a read costs no commit: the node evicts what was used
longest ago.

Told to the node a second after the first of them, or by a thousand. Without a node, a process that
has written anyway writes them to the index itself; one that only reads lets them go: nothing is
evicted then.
"""

import time
from typing import Final

from kvfs.client.link import Link
from kvfs.client.session import Session
from kvfs.errors import KvfsError
from kvfs.store.index import Index

_LIMIT: Final = 1024
_PERIOD_S: Final = 1.0


class Touches:
    """Of one client; any thread. A race of two threads may lose a touch, which does no harm."""

    def __init__(self, session: Session, link: Link, *, known: bool = False) -> None:
        """`known`: the node sees itself what is read."""
        self._session = session
        self._link = link
        self._known = known
        self._gathered: dict[int, None] = {}
        self._due = 0.0

    def add(self, ino: int) -> None:
        """The file was just read. The telling is left to a thread."""
        if self._known:
            return
        gathered = self._gathered
        now = time.monotonic()
        if not gathered:
            self._due = now + _PERIOD_S
        gathered.pop(ino, None)
        gathered[ino] = None
        if len(gathered) >= _LIMIT or now >= self._due:
            self._due = now + _PERIOD_S
            self._session.pool.submit(self.flush)

    def flush(self) -> None:
        """Tell them now. Failure is of no consequence."""
        gathered, self._gathered = self._gathered, {}
        if not gathered or self._link.touched(gathered) or not self._session.writable:
            return

        def fn(index: Index) -> None:
            for ino in gathered:
                index.touch(ino)
            index.flush()

        try:
            self._session.use_index(fn)
        except KvfsError:
            pass
