"""Opening a file: the loop that ends with a descriptor, or with the one answer of every door
(`missing_data`).

An open descriptor is the lease: eviction and replacement only unlink a data file, so an opened file
is read to its end. Between the look-up and the open it may go; then a new look finds its
replacement, or nothing. This host's node fetches data that other nodes or the cold tier have, and
settles any disagreement between its record and its data file.

A door makes the first attempt itself, since that is nearly always enough; this module serves those
that follow. A door differs in how it looks, and in what it makes of data that are still arriving.

| class | for |
|---|---|
| `FileOpener` | the mount, in the node's event loop |
| `BlockingOpener` | doors beside the node, in any thread |
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, Protocol, TypeVar

from kvfs.base.errors import Conflict, NotFound, OtherVersion, Stale, Unavailable, Unreached
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Inode
from kvfs.session.session import Session
from kvfs.tree.copies import placements
from kvfs.tree.inodes import read_inodes
from kvfs.vfs.control_port import answer
from kvfs.vfs.missing_data import loss
from kvfs.vfs.node_client import NodeClient
from kvfs.vfs.port import State

_ATTEMPTS: Final = 16


class FoundFile(Protocol):
    """A file that a look-up led to."""

    @property
    def ino(self) -> int: ...

    @property
    def inode(self) -> Inode:
        """Its record, as the look-up read it."""


F = TypeVar("F")
T = TypeVar("T")


class ChangesAllTheTime(Unavailable):
    """Each look at a file found another state: its data come and go."""


class Records(Protocol):
    """The metadata: see `kvfs.meta.engine.Engine`."""

    async def read(self, fn: Callable[[Transaction], T]) -> T:
        """Runs `fn` on a read-only view."""


class DataFetcher(Protocol):
    """The node, as far as it fetches data: see `kvfs.vfs.port.NodePort`."""

    async def bring(self, ino: int) -> State: ...

    async def bring_span(self, ino: int, version: int, offset: int, length: int) -> State: ...


class FileOpener:
    """Opens files of one store. Cancelled: nothing is opened, and data that were asked for may come
    all the same."""

    def __init__(self, records: Records, node: DataFetcher) -> None:
        self._records = records
        self._node = node

    async def open(
        self,
        shown: str,
        look: Callable[[], Awaitable[tuple[F, T | None]]],
        fetch: Callable[[F], Awaitable[T | None]],
    ) -> T:
        """Returns what a look opens. If it finds a file and opens nothing, `fetch` fetches the data
        (see the method), or opens them while they arrive.

        Raises what these raise, and ChangesAllTheTime."""
        for _ in range(_ATTEMPTS):
            found, opened = await look()
            if opened is None:
                opened = await fetch(found)
            if opened is not None:
                return opened
        raise ChangesAllTheTime(f"{shown}: it changes all the time: try again")

    async def fetch(self, found: FoundFile, shown: str) -> None:
        """Returns when the data are on this host, or the file is another by now: look again.

        Raises the answer of `missing_data.loss` if nobody has them, Unreached and OtherVersion (a
        miss of a cache), Busy (it is being written), Corrupt, Unavailable, NoSpace."""
        await self.fetch_by(found, shown, partial(self._node.bring, found.ino))

    async def fetch_span(self, found: FoundFile, shown: str, offset: int, length: int) -> bool:
        """Returns whether these bytes can be read here, from a data file or its arriving part;
        False: look again. Raises what `fetch` raises."""
        ino, version = found.ino, found.inode.version
        return await self.fetch_by(
            found, shown, partial(self._node.bring_span, ino, version, offset, length)
        )

    async def fetch_by(
        self, found: FoundFile, shown: str, ask: Callable[[], Awaitable[State]]
    ) -> bool:
        """Does the same by `ask`, which is repeated while they are coming; nobody is asked for data
        of what has no name. Returns whether they are here; False: look again."""
        try:
            while found.inode.nlink and (state := await ask()) != "nowhere":
                if state == "here":
                    return True
        except (OtherVersion, Unreached):
            raise
        except (NotFound, Stale, Conflict):
            return False
        if (error := await self._lost(found, shown)) is not None:
            raise error
        return False

    async def _lost(self, found: FoundFile, shown: str) -> Exception | None:
        """Returns the answer if nobody has the data of this record; None: the record is another by
        now, since it was replaced, forgotten or written to."""
        ino, inode = found.ino, found.inode

        def fn(t: Transaction) -> Exception | None:
            (now,) = read_inodes(t, [ino])
            if now != inode:
                return None
            # They are lost to nobody while this host's node, which would fetch them, is away.
            holders = (each.node for each in placements.holders(t, ino) if each.node != t.node)
            return loss(t, ino, inode, shown, away=[*map(keys.unpack_node, holders)]).error

        return await self._records.read(fn)


class _SessionRecords:
    """The metadata beside the node; never suspends."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def read(self, fn: Callable[[Transaction], T]) -> T:
        return self._session.read(fn)


class _ClientFetcher:
    """The node behind its socket, if one runs; never suspends."""

    def __init__(self, node: NodeClient) -> None:
        self._node = node

    async def bring(self, ino: int) -> State:
        return "here" if self._node.bring(ino) else "nowhere"

    async def bring_span(self, ino: int, version: int, offset: int, length: int) -> State:
        return "here" if self._node.bring_span(ino, version, offset, length) else "nowhere"


class BlockingOpener:
    """The same opener beside the node; any thread, all methods block."""

    def __init__(self, session: Session, node: NodeClient) -> None:
        self._opener = FileOpener(_SessionRecords(session), _ClientFetcher(node))

    def open(
        self,
        shown: str,
        look: Callable[[], tuple[F, T | None]],
        fetch: Callable[[F], T | None],
    ) -> T:
        """See `FileOpener.open`."""

        async def look_now() -> tuple[F, T | None]:
            return look()

        async def fetch_now(found: F) -> T | None:
            return fetch(found)

        return answer(self._opener.open(shown, look_now, fetch_now))

    def fetch(self, found: FoundFile, shown: str) -> None:
        """See `FileOpener.fetch`."""
        answer(self._opener.fetch(found, shown))

    def fetch_span(self, found: FoundFile, shown: str, offset: int, length: int) -> bool:
        """See `FileOpener.fetch_span`."""
        return answer(self._opener.fetch_span(found, shown, offset, length))
