"""A mount that a holder keeps: asked for by the next daemon, given up by whoever ends it."""

import logging
import os
import socket
import time
from pathlib import Path
from typing import Final, NamedTuple

from gateway.holder.mount_journal import MountJournal
from kvfs.base import control
from kvfs.base.errors import NotSupported
from kvfs.session import node_return

NAME: Final = node_return.SOCKET
_ANSWER_S: Final = 5.0
_PATIENCE_S: Final = 5.0
"""Time for which a daemon that gave the store free may still be ending."""
_PAUSE_S: Final = 0.01
_BACKLOG: Final = 8
_ANSWER_BYTES: Final = 1024
log = logging.getLogger(__name__)


class KeptMount(NamedTuple):
    """A mount without a daemon, which the caller serves from now on."""

    device: int
    journal: MountJournal
    holder: int
    """A pidfd of the process that kept it, which watches over the caller until another does."""


class WaitingMount(NamedTuple):
    """A mount that waits for a daemon which serves it."""

    left_s: int
    """Seconds until it ends."""
    why: str
    """The failure of the last start, for people; empty: there was none."""


def waiting(run: Path) -> WaitingMount | None:
    """Returns the mount of the store that waits for a daemon; None: there is no such mount."""
    answer, _ = _ask(run, b"state")
    word, _, rest = answer.partition(b" ")
    if word != b"waits":
        return None
    left_s, _, why = rest.decode(errors="replace").partition(" ")
    return WaitingMount(int(left_s), why)


def take(run: Path) -> KeptMount | None:
    """Takes the mount that a holder of the store keeps without a daemon; None: there is none. The
    caller has the store's lock. Raises nothing: what cannot be taken is ended."""
    end = time.monotonic() + _PATIENCE_S
    while True:
        answer, fds = _ask(run, b"take")
        if answer != b"busy" or time.monotonic() > end:
            break
        time.sleep(_PAUSE_S)
    if len(fds) != 2:
        for each in fds:
            os.close(each)
        return None
    device, journal = fds
    holder = os.pidfd_open(int(answer.removeprefix(b"given ")))
    try:
        return KeptMount(device, MountJournal(journal), holder)
    except NotSupported as error:
        log.warning("the mount that was kept cannot be taken over: %s", error)
        os.close(journal)
        os.close(device)
        give_up(run)
        os.close(holder)
        return None


def give_up(run: Path) -> None:
    """Ends the mount that a holder keeps without a daemon, or that this process took: its calls
    fail then. That of a daemon that lives ends with it from now on. Does nothing where no holder
    is."""
    _ask(run, b"abort", f"{NAME}.new")  # of one that was started and does not run yet
    _ask(run, b"abort")


def expect(run: Path) -> None:
    """Tells the holder of this daemon's mount that the next daemon runs already, and asks for it
    once this one has ended."""
    _ask(run, b"expect")


def _ask(run: Path, word: bytes, name: str = NAME) -> tuple[bytes, list[int]]:
    """Returns the answer of the store's holder, and the descriptors with it; nothing if there is
    none that may be asked."""
    try:
        with control.connect_trusted(run / name, socket.SOCK_SEQPACKET, _ANSWER_S) as peer:
            peer.send(word)
            answer, fds, _, _ = socket.recv_fds(peer, _ANSWER_BYTES, 2)
            return answer, fds
    except OSError:
        return b"", []


def listening(run: Path) -> socket.socket:
    """Returns the socket of a new holder, `holder.sock.new` until that runs. Raises OSError."""
    return control.listen_privately(run / f"{NAME}.new", socket.SOCK_SEQPACKET, _BACKLOG)
