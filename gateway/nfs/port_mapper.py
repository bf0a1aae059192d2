"""Answers NFS-Ganesha's registrations with a port mapper, on a socket that only Ganesha can see.

Version 3 of NFS is registered with rpcbind (RFC 1833) at the start, and Ganesha ends if that is
refused. Here nobody asks a port mapper: clients are given both ports. So Ganesha is told that
everything is registered, and the machine's own rpcbind, which others would ask, hears nothing of
it.
"""

import contextlib
import os
import struct
from pathlib import Path
from typing import Final

import trio

from kvfs.base.descriptors import closing

SOCKET: Final = "rpcbind.sock"
_LAST: Final = 1 << 31
"""The bit of a record's mark for its last fragment; the rest is its length (RFC 5531, 11)."""
_MOST: Final = 4096
_CALLERS: Final = 8
_mark: Final = struct.Struct(">I").unpack
_accepted: Final = struct.Struct(">IIIIIII").pack
"""A reply to a call that was accepted: its number, REPLY, MSG_ACCEPTED, a verifier without a body,
SUCCESS, then the result."""
_TRUE: Final = 1


async def serve(
    directory: Path, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Serves until cancelled; started when it can be asked. Raises OSError."""
    listener = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
    with listener:
        # The path of a store may be longer than a socket's address can be.
        with closing(os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as number:
            with contextlib.suppress(FileNotFoundError):  # that of an earlier daemon
                os.unlink(SOCKET, dir_fd=number)
            await listener.bind(f"/proc/self/fd/{number}/{SOCKET}")
        listener.listen(_CALLERS)
        limit = trio.CapacityLimiter(_CALLERS)
        async with trio.open_nursery() as nursery:
            task_status.started()
            while True:
                caller, _ = await listener.accept()
                nursery.start_soon(_answer, caller, limit)


async def _answer(caller: trio.socket.SocketType, limit: trio.CapacityLimiter) -> None:
    stream = trio.SocketStream(caller)
    async with limit, stream:
        try:
            while (head := await _exactly(stream, 4)) is not None:
                size = _mark(head)[0] & ~_LAST
                if not 4 <= size <= _MOST:
                    return
                call = await _exactly(stream, size)
                if call is None:
                    return
                reply = _accepted(_mark(call[:4])[0], 1, 0, 0, 0, 0, _TRUE)
                await stream.send_all((_LAST | len(reply)).to_bytes(4, "big") + reply)
        except trio.BrokenResourceError:
            return


async def _exactly(stream: trio.SocketStream, count: int) -> bytes | None:
    """Returns so many bytes; None if the stream ends before."""
    received = b""
    while len(received) < count:
        part = await stream.receive_some(count - len(received))
        if not part:
            return None
        received += part
    return received
