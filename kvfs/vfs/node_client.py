"""A client's messages to the node of its store, if one runs.

Without a node there is no mount, and nobody holds files that a client removes: a socket that is
missing, or refuses, shows that for the moment after it was asked. A mount that is made later cannot
have seen what was gone before. A node that does not answer may be stopped while its mount's kernel
shows what it remembers: then the client makes the kernel forget itself.
"""

import enum
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar

import trio

from kvfs.base import fuse_device
from kvfs.base.control import NoNode
from kvfs.base.errors import Unavailable
from kvfs.session.node_return import NodeReturn
from kvfs.tree.changes import Change
from kvfs.tree.copies.told_names import AskedPage, Detail, ToldPage
from kvfs.vfs import kernel_notify
from kvfs.vfs.control_port import ControlPort, answer
from kvfs.vfs.port import Name, SpaceGrant, State

T = TypeVar("T")
_STAND_IN_S: Final = 2.0
_RETURN_S: Final = 60.0
"""The longest wait for another daemon; the mount that waits for it may end before."""
_CHANGES_IN_A_REQUEST: Final = 1_000
_NAMES_IN_A_REQUEST: Final = 256
_NUMBERS_IN_A_REQUEST: Final = 8_192


class Told(enum.Enum):
    """The receiver of a change."""

    NODE = "the node"
    KERNEL = "the kernel of the node's mount, in place of a node that did not answer"
    """The node's own part is still to be done: it has the notice."""
    NOBODY = "no node runs"


class NodeClient:
    """The node behind one control socket, as a process beside it reaches it; any thread."""

    def __init__(self, socket: Path) -> None:
        self._run = socket.parent
        self._port = ControlPort(socket)
        self.expire = self._port.expire

    def close(self) -> None:
        """Closes the connection to the node; a caller that asks on makes one each time."""
        self._port.close()

    def tell(
        self, changes: Sequence[Change], published: Sequence[int], dropped: Sequence[int] = ()
    ) -> Told:
        """Returns when the kernels of all mounts have forgotten these names, and the node, if it
        answered, knows these new files, and the inodes that lost their last link under names that
        no kernel knew.

        Raises Unavailable when a node runs that has not answered in time, and its mount could not
        be made to forget without it.
        """
        most = max(len(changes), len(published), len(dropped))
        for start in range(0, most, _CHANGES_IN_A_REQUEST):
            part = slice(start, start + _CHANGES_IN_A_REQUEST)
            try:
                answer(self._port.changed(changes[part], published[part], dropped[part]))
            except NoNode:
                return Told.NOBODY
            except Unavailable as error:
                if names := changes[start:]:
                    self._stand_in(names, error)
                return Told.KERNEL
        return Told.NODE

    async def tell_in_loop(
        self, changes: Sequence[Change], published: Sequence[int], dropped: Sequence[int] = ()
    ) -> Told:
        """Does what `tell` does, in an event loop, which calls `expire` now and then. Cancelled:
        the node is told all the same."""
        if max(len(changes), len(published), len(dropped)) > _CHANGES_IN_A_REQUEST:
            with trio.CancelScope(shield=True):
                return await trio.to_thread.run_sync(self.tell, changes, published, dropped)
        try:
            await self._port.changed_in_loop(changes, published, dropped)
        except NoNode:
            return Told.NOBODY
        except Unavailable as error:
            if changes:
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(self._stand_in, changes, error)
            return Told.KERNEL
        return Told.NODE

    def _stand_in(self, changes: Sequence[Change], error: Unavailable) -> None:
        """Makes the mount's kernel forget in the node's place. Raises Unavailable."""
        why = "its process is not known"
        if self._port.node_pid:
            messages = kernel_notify.at_once(changes)
            why = fuse_device.write_for(self._port.node_pid, messages, _STAND_IN_S)
        if why:
            raise Unavailable(
                "the change is committed, but the node did not say in time that its mount has "
                "forgotten what was there, and could not be stood in for: the mount may show that "
                f"for a while ({error}; {why})"
            ) from None

    def ask_for_room(self, namespace_id: int, size: int) -> SpaceGrant | None:
        """Waits until the namespace has space for `size` bytes more; None: no node runs.

        Raises NoSpace, naming what is full; Unavailable when the node does not answer in time.
        """
        return _if_any(self._port.room(namespace_id, size))

    def find(self, names: Sequence[Name]) -> bool:
        """Looks on other nodes for names in namespaces whose names are each node's own; returns
        whether another look at the records here may find one. If no node runs, or it does not
        answer in time, the rest are misses."""
        is_news = False
        try:
            for start in range(0, len(names), _NAMES_IN_A_REQUEST):
                part = names[start : start + _NAMES_IN_A_REQUEST]
                is_news = answer(self._port.find(part)) or is_news
        except Unavailable:  # NoNode too
            return is_news
        return is_news

    def listed(self, asked: Sequence[AskedPage], detail: Detail) -> list[ToldPage]:
        """Returns what other nodes have of these parts of directories. If no node runs, or it does
        not answer in time, that is nothing."""
        try:
            return answer(self._port.listed(asked, detail))
        except Unavailable:  # NoNode too
            return [ToldPage([])] * len(asked)

    def may_remove(self, directory: int) -> bool:
        """Returns whether no other node is known to have a file below a directory that is to be
        removed."""
        try:
            return answer(self._port.may_remove(directory))
        except Unavailable:  # NoNode too
            return True

    def bring(self, ino: int) -> bool:
        """Returns when the file's data are on this host. False: they are on no other, or no node
        runs.

        Raises NotFound, Stale, Conflict, Corrupt, NoSpace; Busy while they are written in place on
        another host; Unavailable if no node that has them answers."""
        return self._is_here(lambda: self._port.bring(ino))

    def bring_span(self, ino: int, version: int, offset: int, length: int) -> bool:
        """Like `bring`, for some bytes of one content: returns when they can be read here."""
        return self._is_here(lambda: self._port.bring_span(ino, version, offset, length))

    def borrow(self, ino: int, size: int, into: int) -> bool:
        """Returns when the first `size` bytes of a data file that another node has are in the data
        file of a body of ours. False: there are no other nodes, or none runs here. Raises what
        `bring` raises."""
        return self._is_here(lambda: self._port.borrow(ino, size, into))

    def _is_here(self, ask: Callable[[], Coroutine[Any, Any, State]]) -> bool:
        """Asks until the data are here or nowhere; also the next daemon, where the node's mount
        waits for that."""
        returning = NodeReturn(self._run, time.monotonic() + _RETURN_S)
        try:
            while (state := returning.ask(lambda: answer(ask()))) == "coming":
                pass
        except NoNode:
            return False
        return state == "here"

    def is_written(self, ino: int) -> bool:
        """Returns whether the file is open for writing on the node's mounts; a node that does not
        run has none. Raises Unavailable."""
        return bool(_if_any(self._port.is_written(ino)))

    def seal(self, inos: Sequence[int], until: float) -> bool:
        """Returns True when the node sealed each of these files, or tried to: then it is in use.
        False: not by `until` (time.monotonic), or no node runs. Raises Unavailable."""
        while time.monotonic() < until:
            tried = _if_any(self._port.seal(inos))
            if tried is None:
                return False
            if tried:
                return True
        return False

    def touched(self, inos: Iterable[int], misses: Mapping[str, int]) -> bool:
        """Tells that these files were read, in this order, and so many names were missed. False: no
        node runs, or it is busy."""
        rest = iter(inos)
        try:
            while (part := list(islice(rest, _NUMBERS_IN_A_REQUEST))) or misses:
                answer(self._port.touched(part, misses))
                misses = {}
        except Unavailable:  # NoNode too
            return False
        return True


def _if_any(call: Coroutine[Any, Any, T]) -> T | None:
    """Returns the node's answer; None if no node runs."""
    try:
        return answer(call)
    except NoNode:
        return None
