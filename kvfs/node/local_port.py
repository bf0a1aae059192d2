"""The node's port in its own process: what doors ask of it and tell it, done by its parts.

The data of a file whose data file is not here are fetched on request (`bring`): `here` (the wanted
part can be read), `coming` (ask again) or `nowhere` (this node has no other to ask). `borrow`
fetches the first bytes of a data file into another one, which the caller has begun (see there).
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, Protocol

import trio

from kvfs.datastore.index import Index
from kvfs.meta import keys
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.records import Flag
from kvfs.node.tasks.eviction.evictor import Evictor
from kvfs.node.tasks.sealer import Sealer
from kvfs.transfer.transfers import Transfers
from kvfs.tree.changes import Change
from kvfs.tree.copies import placements
from kvfs.tree.copies.told_names import AskedPage, Detail, ToldPage
from kvfs.tree.inodes import read_inodes
from kvfs.vfs.inode_holders import Holders
from kvfs.vfs.miss_counters import no_misses
from kvfs.vfs.missing_data import Missing
from kvfs.vfs.port import Name, SpaceGrant, State

_LOOK_S: Final = 0.25
_PATIENCE_S: Final = 5.0
"""Patience of a request, less than that of its caller."""


class OtherNames(Protocol):
    """The names of other nodes; see the methods of `NodePort`."""

    async def find(self, names: Sequence[Name]) -> bool: ...

    async def listed(self, asked: Sequence[AskedPage], detail: Detail) -> list[ToldPage]: ...

    async def may_remove(self, directory: int) -> bool: ...


class NoOthers:
    """No other node keeps names."""

    async def find(self, _names: Sequence[Name]) -> bool:
        return False

    async def listed(self, asked: Sequence[AskedPage], _detail: Detail) -> list[ToldPage]:
        return [ToldPage([])] * len(asked)

    async def may_remove(self, _directory: int) -> bool:
        return True


class LocalPort:
    """The port of one node (see `NodePort`). `tell_mounts` returns when every mount has forgotten
    the names; `drop` lets orphans go that nobody holds."""

    def __init__(
        self,
        engine: Engine,
        index: Index,
        holders: Holders,
        sealer: Sealer,
        evictor: Evictor,
        transfers: Transfers,
        missing: Missing,
        capacity: Callable[[], int],
        tell_mounts: Callable[[Sequence[Change]], Awaitable[None]],
        drop: Callable[[Sequence[int]], Awaitable[None]],
        names: OtherNames,
    ) -> None:
        self._engine = engine
        self._index = index
        self._holders = holders
        self._sealer = sealer
        self._evictor = evictor
        self._transfers = transfers
        self._missing = missing
        self._capacity = capacity
        self._tell_mounts = tell_mounts
        self._drop = drop
        self._names = names
        self.misses = no_misses()
        """Misses that clients reported."""

    async def changed(
        self,
        changes: Sequence[Change],
        published: Sequence[int] = (),
        dropped: Sequence[int] = (),
    ) -> None:
        if changes:
            await self._tell_mounts(changes)
        if dropped:
            await self._drop(dropped)
        here = await self._engine.read(lambda t: placements.read_here(t, published))
        for ino, inode in zip(published, here, strict=True):
            if inode is not None:  # else it was replaced or removed since, here or elsewhere
                self._sealer.published(ino, inode.version, inode.blocks)

    async def room(self, namespace_id: int, size: int) -> SpaceGrant:
        # The client has seen less room than the last sample had: clients tell nobody of their
        # reservations.
        census = await self._evictor.sample()
        await self._evictor.room_for(namespace_id, size)
        return SpaceGrant(self._capacity(), census.others)

    async def touched(self, inos: Sequence[int], misses: Mapping[str, int]) -> None:
        for ino in inos:
            self._index.touch(ino)
        for reason in self.misses.keys() & misses.keys():  # one of a newer version counts nowhere
            self.misses[reason] += misses[reason]

    async def find(self, names: Sequence[Name]) -> bool:
        return await self._names.find(names)

    async def listed(self, asked: Sequence[AskedPage], detail: Detail) -> list[ToldPage]:
        return await self._names.listed(asked, detail)

    async def may_remove(self, directory: int) -> bool:
        return await self._names.may_remove(directory)

    async def bring(self, ino: int) -> State:
        return await self._bring(ino, lambda: self._transfers.bring(ino))

    async def bring_span(self, ino: int, version: int, offset: int, length: int) -> State:
        return await self._bring(
            ino, lambda: self._transfers.bring_span(ino, version, offset, length)
        )

    async def _bring(self, ino: int, bring: Callable[[], Awaitable[None]]) -> State:
        await self._missing.settle(ino)
        return await _within_patience(bring) if self._transfers.is_possible else "nowhere"

    async def borrow(self, ino: int, size: int, into: int) -> State:
        if not self._transfers.is_shared:
            return "nowhere"
        return await _within_patience(lambda: self._transfers.borrow(ino, size, into))

    async def is_written(self, ino: int) -> bool:
        return self._holders.writes(ino)

    async def seal(self, inos: Sequence[int]) -> bool:
        with trio.move_on_after(_PATIENCE_S):
            here, elsewhere = await self._engine.read(lambda t: _unsealed(t, inos))
            if here:
                await self._sealer.seal_first(here)
            while elsewhere:  # by the nodes that wrote them
                await trio.sleep(_LOOK_S)
                _, elsewhere = await self._engine.read(lambda t: _unsealed(t, inos))
            return True
        return False


async def _within_patience(bring: Callable[[], Awaitable[None]]) -> State:
    with trio.move_on_after(_PATIENCE_S):
        await bring()
        return "here"
    return "coming"


def _unsealed(t: Transaction, inos: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns the files that this node is to seal, and those that other nodes are."""
    here: list[int] = []
    elsewhere: list[int] = []
    for ino, inode in zip(inos, read_inodes(t, inos), strict=True):
        if inode is not None and inode.nlink and not inode.flags & Flag.SEALED:
            (here if t.get(keys.unsealed(ino)) == t.node else elsewhere).append(ino)
    return here, elsewhere
