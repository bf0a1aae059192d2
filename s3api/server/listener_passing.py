"""Passes the listening sockets of S3 from a running node to the one that takes its place: the port
is never closed, and connections that come meanwhile wait in them.

| step | if a process is killed there |
|---|---|
| 1 the successor listens at a socket of its own in the store's `run/` | nothing has changed |
| 2 it asks the running node, which sends its listeners there | both have them |
| 3 the running node stops; its workers answer what they have begun | the successor has them |
| 4 the successor serves on them | the port is closed, as after any kill |

A node that serves another address, or none, passes nothing on.
"""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from kvfs.base import control
from kvfs.base.config import Config
from kvfs.base.errors import Invalid, NotSupported, Unavailable

METHOD: Final = "pass_s3_listeners"
_NAME: Final = "s3-listeners.sock"
_DEADLINE_S: Final = 5.0
_MOST: Final = 250
"""Descriptors that the kernel passes in one message."""
_LINE: Final = 4096
Listeners = list[list[socket.socket]]
"""The listeners of each worker."""


class _Passed(msgspec.Struct):
    """The words that go along with the descriptors."""

    address: str
    """The setting by which they were opened."""
    count: int


def pass_on(path: str, address: str, listeners: Listeners) -> None:
    """Sends listeners to whoever listens at `path`. Blocks. Raises Invalid, Unavailable."""
    if not path.startswith("/"):
        raise Invalid("the place for listeners is an absolute path")
    fds = sorted({each.fileno() for group in listeners for each in group})  # workers may share one
    told = msgspec.json.encode(_Passed(address, len(fds)))
    try:
        with (
            socket.socket(socket.AF_UNIX) as connection,
            control.socket_address(Path(path)) as at,
        ):
            connection.settimeout(_DEADLINE_S)
            connection.connect(at)
            socket.send_fds(connection, [told], fds)
    except OSError as error:
        raise Unavailable(f"the S3 port could not be passed on: {error}") from error


def take(config: Config) -> list[socket.socket] | None:
    """Returns the listeners of the node that runs on the store; None: none runs there, or it serves
    another address or an earlier version. Blocks. Raises Unavailable."""
    if config.s3 == "off":
        return None
    path = config.store / "run" / _NAME
    if not path.parent.is_dir():
        return None  # of a store that is not made yet
    with contextlib.suppress(control.NoNode, NotSupported), _listening(path) as ours:
        node = config.store / "run" / "control.sock"
        if not control.call(node, METHOD, {"socket": str(path)}, 2 * _DEADLINE_S):
            return None
        connection, _ = ours.accept()  # what was sent waits there
        with connection:
            connection.settimeout(_DEADLINE_S)
            return _received(connection, str(config.s3))
    return None


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    """A socket at `path`, which nobody else may connect to."""
    try:
        listener = control.listen_privately(path, socket.SOCK_STREAM, backlog=1)
    except OSError as error:
        raise Unavailable(f"{path}: {error.strerror or error}") from error
    with listener as ours:
        try:
            ours.settimeout(_DEADLINE_S)
            yield ours
        finally:
            path.unlink(missing_ok=True)


def _received(connection: socket.socket, address: str) -> list[socket.socket] | None:
    data, fds, _, _ = socket.recv_fds(connection, _LINE, _MOST)
    sockets = [socket.socket(fileno=fd) for fd in fds]
    for each in sockets:
        each.set_inheritable(False)
    told = msgspec.json.decode(data, type=_Passed)
    if told.address != address or told.count != len(sockets):
        for each in sockets:
            each.close()
        return None
    return sockets


def shared_out(listeners: list[socket.socket], workers: int) -> Listeners:
    """Returns listeners for so many workers: all of them are served, and each worker has one."""
    if len(listeners) >= workers:
        return [listeners[number::workers] for number in range(workers)]
    return [[listeners[number % len(listeners)]] for number in range(workers)]
