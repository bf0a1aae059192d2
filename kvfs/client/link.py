"""What a client says to the node of its store, if one runs.

No node means no mount, and nobody who holds what a client removes: a socket that is missing, or
refuses, says so for the moment after it was asked. A mount that is made later cannot have seen what
was gone before.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec

from kvfs import control
from kvfs.changes import Change, to_wire
from kvfs.errors import Unavailable

_DEADLINE_S: Final = 10.0
_ROOM_DEADLINE_S: Final = 15.0
"""The node itself looks for room for ten seconds."""
_CHANGES_IN_A_REQUEST: Final = 1_000
_NUMBERS_IN_A_REQUEST: Final = 8_192


class Room(msgspec.Struct):
    """The node's answer to a request for space."""

    capacity_bytes: int
    """What the store may hold in all, as the node is set."""


class Link:
    """To the node behind one control socket; any thread."""

    def __init__(self, socket: Path) -> None:
        self._node = control.Caller(socket)

    def close(self) -> None:
        """Close the connection to the node; it is made again when needed."""
        self._node.close()

    def tell(self, changes: Sequence[Change], published: Sequence[int]) -> bool:
        """The kernels of all mounts have forgotten these names when it returns, and the node knows
        these new files (inode numbers).

        False: no node runs. Raises Unavailable when one does and has not answered in time.
        """
        for start in range(0, max(len(changes), len(published)), _CHANGES_IN_A_REQUEST):
            part = slice(start, start + _CHANGES_IN_A_REQUEST)
            params = {"changes": to_wire(changes[part]), "published": published[part]}
            try:
                self._node.call("changed", params, _DEADLINE_S)
            except control.NoNode:
                return False
            except Unavailable as error:
                raise Unavailable(
                    "the change is committed, but the node did not say in time that its mount has "
                    f"forgotten what was there: the mount may show that for a while ({error})"
                ) from None
        return True

    def ask_for_room(self, namespace_id: int, size: int) -> Room | None:
        """Wait until the namespace has room for `size` bytes more; None: no node runs.

        Raises NoSpace, naming what is full; Unavailable when the node does not answer in time.
        """
        params = {"namespace": namespace_id, "bytes": size}
        answer = self._ask("room", params, _ROOM_DEADLINE_S)
        return None if answer is None else msgspec.convert(answer, Room)

    def touched(self, inos: Iterable[int]) -> bool:
        """These files were read, in this order. False: no node runs, or it is busy."""
        rest = iter(inos)
        try:
            while part := list(islice(rest, _NUMBERS_IN_A_REQUEST)):
                if self._ask("touched", {"inodes": part}, _DEADLINE_S) is None:
                    return False
        except Unavailable:
            return False
        return True

    def _ask(self, method: str, params: dict[str, Any], deadline_s: float) -> Any:
        try:
            return self._node.call(method, params, deadline_s)
        except control.NoNode:
            return None
