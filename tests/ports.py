"""Ports of the loopback for servers that tests start."""

import contextlib
import random
import socket
from pathlib import Path
from typing import Final

_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST: Final = 12_000
_draw: Final = random.SystemRandom()


def free_port() -> int:
    """A port at which nobody listens. The kernel gives it to nobody who asks for any port, nor to a
    connection: so it is there for a server that has yet to start, or is away for a while."""
    end = min(int(_RANGE.read_text().split()[0]), 1 << 16)
    for _ in range(100):
        port = _draw.randrange(_LOWEST, max(_LOWEST + 1000, end))
        with contextlib.suppress(OSError), socket.socket() as trial:
            trial.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port to be had")
