"""The node's port over its control socket. Its calls block the thread and never suspend, so that
`answer` has their result without an event loop; `changed_in_loop` alone is for one."""

from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from kvfs.base import control
from kvfs.tree.changes import Change, to_wire
from kvfs.vfs.port import (
    METHODS,
    AskedFile,
    AskedFiles,
    BorrowedData,
    ChangedNames,
    DataState,
    ReadFiles,
    Sealing,
    SpaceGrant,
    State,
    WantedData,
    WantedRoom,
    Writing,
)

T = TypeVar("T")
_DEADLINE_S: Final = 10.0
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
        self._ask(ChangedNames(to_wire(changes), list(published), list(dropped)))

    async def changed_in_loop(
        self, changes: Sequence[Change], published: Sequence[int], dropped: Sequence[int]
    ) -> None:
        """Does what `changed` does, and suspends while the node does its part: for an event loop,
        which calls `expire` now and then. When it is cancelled, the node is told all the same."""
        request = ChangedNames(to_wire(changes), list(published), list(dropped))
        method = METHODS[ChangedNames]
        await self._node.ask(method, msgspec.structs.asdict(request), _DEADLINE_S)

    async def room(self, namespace_id: int, size: int) -> SpaceGrant:
        """See `NodePort.room`."""
        found = self._ask(WantedRoom(namespace_id, size), _ROOM_DEADLINE_S)
        return msgspec.convert(found, SpaceGrant)

    async def touched(self, inos: Sequence[int], misses: Mapping[str, int]) -> None:
        """See `NodePort.touched`."""
        self._ask(ReadFiles(list(inos), dict(misses)))

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
