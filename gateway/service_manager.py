"""The service manager's protocol (sd_notify(3)): the manager that started this process, systemd
say, hears when it serves, that it is alive, and when it stops.

The manager gives the address of its socket in the environment. Without one nothing is said. No
service waits for its manager: a message that a busy one does not take is lost, so each sign of life
repeats the last state.
"""

import os
import socket
from collections.abc import Mapping, MutableMapping
from typing import Final

import trio

_ADDRESS: Final = "NOTIFY_SOCKET"
_PERIOD: Final = ("WATCHDOG_USEC", "WATCHDOG_PID")
_INTERVAL_S: Final = 10.0
_STARTING_S: Final = 60.0
"""The extension of the start's deadline that each sign of life asks for: a node may wait for its
cluster's engine as long as that takes."""


def is_there(environ: Mapping[str, str]) -> bool:
    """Returns whether one has started this process."""
    return _ADDRESS in environ


class ServiceManager:
    """The manager of this process, if it has one."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        """Takes the manager's variables out of the environment: children are not to speak for this
        process."""
        address = environ.pop(_ADDRESS, "")
        period_us, pid = (environ.pop(name, "") for name in _PERIOD)
        self._interval_s = _INTERVAL_S
        if period_us.isdigit() and pid in ("", str(os.getpid())):
            self._interval_s = min(_INTERVAL_S, int(period_us) / 1e6 / 3)
        self._socket: socket.socket | None = None
        if address.startswith(("/", "@")):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            try:
                # In the abstract namespace a name begins with a zero byte.
                self._socket.connect("\0" + address[1:] if address[0] == "@" else address)
            except OSError:
                self.close()
        self._state = f"EXTEND_TIMEOUT_USEC={_STARTING_S * 1e6:.0f}"

    def close(self) -> None:
        """Says nothing more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def ready(self, text: str) -> None:
        """Says that the service answers; `text` is what the manager shows of it."""
        self._enter(f"READY=1\nSTATUS={text}")

    def stopping(self) -> None:
        """Says that the service ends in order."""
        self._enter("STOPPING=1\nSTATUS=stopping")

    async def keep_alive(self) -> None:
        """Says again and again that the event loop runs, thrice in the manager's period, until
        cancelled. A start that goes on gets more time."""
        while self._socket is not None:
            self._tell(f"WATCHDOG=1\n{self._state}")
            await trio.sleep(self._interval_s)

    def _enter(self, state: str) -> None:
        self._state = state
        self._tell(state)

    def _tell(self, message: str) -> None:
        if self._socket is not None:
            try:
                self._socket.send(message.encode())
            except OSError:  # it has gone, or its queue is full
                pass
