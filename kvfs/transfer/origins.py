"""The sources of a file's data that this node does not have: nodes that have them, else a cold
tier.

Invariants
- A file of a cache namespace that no living node has is a miss: it is forgotten. One of a durable
  namespace is Unavailable until a holder returns.
- The last closed content of a file that is written in place is held by no node, except those that
  had a copy before. Without them a reader waits, for a bounded time, until the writer has closed
  the file: then its record is another. A file that is not closed by then is Busy, in a cache a
  miss.
- A file whose name is each node's own comes from its holder, or is a miss at once: nobody hears of
  what became of it there.
"""

import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

import trio

from kvfs.base.errors import (
    Busy,
    Conflict,
    Corrupt,
    KvfsError,
    NotFound,
    OtherVersion,
    Unavailable,
    Unreached,
)
from kvfs.meta import keys
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.records import Inode, namespace_of
from kvfs.transfer.peer_fetches import PeerFetches
from kvfs.transfer.transfer import Transfer
from kvfs.tree import namespaces
from kvfs.tree.copies import held_names, placements
from kvfs.tree.copies.replica_counts import whole_holders
from kvfs.tree.inodes import read_inode, read_inodes
from kvfs.vfs.volume import Volume

log = logging.getLogger(__name__)
_LOOKS: Final = 20
_LOOK_S: Final = 0.02
_WRITTEN_S: Final = 3.0
"""Time for which a reader waits until the node that writes a file in place has closed it."""
_BACK_S: Final = 10.0
"""Time for which a node whose daemon has died is waited for, if another daemon follows it."""
Cold = Callable[[int, Inode, int], Awaitable[bytes | None]]
"""Fills a descriptor with an inode's data; returns the checksums of its chunks, None if the tier
does not have it. Raises NotFound, Unavailable."""
LookAgain = Callable[[Sequence[int]], Awaitable[bool]]
"""Looks which of these nodes are there now; returns whether that is news. Raises KvfsError."""


class FileHolders(NamedTuple):
    """The nodes that may have a file."""

    nodes: list[int]
    """The nodes that have all of it, according to the engine."""
    durable: bool


class FileOrigins:
    """The sources that one node knows."""

    def __init__(
        self,
        engine: Engine,
        volume: Volume,
        *,
        peers: PeerFetches | None = None,
        look_again: LookAgain | None = None,
        returns: Callable[[Sequence[int]], bool] = lambda _nodes: False,
        cold: Cold | None = None,
        stale: Callable[[int], None] = lambda _ino: None,
        cold_names: Cold | None = None,
    ) -> None:
        """`peers` and `look_again`: for a node of a cluster. `returns`: whether one of these nodes
        is about to be back if its daemon has just died. `cold`: for one with a cold tier, and
        `cold_names` does the same for names that are each node's own.
        `stale` is told of a record that was taken over from a node which has not got its data."""
        self._engine = engine
        self._volume = volume
        self._peers = peers
        self._look_again = look_again
        self._returns = returns
        self._cold = cold
        self._stale = stale
        self._cold_names = cold_names

    @property
    def has_any(self) -> bool:
        return self._peers is not None or self._cold is not None

    @property
    def has_peers(self) -> bool:
        return self._peers is not None

    async def fill(self, transfer: Transfer, inode: Inode) -> bytes:
        """Returns the checksums of the chunks when all are in the transfer's file. Raises what
        `Transfer.span` raises."""
        ino, version = transfer.wanted.ino, transfer.wanted.version
        if self._engine.is_local(namespace_of(ino)):
            return await self._fill_from_holder(transfer, inode)
        tried: set[int] = set()
        failure: KvfsError | None = None
        began = trio.current_time()
        deadline = began + _WRITTEN_S
        while True:
            found = await self._engine.read(lambda t: _found(t, ino, version))
            nodes = [node for node in found.nodes if node not in tried]
            tried.update(nodes)
            try:
                if nodes and await self._from_nodes(transfer, nodes):
                    return transfer.sums
                if not nodes and not await self._is_news(found.nodes, tried):
                    break
            except NotFound:  # they let it go meanwhile: perhaps others have it, or other content
                await self._settled(ino, inode)
                continue
            except Busy as error:
                if trio.current_time() >= deadline:
                    if found.durable:
                        raise
                    raise _miss(error) from error
                await self._settled(ino, inode)
                tried.clear()
                continue
            except (Unavailable, Corrupt) as error:
                if await self._is_news(found.nodes, tried):
                    continue
                if found.durable and self._is_waited_for(found.nodes, error, began):
                    await self._settled(ino, inode)
                    tried.clear()
                    continue
                failure = error
                break
        inode = await self._still(ino, inode)  # who let it go may have sent it there meanwhile
        sums = await self._from_cold(transfer, inode, durable=found.durable)
        if sums is not None:
            return sums
        if failure is None:
            raise await self._lost(ino, inode, found)
        raise failure if found.durable else _miss(failure) from failure

    async def _fill_from_holder(self, transfer: Transfer, inode: Inode) -> bytes:
        """Does what `fill` does for a record that was taken over. Raises NotFound, and forgets the
        record, if its holder does not give the data."""
        ino = transfer.wanted.ino
        found = await self._engine.read(lambda t: _found(t, ino, inode.version))
        nodes = [node for node in found.nodes if node != held_names.COLD]
        try:
            if nodes and await self._from_nodes(transfer, nodes):
                return transfer.sums
        except Busy as error:
            raise _miss(error) from error
        except (NotFound, Conflict, Unavailable, Corrupt) as error:
            log.debug("%s does not come: %s", os.fsdecode(inode.name), error)
        try:
            if self._cold_names is not None:
                sums = await self._cold_names(ino, inode, transfer.fd)
                if sums is not None:
                    return sums
        except Unavailable as error:
            log.debug("%s does not come: %s", os.fsdecode(inode.name), error)
        self._stale(ino)
        raise await self._lost(ino, inode, found)

    def _is_waited_for(self, nodes: Sequence[int], error: KvfsError, since: float) -> bool:
        """Returns whether a node that does not answer is about to be back, and nothing else has the
        data."""
        is_silent = isinstance(error, Unavailable) and self._cold is None
        return is_silent and trio.current_time() < since + _BACK_S and self._returns(nodes)

    async def _is_news(self, nodes: Sequence[int], tried: set[int]) -> bool:
        """Returns whether one of these nodes has come up, or moved, since its lease was last looked
        at: then they are tried again. A file is not given up while that is unknown."""
        if not nodes or self._look_again is None or not await self._look_again(nodes):
            return False
        tried.clear()
        return True

    async def _settled(self, ino: int, inode: Inode) -> None:
        """Waits a moment until this node has heard what the holders know already, or until the
        writer of the file has closed it. Raises Conflict if the file has another content."""
        for _ in range(_LOOKS):
            await self._still(ino, inode)
            await trio.sleep(_LOOK_S)

    async def _still(self, ino: int, inode: Inode) -> Inode:
        """Returns the record as it is now. Raises Conflict if the file has another content."""
        now = (await self._engine.read(lambda t: read_inodes(t, [ino])))[0]
        if now is None or now.version != inode.version:
            raise Conflict(f"{os.fsdecode(inode.name)}: it was written on another node")
        return now

    async def _from_nodes(self, transfer: Transfer, nodes: Sequence[int]) -> bool:
        """Returns False if none of them is alive."""
        if self._peers is None or not (living := self._peers.living(nodes)):
            return False
        transfer.begin_anew(transfer.wanted)
        await self._peers.fill(transfer, living)
        return True

    async def _from_cold(self, transfer: Transfer, inode: Inode, *, durable: bool) -> bytes | None:
        """Returns None if the tier does not have it. While the tier is away, a cache's file is a
        miss, and stays for when the tier is back."""
        if self._cold is None:
            return None
        try:
            return await self._cold(transfer.wanted.ino, inode, transfer.fd)
        except Unavailable as error:
            raise error if durable else _miss(error) from error
        except NotFound:
            return None

    async def _lost(self, ino: int, inode: Inode, found: FileHolders) -> KvfsError:
        """Returns the error for a file that no living node has."""
        lost = await self._volume.give_up(
            ino, inode, asks_tier=self._cold is not None, away=found.nodes
        )
        if not lost.forgets:
            return lost.error
        gone = NotFound(f"{lost.error}; it is forgotten")  # another look finds that, or what came
        gone.at = keys.file_entry(inode.parent, inode.name)
        return gone

    async def lend(self, transfer: Transfer) -> None:
        """Returns when as much as is wanted of a file that another node goes on writing is in the
        transfer's file, in one version of it. Raises Stale, NotFound, Conflict (it was written to
        meanwhile), Unavailable, OSError."""
        ino = transfer.wanted.ino
        version, nodes = await self._engine.read(lambda t: _written(t, ino))
        if not nodes:
            raise NotFound(f"inode {ino:x}: no other node has its data")
        living = self._peers.living(nodes) if self._peers is not None else []
        if not living:
            raise Unavailable(f"inode {ino:x}: the nodes that have its data do not run")
        assert self._peers is not None
        transfer.begin_anew(transfer.wanted._replace(version=version))
        await self._peers.fill(transfer, living, hand_on=False)


def _miss(error: KvfsError) -> NotFound:
    """Returns the miss of a cache namespace if nobody answers, or the file is written elsewhere."""
    kind = OtherVersion if isinstance(error, Busy) else Unreached
    return kind(str(error))


def _found(t: Transaction, ino: int, version: int) -> FileHolders:
    me, found = keys.unpack_node(t.node), whole_holders(t, ino, version)
    return FileHolders([node for node in found if node != me], namespaces.is_durable(t, ino))


def _written(t: Transaction, ino: int) -> tuple[int, list[int]]:
    """Returns the version of a file's record, and the other nodes that have data of it."""
    nodes = [keys.unpack_node(each.node) for each in placements.holders(t, ino) if each.whole]
    return read_inode(t, ino).version, [node for node in nodes if keys.pack_node(node) != t.node]
