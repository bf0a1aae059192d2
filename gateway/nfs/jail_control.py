"""The daemon's part of what the jail's process keeps (`jail_keeper`): views, their locks, and
Ganesha itself, which go on with the next daemon."""

import json
import logging
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from gateway.fuse.views.kept_views import KeptItem
from gateway.nfs.jail_keeper import FDS_MOST, LONGEST
from gateway.nfs.jail_process import VERSION
from kvfs.base import control
from kvfs.base.config import Config

NAME: Final = "jail.sock"
_ANSWER_S: Final = 5.0
_PATIENCE_S: Final = 5.0
"""Time for which a daemon that gave the store free may still be ending."""
_PAUSE_S: Final = 0.01
_BACKLOG: Final = 64
log = logging.getLogger(__name__)


class TakenJail(NamedTuple):
    """A Ganesha without a daemon, which the caller is for from now on."""

    pidfd: int
    """A pidfd of the jail's process."""
    about: dict[str, Any]
    """Facts about it from the daemon before, and the numbers of the processes `jail` and `pid`
    (Ganesha)."""
    items: dict[str, KeptItem]
    """The other things that are kept."""


def wish(config: Config) -> str:
    """Returns what Ganesha was started by: it goes on only with a daemon of the same settings, and
    the same words."""
    return f"{VERSION} {config.nfs} {config.nfs_v3} {config.nfs_mount_port}"


class JailControl:
    """The jail's process of a store. All methods raise OSError if it does not answer."""

    def __init__(self, run: Path) -> None:
        self._path = run / "nfs" / NAME
        self.taken: TakenJail | None = None
        """The one that was taken over, until it is gone on with."""

    def listening(self) -> socket.socket:
        """Returns the socket of a new process."""
        return control.listen_privately(self._path, socket.SOCK_SEQPACKET, _BACKLOG)

    def keep(self, key: str, data: bytes, fds: Sequence[int]) -> None:
        """Like `Keeper.keep`."""
        self._ask(b"keep\0" + key.encode() + b"\0" + data, fds)

    def drop(self, key: str) -> None:
        """Like `Keeper.drop`."""
        self._ask(b"drop\0" + key.encode())

    def begin(self) -> None:
        """Has Ganesha begin."""
        self._ask(b"begin")

    def end(self) -> None:
        """Has Ganesha end, in order while it has a daemon."""
        self._ask(b"end")

    def kill(self) -> None:
        """Has Ganesha end at once: nobody serves its views."""
        self._ask(b"kill")

    def take(self) -> TakenJail | None:
        """Takes over what waits for another daemon; None: nothing does. The caller has the store's
        lock."""
        end = time.monotonic() + _PATIENCE_S
        while True:
            try:
                self.taken = self._taken()
                return self.taken
            except BlockingIOError:
                if time.monotonic() > end:
                    return None
                time.sleep(_PAUSE_S)
            except OSError as error:
                if not isinstance(error, FileNotFoundError | ConnectionRefusedError):
                    log.warning("NFS-Ganesha cannot be taken over: %s", error)
                return None

    def _ask(self, message: bytes, fds: Sequence[int] = ()) -> None:
        with self._connected() as peer:
            socket.send_fds(peer, [message], fds)
            if peer.recv(64) != b"done":
                raise ConnectionAbortedError(f"{self._path}: no answer")

    def _taken(self) -> TakenJail:
        """Raises BlockingIOError while there is a daemon."""
        items: dict[str, KeptItem] = {}
        try:
            with self._connected() as peer:
                peer.send(b"take")
                word, _, about = peer.recv(LONGEST).partition(b"\0")
                if word == b"busy":
                    raise BlockingIOError
                while word == b"given":
                    message, fds, _, _ = socket.recv_fds(peer, LONGEST, FDS_MOST)
                    kind, key, data = message.split(b"\0", 2)
                    if kind == b"end":
                        known = json.loads(about)
                        return TakenJail(os.pidfd_open(known["jail"]), known, items)
                    items[key.decode()] = KeptItem(data, tuple(fds))
            raise ConnectionAbortedError(f"{self._path}: no answer")
        except BaseException:
            for item in items.values():
                for each in item.fds:
                    os.close(each)
            raise

    def _connected(self) -> socket.socket:
        return control.connect_trusted(self._path, socket.SOCK_SEQPACKET, _ANSWER_S)
