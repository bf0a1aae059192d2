"""Bytes that go from one process to another over TCP on this host, as fast as the kernel moves
them: sendfile from a file into the socket, splice through a pipe into another file. What a node
that fetches from another one is measured against.
"""

import contextlib
import fcntl
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NoReturn

_CALL: Final = 1 << 20
_PIPE_SIZE: Final = 1 << 20
_F_SETPIPE_SZ: Final = 1031
_ASKED: Final = struct.Struct("<QQ")
"""Bytes of a file's path, bytes wanted; no path: an answer of so many bytes at once."""


class Sender:
    """The other process. It sends what is asked for."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def transfer(self, source: Path, target: Path) -> float:
        """Seconds that a copy of `source` takes to be in the new file `target`, asking included."""
        size, name = source.stat().st_size, os.fsencode(source)
        with target.open("wb", buffering=0) as file, _pipe() as (reader, writer):
            began = time.perf_counter()
            self._connection.sendall(_ASKED.pack(len(name), size) + name)
            left = size
            while left:
                got = os.splice(self._connection.fileno(), writer, min(left, _CALL))
                if not got:
                    raise ConnectionError("the sender ended")
                left -= got
                while got:
                    got -= os.splice(reader, file.fileno(), got)
            return time.perf_counter() - began

    def round_trip(self) -> float:
        """Seconds from a question of a few bytes to an answer of one."""
        began = time.perf_counter()
        self._connection.sendall(_ASKED.pack(0, 1))
        if not self._connection.recv(1):
            raise ConnectionError("the sender ended")
        return time.perf_counter() - began


@contextlib.contextmanager
def sender() -> Iterator[Sender]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
        child = os.fork()
        if child == 0:
            listening_here = listening
            _send(listening_here)
    try:
        with socket.create_connection(address) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield Sender(connection)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _send(listening: socket.socket) -> NoReturn:
    """The life of the other process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        connection, _ = listening.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while asked := connection.recv(_ASKED.size, socket.MSG_WAITALL):
            length, size = _ASKED.unpack(asked)
            if not length:
                connection.sendall(b"x" * size)
                continue
            with open(connection.recv(length, socket.MSG_WAITALL), "rb") as file:
                sent = 0
                while sent < size:
                    sent += os.sendfile(connection.fileno(), file.fileno(), sent, size - sent)
    finally:
        os._exit(0)


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    try:
        with contextlib.suppress(OSError):
            fcntl.fcntl(writer, _F_SETPIPE_SZ, _PIPE_SIZE)
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)
