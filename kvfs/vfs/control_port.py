"""The node's port over its control socket. Its calls block the thread and never suspend, so that
`answer` has their result without an event loop; `changed_in_loop` alone is for one."""

import base64
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from kvfs.base import control
from kvfs.base.errors import Unavailable
from kvfs.tree.changes import Change, to_wire
from kvfs.tree.copies.told_names import AskedPage, Detail, ToldPage
from kvfs.vfs.port import (
    METHODS,
    AskedFile,
    AskedFiles,
    BorrowedData,
    ChangedNames,
    DataState,
    FoundNames,
    ListedPages,
    Name,
    ReadFiles,
    Removable,
    RemovedDirectory,
    Sealing,
    SpaceGrant,
    State,
    WantedData,
    WantedNames,
    WantedPages,
    WantedRoom,
    Writing,
)

T = TypeVar("T")
_encode: Final = msgspec.msgpack.Encoder().encode
_told_pages: Final = msgspec.msgpack.Decoder(list[ToldPage]).decode
_DEADLINE_S: Final = 10.0
_SILENT_S: Final = 1.0
"""Deadline of what a node is told that did not answer in time the last time: callers do its part
for the mount in its place, and each of them would wait as long as the first did."""
_ROOM_DEADLINE_S: Final = 15.0
"""Deadline of a request for room: the node itself looks for room for ten seconds."""


def answer(call: Coroutine[Any, Any, T]) -> T:
    """Returns the result of a call that never suspends. Raises what the call raises."""
    try:
        call.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("the call waits for an event loop")


class ControlPort:
    """The node behind one control socket; any thread. All methods raise NoNode if none runs, and
    Unavailable if it does not answer in time."""

    def __init__(self, socket: Path) -> None:
        self._node = control.ControlClient(socket)
        self._patience_s = _DEADLINE_S
        """Deadline of the next change that the node is told."""
        self.expire = self._node.expire
        """Ends the waits of event loops whose deadline has passed."""

    def close(self) -> None:
        """Closes the connection to the node; a later request makes a connection for itself."""
        self._node.close()

    @property
    def node_pid(self) -> int:
        """The node's process, once it was asked and if its number is known here; else 0."""
        return self._node.node_pid

    async def changed(
        self,
        changes: Sequence[Change],
        published: Sequence[int] = (),
        dropped: Sequence[int] = (),
    ) -> None:
        """See `NodePort.changed`."""
        request = ChangedNames(to_wire(changes), list(published), list(dropped))
        end = time.monotonic() + self._patience_s
        try:
            self._ask(request, self._patience_s)
        except Unavailable:
            self._note_silence(end)
            raise
        self._patience_s = _DEADLINE_S

    async def changed_in_loop(
        self, changes: Sequence[Change], published: Sequence[int], dropped: Sequence[int]
    ) -> None:
        """Does what `changed` does, and suspends while the node does its part: for an event loop,
        which calls `expire` now and then. When it is cancelled, the node is told all the same."""
        request = ChangedNames(to_wire(changes), list(published), list(dropped))
        method = METHODS[ChangedNames]
        end = time.monotonic() + self._patience_s
        try:
            await self._node.ask(method, msgspec.structs.asdict(request), self._patience_s)
        except Unavailable:
            self._note_silence(end)
            raise
        self._patience_s = _DEADLINE_S

    def _note_silence(self, end: float) -> None:
        """Has the next caller wait less, if the node did not answer until `end`."""
        self._patience_s = _SILENT_S if time.monotonic() >= end else _DEADLINE_S

    async def room(self, namespace_id: int, size: int) -> SpaceGrant:
        """See `NodePort.room`."""
        found = self._ask(WantedRoom(namespace_id, size), _ROOM_DEADLINE_S)
        return msgspec.convert(found, SpaceGrant)

    async def touched(self, inos: Sequence[int], misses: Mapping[str, int]) -> None:
        """See `NodePort.touched`."""
        self._ask(ReadFiles(list(inos), dict(misses)))

    async def find(self, names: Sequence[Name]) -> bool:
        """See `NodePort.find`."""
        asked = [(directory, base64.b64encode(name).decode()) for directory, name in names]
        return msgspec.convert(self._ask(WantedNames(asked)), FoundNames).is_news

    async def listed(self, asked: Sequence[AskedPage], detail: Detail) -> list[ToldPage]:
        """See `NodePort.listed`."""
        request = WantedPages(base64.b64encode(_encode(asked)).decode(), detail)
        found = msgspec.convert(self._ask(request), ListedPages)
        return _told_pages(base64.b64decode(found.pages))

    async def may_remove(self, directory: int) -> bool:
        """See `NodePort.may_remove`."""
        return msgspec.convert(self._ask(RemovedDirectory(directory)), Removable).is_empty

    async def bring(self, ino: int) -> State:
        """See `NodePort.bring`."""
        return self._state(WantedData(ino))

    async def bring_span(self, ino: int, version: int, offset: int, length: int) -> State:
        """See `NodePort.bring_span`."""
        return self._state(WantedData(ino, version, offset, length))

    async def borrow(self, ino: int, size: int, into: int) -> State:
        """See `NodePort.borrow`."""
        return self._state(BorrowedData(ino, size, into))

    async def is_written(self, ino: int) -> bool:
        """See `NodePort.is_written`."""
        return msgspec.convert(self._ask(AskedFile(ino)), Writing).open

    async def seal(self, inos: Sequence[int]) -> bool:
        """See `NodePort.seal`."""
        return msgspec.convert(self._ask(AskedFiles(list(inos))), Sealing).tried

    def _state(self, request: WantedData | BorrowedData) -> State:
        return msgspec.convert(self._ask(request), DataState).state

    def _ask(self, request: msgspec.Struct, deadline_s: float = 0.0) -> Any:
        method = METHODS[type(request)]
        return self._node.call(method, msgspec.structs.asdict(request), deadline_s or _DEADLINE_S)
