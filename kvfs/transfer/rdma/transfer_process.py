"""The mover of a node, as the node sees it: started, asked, killed if it hangs, started again.

Invariants
- Without a running mover, `kind` is empty and every request gets Unavailable.
- Every request ends: with its answer, with the mover, or after HANG_S, with which the mover ends.
"""

import contextlib
import importlib.util
import ipaddress
import logging
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import trio

from kvfs.base.errors import NotSupported, Unavailable
from kvfs.transfer.rdma import engine_process, port_guard
from kvfs.transfer.rdma.registered_memory import BYTES, Landing, Memory

log = logging.getLogger(__name__)
REMEDY: Final = (
    "pip install 'kvfs[rdma]', with the libraries that Debian calls libibverbs1, libnuma1, libcurl4"
)
HANG_S: Final = 20.0
"""Time for a megabyte. The engine itself gives up bytes that have not moved for _STALL_S."""
_STALL_S: Final = 4
_START_S: Final = 20.0
_PACKAGES: Final = Path(__file__).resolve().parents[3]
_PAUSE_S: Final = 1.0
_SURROUNDINGS: Final = {
    "MC_TCP_PROGRESS_TIMEOUT_SEC": str(_STALL_S),
    "MC_TRANSFER_TIMEOUT": "15",
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "3",
    "MC_LOG_LEVEL": "ERROR",
}
"""The environment of the mover, unless the node's own says otherwise."""


def require() -> None:
    """Raises NotSupported, with the remedy, if the package is missing."""
    if importlib.util.find_spec("mooncake") is None:
        raise NotSupported(f"the transport rdma needs Mooncake's transfer engine: {REMEDY}")


class _Request:
    def __init__(self) -> None:
        self.done = trio.Event()
        self.code = -1
        self.piece: Landing | None = None


class Mover:
    """The mover for one event loop; `run` it."""

    def __init__(self, host: str, interpreter: str = sys.executable) -> None:
        """`host`: the address by which others reach this one. `interpreter`: one that has the
        package."""
        self.memory = Memory()
        self.kind = b""
        """The kind of its engine, `tcp` or `rdma`; empty while there is none."""
        self.port = 0
        self.base = 0
        """The memory's address in the mover."""
        self.reason = "the mover has not been started"
        """The reason why there is none."""
        self.restarts = 0
        self._host = host
        self._command = [interpreter, "-m", engine_process.__name__]
        self._process: trio.Process | None = None
        self._node: trio.socket.SocketType | None = None
        self._requests: dict[int, _Request] = {}
        self._number = 0
        self._admitted: dict[str, None] = {}
        self._admitting = trio.Lock()

    @property
    def pid(self) -> int:
        """The process id; 0 while there is none."""
        return self._process.pid if self._process is not None and self.kind else 0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keeps one running, until cancelled; started when the first one runs. Raises NotSupported
        if that is impossible, with the reason."""
        try:
            async with self._running() as node:
                task_status.started()
                await self._serve(node)
        except Unavailable as error:
            raise NotSupported(f"the transport rdma: {error}; {REMEDY}") from None
        while True:
            log.error("the mover ended; chunks come over TCP until there is another one")
            await trio.sleep(_PAUSE_S)
            self.restarts += 1
            with contextlib.suppress(Unavailable):
                async with self._running() as node:
                    await self._serve(node)

    def kill(self) -> None:
        """Kills it; it is started again."""
        if self._process is not None:
            self._process.kill()

    # --- what it is asked

    async def read(self, piece: Landing, target: str, remote: int, length: int) -> None:
        """Reads so many bytes of another mover's memory into the piece. Raises Unavailable.
        Cancelled: the piece is busy until the mover is done with it."""
        await self._ask(engine_process.READ, piece, remote, length, target.encode())

    async def admit(self, host: str) -> bool:
        """Admits connections from this address to the mover, from now on. False: it is impossible.
        Raises Unavailable."""
        if host in self._admitted:
            return True
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            return False
        async with self._admitting:
            hosts = [*self._admitted, host][-port_guard.MOST :]
            await self._ask(engine_process.ADMIT, None, 0, 0, " ".join(hosts).encode())
            self._admitted = dict.fromkeys(hosts)
        return True

    async def _ask(
        self, what: int, piece: Landing | None, remote: int, length: int, rest: bytes
    ) -> None:
        if self._node is None:
            raise Unavailable(self.reason)
        self._number = number = (self._number + 1) % (1 << 32)
        self._requests[number] = request = _Request()
        at = 0
        if piece is not None:
            request.piece, at = piece, piece.at
            self.memory.begun(piece)
        message = engine_process.REQUEST.pack(what, number, at, remote, length) + rest
        try:
            await self._node.send(message)
        except OSError as error:
            self._end(number, -1)
            raise Unavailable(f"the mover is gone: {error.strerror}") from None
        except BaseException:  # cancelled before it was sent: there will be no answer
            self._end(number, -1)
            raise
        with trio.move_on_after(HANG_S):
            await request.done.wait()
        if not request.done.is_set():
            self.kill()
            raise Unavailable(f"the mover did nothing for {HANG_S:g} s: it is started again")
        if request.code:
            raise Unavailable("the mover could not take what was lent")

    def _end(self, number: int, code: int) -> None:
        request = self._requests.pop(number, None)
        if request is None:
            return
        request.code = code
        request.done.set()
        if request.piece is not None:
            self.memory.done(request.piece)

    # --- its process

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[trio.socket.SocketType]:
        """Runs a mover, and gives the socket to it. Raises Unavailable if it does not get ready."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                try:
                    self._process = started = await self._open(theirs)
                except OSError as error:
                    raise Unavailable(f"the mover does not start: {error}") from None
            node = trio.socket.from_stdlib_socket(ours)
            try:
                await self._meet(node)
                self._node = node
                yield node
            finally:
                self._node, self.kind, self.reason = None, b"", "the mover has ended"
                started.kill()
                for number in tuple(self._requests):
                    self._end(number, -1)
                self._admitted = {}
                with trio.CancelScope(shield=True):
                    await started.wait()

    async def _open(self, theirs: socket.socket) -> trio.Process:
        fds = [theirs.fileno(), self.memory.fd]
        return await trio.lowlevel.open_process(
            [*self._command, *map(str, fds), str(BYTES), self._host, str(engine_process.VERSION)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # the engine tells there what strangers ask
            pass_fds=fds,
            env={**_SURROUNDINGS, **os.environ},
            start_new_session=True,  # ^C is for us
            cwd=_PACKAGES,
        )

    async def _meet(self, node: trio.socket.SocketType) -> None:
        hello = b""
        with trio.move_on_after(_START_S):
            hello = await node.recv(engine_process.MESSAGE_BYTES)
        if len(hello) != engine_process.HELLO.size:
            raise Unavailable(hello[1:].decode() or "the mover does not start")
        kind, self.port, self.base = engine_process.HELLO.unpack(hello)
        self.kind = kind.rstrip(b"\0")
        self.reason = ""

    async def _serve(self, node: trio.socket.SocketType) -> None:
        """Serves until it ends."""
        with contextlib.suppress(OSError):
            while answer := await node.recv(engine_process.MESSAGE_BYTES):
                self._end(*engine_process.ANSWER.unpack(answer))
