"""Bytes of a data file that another node has and goes on writing, for a process of this host: of an
upload that is completed on another node than its parts were put on
(`objects.multipart.part_assembly`).

They come into a data file that the process has begun for itself, and nothing is recorded: this node
is no holder, since what comes is right for now only.

Invariants
- One borrower of a data file is served at a time: what comes for one would not come for another.
- A transfer comes to its end, also when the caller asks again later or not at all.
"""

import os
from typing import Final
from weakref import WeakValueDictionary

import msgspec
import trio

from kvfs.base.errors import Conflict, Invalid, KvfsError, NotFound, Unavailable
from kvfs.datastore.files import DataFiles
from kvfs.meta import keys
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.records import Inode
from kvfs.transfer.fetcher import Fetch
from kvfs.tree.copies import placements
from kvfs.tree.inodes import read_inode

_ATTEMPTS: Final = 8
_PAUSE_S: Final = 0.25
"""Before what was written to while it came is asked for again."""


class _Loan:
    """The transfer for one borrower."""

    def __init__(self) -> None:
        self.ended = trio.Event()
        self.error: Exception | None = None


class Borrowing:
    """The borrowing of one node."""

    def __init__(self, engine: Engine, files: DataFiles) -> None:
        self._engine = engine
        self._files = files
        self.fetch: Fetch | None = None
        """None: there are no other nodes."""
        self._loans: dict[int, _Loan] = {}
        self._turns: WeakValueDictionary[int, trio.Lock] = WeakValueDictionary()
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await trio.sleep_forever()

    async def borrow(self, ino: int, size: int, into: int) -> None:
        """Returns when the first `size` bytes of the file are in the data file of the number
        `into`, which is no file's yet. Cancelled: they come all the same; ask again with the same
        words.

        Raises Stale, NotFound (it has gone), Conflict (it is written to all the time), Unavailable
        (nobody who has it answers), Invalid (`into` is somebody's), OSError.
        """
        loan = self._loans.get(into)
        if loan is None:
            loan = self._begin(ino, size, into)
        await loan.ended.wait()
        self._loans.pop(into, None)
        if loan.error is not None:
            raise loan.error

    def _begin(self, ino: int, size: int, into: int) -> _Loan:
        if self._nursery is None:
            raise Unavailable("the node is not ready to bring data from others")
        for done in [each for each, loan in self._loans.items() if loan.ended.is_set()]:
            del self._loans[done]  # nobody came back to ask
        loan = self._loans[into] = _Loan()
        self._nursery.start_soon(self._drive, loan, ino, size, into)
        return loan

    async def _drive(self, loan: _Loan, ino: int, size: int, into: int) -> None:
        turn = self._turns.setdefault(ino, trio.Lock())
        try:
            async with turn:
                await self._fill(ino, size, into)
        except (KvfsError, OSError) as error:
            loan.error = error
        except BaseException:
            loan.error = Unavailable("the node stops")
            raise
        finally:
            loan.ended.set()

    async def _fill(self, ino: int, size: int, into: int) -> None:
        await self._engine.read(lambda t: _check_unused(t, into))
        fd = self._files.open(into, 0, os.O_RDWR)
        try:
            for attempt in range(_ATTEMPTS):
                os.ftruncate(fd, 0)
                os.ftruncate(fd, size)
                try:
                    await self._fetch(ino, size, fd)
                    return
                except Conflict:
                    if attempt == _ATTEMPTS - 1:
                        raise
                await trio.sleep(_PAUSE_S)
        finally:
            os.close(fd)

    async def _fetch(self, ino: int, size: int, fd: int) -> None:
        inode, nodes = await self._engine.read(lambda t: _look(t, ino))
        if not nodes:
            raise NotFound(f"inode {ino:x}: no other node has its data")
        wanted = msgspec.structs.replace(inode, size=size)
        arriving = self.fetch(ino, wanted, nodes, fd) if self.fetch is not None else None
        if arriving is None:
            raise Unavailable(f"inode {ino:x}: the nodes that have its data do not run")
        try:
            await arriving.whole()
        finally:
            arriving.close()


def _look(t: Transaction, ino: int) -> tuple[Inode, list[int]]:
    """The record of a file, and the other nodes that have its data."""
    nodes = [keys.unpack_node(each.node) for each in placements.holders(t, ino) if each.whole]
    return read_inode(t, ino), [node for node in nodes if keys.pack_node(node) != t.node]


def _check_unused(t: Transaction, ino: int) -> None:
    """A body in the making has a reserved number, or a record without a name."""
    if t.get(keys.reserved(ino)) is None and t.get(keys.orphan(ino)) is None:
        raise Invalid(f"inode {ino:x} is a file's: nothing is brought into it")
