"""Whether another daemon follows one that has ended: its mount outlives it, and is kept meanwhile.

A process beside the node waits for the next daemon as programs on the mount do. Of the holder that
keeps the mount (`gateway.holder`) it knows the socket alone.
"""

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from kvfs.base import control

T = TypeVar("T")
SOCKET: Final = "holder.sock"
"""The holder's socket, beside the node's."""
_ANSWER_S: Final = 5.0
_PAUSES_S: Final = (0.01, 0.1)
_ANSWERS: Final = (b"waits", b"served")


class NodeReturn:
    """The wait of one request for the next daemon."""

    def __init__(self, run: Path, until: float) -> None:
        """`run`: the directory of the sockets. `until`: time.monotonic() from which on nobody
        waits."""
        self._run = run
        self._until = until
        self._pause_s, self._most_s = _PAUSES_S

    def ask(self, call: Callable[[], T], *, may_repeat: bool = True) -> T:
        """Returns what `call` does, which asks the node; also the next one, where its mount is kept
        for that. `may_repeat`: whether it may be asked again what it may have done. Raises what
        `call` raises. Blocks the thread."""
        while True:
            try:
                return call()
            except control.NoNode:
                if not self._is_awaited():
                    raise
            except control.WentAway:
                if not may_repeat or not self._is_awaited():
                    raise

    def _is_awaited(self) -> bool:
        """Returns True, after a pause, where the mount of a node that does not answer is kept for
        another daemon: the node may be asked again. False: there is no such mount, or it is too
        late."""
        if time.monotonic() + self._pause_s > self._until or not _is_kept(self._run):
            return False
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, self._most_s)
        return True


def _is_kept(run: Path) -> bool:
    try:
        with control.connect_trusted(run / SOCKET, socket.SOCK_SEQPACKET, _ANSWER_S) as holder:
            holder.send(b"state")
            return holder.recv(64).partition(b" ")[0] in _ANSWERS
    except OSError:
        return False
