"""The mover: a process that holds Mooncake's transfer engine for its node.

    python -m kvfs.transfer.rdma.engine_process SOCKET MEMORY BYTES HOST VERSION

Socket and memory are inherited descriptors. VERSION is that of the node's messages: if it differs
from this program's, the program was replaced beneath the running node.

It first sends its identity (HELLO, or one line that begins with `!` and says why it cannot run),
then answers each request, in any order, and ends with its socket, or with its node, whose end of
that the kernel may keep open. It imports little of KVFS: its interpreter needs the engine alone.
"""

import contextlib
import ctypes
import mmap
import os
import queue
import select
import socket
import struct
import sys
import threading
from pathlib import Path
from typing import Any, Final

from kvfs.base.processes import OtherProcess
from kvfs.transfer.rdma import port_guard

READ: Final = 0
ADMIT: Final = 1
REQUEST: Final = struct.Struct("<BxxxIQQQ")
"""A request: kind, its number, the place in the memory, the remote address, how many bytes; then
the name of the remote mover. To admit: the hosts, with spaces between them."""
ANSWER: Final = struct.Struct("<Ii")
"""The number of the request, and 0 if it was done."""
HELLO: Final = struct.Struct("<8sHQ")
"""The kind of the engine, its port, and the address of the memory."""
VERSION: Final = 1
"""The version of these messages; grows by one when any of them changes."""
MESSAGE_BYTES: Final = 64 << 10
THREADS: Final = 4
_LOOK_S: Final = 1.0
"""Interval of checks whether the node has ended."""
_DEVICES: Final = Path("/sys/class/infiniband")
_WITHOUT_DEVICE: Final = "tcp"
_WITH_DEVICE: Final = "rdma"


def main() -> None:
    node = socket.socket(fileno=int(sys.argv[1]))
    parent = os.getppid()
    try:
        if sys.argv[5:] != [str(VERSION)]:
            raise OSError("the program was replaced beneath the running node: restart the node")
        memory = mmap.mmap(int(sys.argv[2]), int(sys.argv[3]))
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        engine, hello = _start(base, len(memory), sys.argv[4])
        node.send(hello)
        _Serving(node, engine, base).run(OtherProcess(parent))
    except (ImportError, OSError) as error:
        with contextlib.suppress(OSError):  # the node has ended
            node.send(b"!" + str(error).encode()[:1000])
    os._exit(0)  # without the engine's own end, which waits for what is under way


def _start(base: int, size: int, host: str) -> tuple[Any, bytes]:
    """Returns the engine, and its HELLO. Raises ImportError, OSError."""
    from mooncake.engine import TransferEngine

    kind = _WITH_DEVICE if _DEVICES.is_dir() and any(_DEVICES.iterdir()) else _WITHOUT_DEVICE
    engine = TransferEngine()
    if engine.initialize(host, "P2PHANDSHAKE", kind, ""):
        raise OSError(f"the transfer engine does not start over {kind} at {host}")
    if port_guard.admit([]):
        raise OSError("its ports cannot be guarded")
    if engine.register_memory(base, size):
        raise OSError(f"the transfer engine does not take {size} bytes of memory")
    return engine, HELLO.pack(kind.encode(), engine.get_rpc_port(), base)


class _Serving:
    """Serves the node's requests, by a few threads."""

    def __init__(self, node: socket.socket, engine: Any, memory: int) -> None:
        self._node = node
        self._engine = engine
        self._memory = memory
        self._requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def run(self, parent: OtherProcess) -> None:
        """Serves until the node closes its end, or has ended. The pieces of memory bound the
        queue."""
        for _ in range(THREADS):
            threading.Thread(target=self._work, daemon=True).start()
        while not parent.has_ended():
            ready, _, _ = select.select([self._node.fileno(), parent.pidfd], [], [], _LOOK_S)
            if self._node.fileno() not in ready:
                continue
            request = self._node.recv(MESSAGE_BYTES)
            if not request:
                return
            self._requests.put(request)

    def _work(self) -> None:
        while True:
            request = self._requests.get()
            what, number, at, remote, length = REQUEST.unpack_from(request)
            rest = request[REQUEST.size :].decode()
            if what == ADMIT:
                code = port_guard.admit(rest.split())
            else:
                code = self._engine.transfer_sync_read(rest, self._memory + at, remote, length)
            self._node.send(ANSWER.pack(number, code))


if __name__ == "__main__":
    main()
