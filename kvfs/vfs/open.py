"""Opening a file beside its node: the loop that ends with a descriptor, or with the one answer of
every door (`missing_data`).

An open descriptor is the lease: eviction and replacement only unlink a data file, so an opened file
is read to its end. Between the look-up and the open it may go; then a new look-up finds its
replacement, or nothing. This host's node fetches data that other nodes or the cold tier have, and
settles any disagreement between its record and its data file.

A door makes the first attempt itself, since that is nearly always enough; this module serves those
that follow.
"""

from collections.abc import Callable
from typing import Final, Protocol, TypeVar

from kvfs.base.errors import Conflict, NotFound, OtherVersion, Stale, Unavailable, Unreached
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Inode
from kvfs.session.session import Session
from kvfs.tree.inodes import read_inodes
from kvfs.vfs.missing_data import loss
from kvfs.vfs.node_client import Link

_ATTEMPTS: Final = 8


class FoundFile(Protocol):
    """A file that a look-up led to."""

    @property
    def ino(self) -> int: ...

    @property
    def inode(self) -> Inode:
        """Its record, as the look-up read it."""


F = TypeVar("F")
T = TypeVar("T")


class FileOpener:
    """Opens files of one store; any thread, all methods block."""

    def __init__(self, session: Session, link: Link) -> None:
        self._session = session
        self._link = link

    def open(
        self,
        shown: str,
        look: Callable[[], tuple[F, T | None]],
        fetch: Callable[[F], T | None],
    ) -> T:
        """Returns what a look opens. If it finds a file and opens nothing, `fetch` fetches the data
        (see the method), or opens them while they arrive.

        Raises what these raise, and Unavailable if the file changes all the time."""
        for _ in range(_ATTEMPTS):
            found, opened = look()
            if opened is None:
                opened = fetch(found)
            if opened is not None:
                return opened
        raise Unavailable(f"{shown}: it changes all the time, its data come and go: try again")

    def fetch(self, found: FoundFile, shown: str) -> None:
        """Returns when the data are on this host, or the file is another by now: look again.

        Raises the answer of `missing_data.loss` if nobody has them, Unreached and OtherVersion (a
        miss of a cache), Busy (it is being written), Corrupt, Unavailable, NoSpace."""
        self._bring(found, shown, lambda: self._link.bring(found.ino))

    def fetch_span(self, found: FoundFile, shown: str, offset: int, length: int) -> bool:
        """Returns whether these bytes can be read here, from a data file or its arriving part;
        False: look again. Raises what `fetch` raises."""
        ino, version = found.ino, found.inode.version
        return self._bring(
            found, shown, lambda: self._link.bring_span(ino, version, offset, length)
        )

    def _bring(self, found: FoundFile, shown: str, bring: Callable[[], bool]) -> bool:
        try:
            if bring():
                return True
        except (OtherVersion, Unreached):
            raise
        except (NotFound, Stale, Conflict):
            return False
        if (error := self._lost(found, shown)) is not None:
            raise error
        return False

    def _lost(self, found: FoundFile, shown: str) -> Exception | None:
        """Returns the answer if nobody has the data of this record; None: the record is another by
        now, since it was replaced, forgotten or written to."""
        ino, inode = found.ino, found.inode

        def fn(t: Transaction) -> Exception | None:
            (now,) = read_inodes(t, [ino])
            return loss(t, ino, inode, shown).error if now == inode else None

        return self._session.read(fn)
