"""Brings files whose data this node does not have, and drops copies that it need not have.

Invariants
- One content of a file comes once at a time, however many want it. What is borrowed comes for each
  borrower anew: it is right for now only.

The sources of a file: `origins`. A file that came: `arrivals`. Data that others replaced or
removed: `outdated_data`.
"""

import os
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from kvfs.base import media
from kvfs.base.background import Background
from kvfs.base.errors import (
    Conflict,
    Invalid,
    KvfsError,
    NotFound,
    Unavailable,
)
from kvfs.datastore.files import DataFiles
from kvfs.datastore.index import Index
from kvfs.meta import keys
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.records import Flag, Inode
from kvfs.transfer.arrivals import Arrivals
from kvfs.transfer.origins import FileOrigins
from kvfs.transfer.outdated_data import OutdatedData
from kvfs.transfer.transfer import Transfer, WantedFile
from kvfs.tree.copies import placements
from kvfs.tree.copies.replica_counts import whole_holders
from kvfs.tree.inodes import read_inode
from kvfs.vfs.volume import Volume

_ATTEMPTS: Final = 8
_PAUSE_S: Final = 0.25
_LOOK_S: Final = 0.01
_RECORDED_S: Final = 10.0
"""Pause before a file is asked for again that was changed while it came."""
Way = Callable[..., Awaitable[None]]
"""Fills a transfer. Raises why it cannot."""


class Transfers:
    """The transfers to one node."""

    def __init__(
        self,
        engine: Engine,
        files: DataFiles,
        index: Index,
        volume: Volume,
        room: Callable[[int], Awaitable[None]],
        origins: FileOrigins,
    ) -> None:
        """`room` makes room for so many bytes on this node's disk, or raises NoSpace."""
        self._engine = engine
        self._files = files
        self._index = index
        self._volume = volume
        self._room = room
        self._origins = origins
        self.is_shared: Final = origins.has_peers
        """Whether there are other nodes, who may have replaced a file's content."""
        self.outdated: Final = OutdatedData(engine, files, index, volume)
        self._arrivals = Arrivals(
            *(engine, files, index, volume.holders, self.outdated.drop), is_shared=self.is_shared
        )
        self._coming: dict[tuple[int, int], Transfer] = {}
        self._borrowed: dict[int, Transfer] = {}
        """Borrowed content, by the data file that it comes into."""
        self._tasks = Background()

    @property
    def counters(self) -> dict[str, int]:
        return self._arrivals.counters

    @property
    def is_possible(self) -> bool:
        """Whether data can be anywhere else but here."""
        return self._origins.has_any

    @property
    def coming_bytes(self) -> int:
        """Bytes of the files that are on their way and have their room: nobody else may have
        that."""
        return sum(each.wanted.size for each in self._coming.values() if each.has_room)

    @property
    def settles(self) -> bool:
        """Whether files come, or came and are not recorded yet: until they are, none of them can be
        dropped for space."""
        coming = any(each.has_room for each in self._coming.values())
        return coming or len(self._arrivals) > 0

    async def run(self) -> None:
        """Brings what is asked for, until cancelled; what was on its way then is left."""
        self._files.clear_arriving(self._volume.holders.busy)
        await self._tasks.run(self._arrivals.run, self.outdated.run)

    def begin(self, ino: int, inode: Inode) -> Transfer:
        """Begins to bring the data of a published file. Raises Unavailable while the node starts or
        stops."""
        name = ino, inode.version
        transfer = self._coming.get(name)
        if transfer is None:
            checksum = inode.checksum if inode.flags & Flag.SEALED else b""
            transfer = Transfer(WantedFile(ino, inode.version, inode.size, checksum))
            self._start(self._bring, transfer, inode)
            self._coming[name] = transfer
        return transfer

    async def bring(self, ino: int) -> None:
        """Returns when the file's data are here. When it is cancelled, they may come all the same.

        Raises NotFound (also of a file that another node is making: its content comes under the
        version that its record has now), Stale, Unavailable, Corrupt, Conflict (it is written
        elsewhere all the time), Busy (it is open for writing elsewhere, and not closed), NoSpace,
        OSError.
        """
        for attempt in range(_ATTEMPTS):
            inode = await self._engine.read(lambda t: read_inode(t, ino))
            if self._files.has(ino, inode.version):
                return
            if not inode.flags & Flag.PUBLISHED:
                raise NotFound("another node has not closed the file yet")
            try:
                await self.begin(ino, inode).whole()
                return
            except Conflict:
                if attempt == _ATTEMPTS - 1:
                    raise
            await trio.sleep(_PAUSE_S)

    async def recorded(self, ino: int) -> None:
        """Returns when what came of a file is recorded. Raises Unavailable."""
        self._arrivals.hurry()
        with trio.move_on_after(_RECORDED_S):
            while not self._volume.holders.is_recorded(ino):
                await trio.sleep(_LOOK_S)
            return
        raise Unavailable("the data have come, and could not be recorded")

    def record_now(self) -> None:
        """Has files that came a moment ago recorded at once, in place of with others."""
        self._arrivals.hurry()

    async def bring_span(self, ino: int, version: int, offset: int, length: int) -> None:
        """Returns when these bytes of a content can be read, from its data file or from the part
        that has arrived. Raises what `bring` raises, and Conflict if the file has another content
        by now."""
        inode = await self._engine.read(lambda t: read_inode(t, ino))
        if inode.version != version:
            raise Conflict(f"{os.fsdecode(inode.name)}: it was written on another node")
        if not self._files.has(ino, version):
            await self.begin(ino, inode).span(offset, length)

    async def borrow(self, ino: int, size: int, into: int) -> None:
        """Returns when the first `size` bytes of a file that another node has and goes on writing
        are in the data file of the number `into`, which is no file's yet: for an upload that is
        completed on another node than its parts were put on. Nothing is recorded.

        When it is cancelled, they come all the same; ask again with the same arguments. Raises
        Stale, NotFound (it has gone), Conflict (it is written to all the time), Unavailable (nobody
        who has it answers), Invalid (`into` belongs to a file), OSError.
        """
        transfer = self._borrowed.get(into)
        if transfer is None:
            for done in [each for each, lent in self._borrowed.items() if lent.ended.is_set()]:
                del self._borrowed[done]  # nobody came back to ask
            transfer = Transfer(WantedFile(ino, 0, size, b""))
            self._start(self._lend, transfer, into)
            self._borrowed[into] = transfer
        await transfer.ended.wait()
        self._borrowed.pop(into, None)
        await transfer.whole()

    async def let_go(self, ino: int) -> bool:
        """Drops this node's data of a file, unless it is the last one to have them, or they came a
        moment ago; returns whether it did. A program that has the file open here reads on. Raises
        Stale, Unavailable."""
        if not self._volume.holders.is_recorded(ino):
            return False

        def fn(t: Transaction) -> int:
            inode = read_inode(t, ino)
            me = keys.unpack_node(t.node)
            if all(node == me for node in whole_holders(t, ino, inode.version)):
                return -1
            placements.let_go(t, ino, t.node)
            return inode.version

        version = await self._engine.transact(fn)
        if version < 0:
            return False
        await self.outdated.drop([(ino, version)])
        return True

    async def adopt(self, ino: int, version: int, giver: int) -> None:
        """Takes over a file in a store that this node shares with `giver`: its data file stays
        where it is. Raises NotFound (it is not seen here), Stale, Conflict, Unavailable."""
        if not media.is_shared([self._files.medium(ino, version)]):
            raise NotFound("the file is in no store that this node shares")
        blocks = self._files.stat(ino, version).st_blocks
        node = keys.pack_node(giver)
        await self._engine.transact(lambda t: placements.hand_over(t, ino, version, node))
        self._index.add(ino, version, blocks)

    def disown(self, ino: int) -> None:
        """Gives up a file that another node has taken over; its data file stays."""
        self._index.remove([ino])

    def is_coming(self, ino: int) -> bool:
        """Returns whether any content of a file is on its way."""
        return any(name[0] == ino for name in self._coming)

    def share(self, ino: int, version: int) -> float:
        """Returns the share of a data file on its way that is here; negative if it is not on its
        way."""
        transfer = self._coming.get((ino, version))
        return -1.0 if transfer is None else transfer.share

    # ---- the way of one file

    def _start(self, way: Way, transfer: Transfer, *what: object) -> None:
        if not self._tasks.runs:
            raise Unavailable("the node is not ready to bring data from others")
        self._tasks.begin(self._drive, way, transfer, *what)

    async def _drive(self, way: Way, transfer: Transfer, *what: object) -> None:
        error: Exception | None = None
        try:
            await way(transfer, *what)
        except (KvfsError, OSError) as failed:
            error = failed
        except BaseException:
            error = Unavailable("the node stops")
            raise
        finally:
            fd = transfer.fd
            transfer.end(error)
            if fd >= 0:
                os.close(fd)

    async def _bring(self, transfer: Transfer, inode: Inode) -> None:
        ino, version, size, _ = transfer.wanted
        try:
            await self._room(size)
            transfer.has_room = True  # counted at once: nobody else ran since the room was seen
            transfer.begin(self._files.begin_arriving(ino, version, size))
            sums = b""
            if size:
                sums = await self._origins.fill(transfer, inode)
            await self._volume.holders.until_dropped(ino)
            self._arrivals.name(transfer, inode, sums)
        except BaseException:
            self._files.drop_arriving(ino, version)
            raise
        finally:
            del self._coming[ino, version]

    # ---- what is borrowed

    async def _lend(self, transfer: Transfer, into: int) -> None:
        await self._engine.read(lambda t: _check_unused(t, into))
        transfer.begin(self._files.open(into, 0, os.O_RDWR))
        for attempt in range(_ATTEMPTS):
            os.ftruncate(transfer.fd, 0)
            os.ftruncate(transfer.fd, transfer.wanted.size)
            try:
                await self._origins.lend(transfer)
                return
            except Conflict:
                if attempt == _ATTEMPTS - 1:
                    raise
            await trio.sleep(_PAUSE_S)


def _check_unused(t: Transaction, ino: int) -> None:
    """Raises Invalid if the number belongs to a file: a body in the making has a reserved number,
    or a record without a name."""
    if t.get(keys.reserved(ino)) is None and t.get(keys.orphan(ino)) is None:
        raise Invalid(f"inode {ino:x} is a file's: nothing is brought into it")
