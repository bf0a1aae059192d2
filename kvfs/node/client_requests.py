"""Requests that clients in other processes of this host make to a node, and notices they could not
deliver.

| method | params | answer |
|---|---|---|
| `changed` | `changes`: names; `published`, `dropped`: inodes | nothing, when mounts forgot them |
| `room` | `namespace`, `bytes` | `capacity_bytes` of the store, when so much is free |
| `touched` | `inodes`, in the order of their use; `misses` by reason | nothing |
| `find` | `names`: directory, name in base64 | `is_news`: whether to look at the records again |
| `list` | `asked`, `detail`: parts of directories | `pages`: what other nodes have of them |
| `may-remove` | `inode` of a directory | `is_empty`: whether other nodes have no file in it |
| `bring` | `inode`; `offset`, `length` of what is wanted first | `state` of its data |
| `borrow` | `inode`, `bytes`; `into`: a number of the client's own | the same |
| `writers` | `inode` | `open`: whether a mount of this node has it open for writing |
| `seal` | `inodes` | `tried`: whether each is sealed by now, or in use; else ask again |

Each is a call of the node's port (`kvfs.vfs.port`), which declares what goes over the socket.

A client that was killed between its commit and `changed` leaves a notice in the engine
(`tree.notices`); the node acts on those that are some seconds old.
"""

import base64
import binascii
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import msgspec

from kvfs.base.control import Handler
from kvfs.base.errors import UNDECODABLE, Invalid
from kvfs.base.retry import Persistence
from kvfs.meta.engine import Engine
from kvfs.tree import notices
from kvfs.tree.changes import Change, from_wire
from kvfs.tree.copies.told_names import AskedPage
from kvfs.vfs.port import (
    METHODS,
    AskedFile,
    AskedFiles,
    BorrowedData,
    ChangedNames,
    DataState,
    FoundNames,
    ListedPages,
    NodePort,
    ReadFiles,
    Removable,
    RemovedDirectory,
    Sealing,
    WantedData,
    WantedNames,
    WantedPages,
    WantedRoom,
    Writing,
)

R = TypeVar("R", bound=msgspec.Struct)
_encode: Final = msgspec.msgpack.Encoder().encode
_asked_pages: Final = msgspec.msgpack.Decoder(list[AskedPage]).decode
_PERIOD_S: Final = 1.0
_OLD_NS: Final = 3_000_000_000
"""Age of a notice on which the node acts: a living client has told by then; and being told twice
does no harm."""
_BATCH: Final = 256
log = logging.getLogger(__name__)


def handlers(port: NodePort) -> dict[str, Handler]:
    """Returns the handlers of these requests by method name, for a ControlServer."""

    async def changed(asked: ChangedNames) -> None:
        await port.changed(from_wire(asked.changes), asked.published, asked.dropped)

    async def touched(asked: ReadFiles) -> None:
        await port.touched(asked.inodes, asked.misses)

    async def find(asked: WantedNames) -> FoundNames:
        names = [(directory, _name(name)) for directory, name in asked.names]
        return FoundNames(await port.find(names))

    async def listed(asked: WantedPages) -> ListedPages:
        pages = await port.listed(_pages(asked.asked), asked.detail)
        return ListedPages(base64.b64encode(_encode(pages)).decode())

    async def may_remove(asked: RemovedDirectory) -> Removable:
        return Removable(await port.may_remove(asked.inode))

    async def bring(asked: WantedData) -> DataState:
        if asked.length < 0:
            return DataState(await port.bring(asked.inode))
        span = asked.version, asked.offset, asked.length
        return DataState(await port.bring_span(asked.inode, *span))

    async def borrow(asked: BorrowedData) -> DataState:
        return DataState(await port.borrow(asked.inode, asked.bytes, asked.into))

    async def writers(asked: AskedFile) -> Writing:
        return Writing(await port.is_written(asked.inode))

    async def seal(asked: AskedFiles) -> Sealing:
        return Sealing(await port.seal(asked.inodes))

    return dict(
        [
            _handler(ChangedNames, changed),
            _handler(WantedRoom, lambda asked: port.room(asked.namespace, asked.bytes)),
            _handler(ReadFiles, touched),
            _handler(WantedNames, find),
            _handler(WantedPages, listed),
            _handler(RemovedDirectory, may_remove),
            _handler(WantedData, bring),
            _handler(BorrowedData, borrow),
            _handler(AskedFile, writers),
            _handler(AskedFiles, seal),
        ]
    )


def _name(encoded: str) -> bytes:
    """Raises Invalid."""
    try:
        return base64.b64decode(encoded, validate=True)
    except binascii.Error:
        raise Invalid("a name is asked for in base64") from None


def _pages(encoded: str) -> list[AskedPage]:
    """Raises Invalid."""
    try:
        return _asked_pages(base64.b64decode(encoded, validate=True))
    except (binascii.Error, *UNDECODABLE):
        raise Invalid("parts of directories are asked for in msgpack, in base64") from None


def _handler(
    kind: type[R], call: Callable[[R], Awaitable[msgspec.Struct | None]]
) -> tuple[str, Handler]:
    async def handle(params: dict[str, Any]) -> dict[str, Any]:
        answer = await call(msgspec.convert(params, kind))
        return {} if answer is None else msgspec.structs.asdict(answer)

    return METHODS[kind], handle


class LeftNotices:
    """The notices that killed clients left, for one node. `tell_mounts` returns when every mount
    has forgotten the names."""

    def __init__(
        self, engine: Engine, tell_mounts: Callable[[Sequence[Change]], Awaitable[None]]
    ) -> None:
        self._engine = engine
        self._tell_mounts = tell_mounts

    async def run(self) -> None:
        """Acts on them, until cancelled."""
        acting = Persistence(log.warning, "mounts may show names that were changed")
        await acting.repeat(self._act_on_notices, _PERIOD_S, first_s=_PERIOD_S)

    async def _act_on_notices(self) -> None:
        before = time.time_ns() - _OLD_NS
        while left := await self._engine.read(lambda t: notices.waiting(t, before, _BATCH)):
            await self._tell_mounts([change for each in left for change in each.changes])
            await self._forget([each.key for each in left])

    async def _forget(self, keys: list[bytes]) -> None:
        await self._engine.transact(lambda t: notices.remove(t, keys))
