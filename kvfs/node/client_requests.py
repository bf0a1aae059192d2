"""Requests that clients in other processes of this host make to a node, and notices they could not
deliver.

| method | params | answer |
|---|---|---|
| `changed` | `changes`: names; `published`, `dropped`: inodes | nothing, when mounts forgot them |
| `room` | `namespace`, `bytes` | `capacity_bytes` of the store, when so much is free |
| `touched` | `inodes`, in the order of their use; `misses` by reason | nothing |
| `bring` | `inode`; `offset`, `length` of what is wanted first | `state` of its data |
| `borrow` | `inode`, `bytes`; `into`: a number of the client's own | the same |
| `writers` | `inode` | `open`: whether a mount of this node has it open for writing |
| `seal` | `inodes` | `tried`: whether each is sealed by now, or in use; else ask again |

The data of a file whose data file is not here are fetched on request (`bring`): `here` (the wanted
part can be read), `coming` (ask again) or `nowhere` (this node has no other to ask). `borrow`
fetches the first bytes of a data file into another one, which the client has begun (see there).

A client that was killed between its commit and `changed` leaves a notice in the engine
(`tree.notices`); the node acts on those that are some seconds old.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import msgspec
import trio

from kvfs.base.control import Handler
from kvfs.base.retry import Persistence
from kvfs.datastore.index import Index
from kvfs.meta import keys
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.records import Flag
from kvfs.node.tasks.evictor import Evictor
from kvfs.node.tasks.sealer import Sealer
from kvfs.policy.miss_reasons import Reason
from kvfs.transfer.transfers import Transfers
from kvfs.tree import notices
from kvfs.tree.changes import Change, from_wire
from kvfs.tree.inodes import read_inodes
from kvfs.vfs.inode_holders import Holders
from kvfs.vfs.miss_counters import no_misses
from kvfs.vfs.missing_data import Missing

_PERIOD_S: Final = 1.0
_OLD_NS: Final = 3_000_000_000
"""Age of a notice on which the node acts: a living client has told by then; and being told twice
does no harm."""
_BATCH: Final = 256
_LOOK_S: Final = 0.25
_PATIENCE_S: Final = 5.0
"""Patience of a request, less than that of its caller."""
log = logging.getLogger(__name__)


class _Changed(msgspec.Struct):
    changes: list[Any] = []
    published: list[int] = []
    dropped: list[int] = []
    """Inodes that lost their last link, under a name that no mount knew."""


class _Room(msgspec.Struct):
    namespace: int
    bytes: int


class _Touched(msgspec.Struct):
    inodes: list[int]
    misses: dict[Reason, int] = {}


class _Bring(msgspec.Struct):
    inode: int
    version: int = 0
    offset: int = 0
    length: int = -1
    """-1: the whole file, whatever its version is by then."""


class _Writers(msgspec.Struct):
    inode: int


class _Seal(msgspec.Struct):
    inodes: list[int]


class _Borrow(msgspec.Struct):
    inode: int
    bytes: int
    into: int


class Requests:
    """Answers these requests for one node. `tell_mounts` returns when every mount has forgotten the
    names; `drop` lets orphans go that nobody holds."""

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
        self.misses = no_misses()
        """Misses that clients reported."""

    def handlers(self) -> dict[str, Handler]:
        """Returns the handlers by method name, for a ControlServer."""
        return {
            "changed": self._on_changed,
            "room": self._on_room,
            "touched": self._on_touched,
            "bring": self._on_bring,
            "borrow": self._on_borrow,
            "writers": self._on_writers,
            "seal": self._on_seal,
        }

    async def run(self) -> None:
        """Acts on notices that were left behind, until cancelled."""
        acting = Persistence(log.warning, "mounts may show names that were changed")
        while True:
            await trio.sleep(_PERIOD_S)
            await acting.attempt(self._act_on_notices)

    async def _on_changed(self, params: dict[str, Any]) -> dict[str, Any]:
        asked = msgspec.convert(params, _Changed)
        if asked.changes:
            await self._tell_mounts(from_wire(asked.changes))
        if asked.dropped:
            await self._drop(asked.dropped)
        inodes = await self._engine.read(lambda t: read_inodes(t, asked.published))
        for ino, inode in zip(asked.published, inodes, strict=True):
            if inode is not None:
                self._sealer.published(ino, inode.version, inode.blocks)
        return {}

    async def _on_room(self, params: dict[str, Any]) -> dict[str, Any]:
        asked = msgspec.convert(params, _Room)
        # The client has seen less room than the last sample had: clients tell nobody of their
        # reservations.
        census = await self._evictor.sample()
        await self._evictor.room_for(asked.namespace, asked.bytes)
        return {"capacity_bytes": self._capacity(), "others_bytes": census.others}

    async def _on_touched(self, params: dict[str, Any]) -> dict[str, Any]:
        asked = msgspec.convert(params, _Touched)
        for ino in asked.inodes:
            self._index.touch(ino)
        for reason, count in asked.misses.items():
            self.misses[reason] += count
        return {}

    async def _on_bring(self, params: dict[str, Any]) -> dict[str, Any]:
        asked = msgspec.convert(params, _Bring)
        await self._missing.settle(asked.inode)
        if not self._transfers.is_possible:
            return {"state": "nowhere"}
        with trio.move_on_after(_PATIENCE_S):
            if asked.length < 0:
                await self._transfers.bring(asked.inode)
            else:
                await self._transfers.bring_span(
                    asked.inode, asked.version, asked.offset, asked.length
                )
            return {"state": "here"}
        return {"state": "coming"}

    async def _on_borrow(self, params: dict[str, Any]) -> dict[str, Any]:
        asked = msgspec.convert(params, _Borrow)
        if not self._transfers.is_shared:
            return {"state": "nowhere"}
        with trio.move_on_after(_PATIENCE_S):
            await self._transfers.borrow(asked.inode, asked.bytes, asked.into)
            return {"state": "here"}
        return {"state": "coming"}

    async def _on_writers(self, params: dict[str, Any]) -> dict[str, Any]:
        return {"open": self._holders.writes(msgspec.convert(params, _Writers).inode)}

    async def _on_seal(self, params: dict[str, Any]) -> dict[str, Any]:
        asked = msgspec.convert(params, _Seal).inodes
        with trio.move_on_after(_PATIENCE_S):
            here, elsewhere = await self._engine.read(lambda t: _unsealed(t, asked))
            if here:
                await self._sealer.seal_first(here)
            while elsewhere:  # by the nodes that wrote them
                await trio.sleep(_LOOK_S)
                _, elsewhere = await self._engine.read(lambda t: _unsealed(t, asked))
            return {"tried": True}
        return {"tried": False}

    async def _act_on_notices(self) -> None:
        before = time.time_ns() - _OLD_NS
        while left := await self._engine.read(lambda t: notices.waiting(t, before, _BATCH)):
            await self._tell_mounts([change for each in left for change in each.changes])
            await self._forget([each.key for each in left])

    async def _forget(self, keys: list[bytes]) -> None:
        await self._engine.transact(lambda t: notices.remove(t, keys))


def _unsealed(t: Transaction, inos: list[int]) -> tuple[list[int], list[int]]:
    """Returns the files that this node is to seal, and those that other nodes are."""
    here: list[int] = []
    elsewhere: list[int] = []
    for ino, inode in zip(inos, read_inodes(t, inos), strict=True):
        if inode is not None and inode.nlink and not inode.flags & Flag.SEALED:
            (here if t.get(keys.unsealed(ino)) == t.node else elsewhere).append(ino)
    return here, elsewhere
