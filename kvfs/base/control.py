"""The control socket: how other processes of this host talk to the running node.

A unix socket in the store, one JSON object on a line for each request and each response:

    {"method": "status", "params": {}, "version": 1}
    ->  {"result": ...}  or  {"error": {"type": "NotFound", "message": "..."}}

Invariants
- Only root and the user that runs the node are answered (SO_PEERCRED; the socket is 0600 besides).
- A line is at most LINE_LIMIT bytes; a connection that is silent for IDLE_S is closed; at most
  CONNECTIONS are served.
- A request of a version that is more than one away from the node's is refused with both versions
  and the remedy; `status` and `stop` are answered whatever the version, so that any `kvfs` can show
  and stop any node. A request without a version has the first one.
- Domain errors arrive at the caller as the same class; anything else as Unavailable.
- Paths may be longer than a socket address (108 bytes): the socket is reached through its
  directory's descriptor.

This module does not know what the methods do.
"""

import contextlib
import errno
import logging
import os
import socket
import stat
import struct
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from kvfs.base import errors, forks
from kvfs.base.detach import aside, until_readable
from kvfs.base.version import CONTROL, VERSION

LINE_LIMIT: Final = 12 << 20
IDLE_S: Final = 30.0
CONNECTIONS: Final = 256
DEADLINE_S: Final = 10.0
_BACKLOG: Final = 128
_OF_ANY_VERSION: Final = frozenset(("status", "stop"))
_EXHAUSTED: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_EXHAUSTED_PAUSE_S: Final = 0.1
_TICK_S: Final = 1.0
"""How often the node looks for silent connections."""
_CREDENTIALS: Final = struct.Struct("3i")

Handler = Callable[[dict[str, Any]], Awaitable[object]]


class NoNode(errors.Unavailable):
    """No node runs on the store: the request was not made. If there is a mount of it, that waits
    for another daemon."""


class WentAway(errors.Unavailable):
    """The node ended while it was asked, and may have done it."""


log = logging.getLogger(__name__)


class ControlRequest(msgspec.Struct):
    method: str
    params: dict[str, Any] = {}
    version: int = 1


class ErrorBody(msgspec.Struct):
    type: str
    message: str


class ControlResponse(msgspec.Struct, omit_defaults=True):
    result: Any = None
    error: ErrorBody | None = None


_encode = msgspec.json.Encoder().encode
_decode_request = msgspec.json.Decoder(ControlRequest).decode
_decode_response = msgspec.json.Decoder(ControlResponse).decode


def _any_version() -> int:
    return 0


class ControlServer:
    """Answers requests with `handlers`, by method name. Handlers may be added while it serves."""

    def __init__(
        self,
        path: Path,
        handlers: Mapping[str, Handler],
        oldest: Callable[[], int] = _any_version,
    ) -> None:
        """`oldest`: the version from which on a program understands what it reads and writes beside
        the node; looked at for requests of an earlier one than the node's."""
        self.path = path
        self.handlers: dict[str, Handler] = dict(handlers)
        self._oldest = oldest
        self._connections = trio.Semaphore(CONNECTIONS)
        self._waiting: dict[socket.socket, float] = {}
        """The connections that wait for their peers' next bytes, and when that must end: a cancel
        scope for each wait would cost more than most requests."""
        self._has_waited = trio.Event()

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled; the socket is removed then.

        The caller holds the store's lock, so a socket found there belongs to a node that has died
        and is replaced.
        """
        made = listen_privately(self.path, socket.SOCK_STREAM, _BACKLOG)
        with trio.socket.from_stdlib_socket(made) as listener, contextlib.ExitStack() as cleanup:
            cleanup.callback(self.path.unlink, missing_ok=True)
            async with trio.open_nursery() as nursery:
                task_status.started()
                nursery.start_soon(self._end_silent_ones)
                while True:
                    await self._connections.acquire()
                    nursery.start_soon(self._attend, await _accept(listener))

    async def _attend(self, accepted: trio.socket.SocketType) -> None:
        try:
            with socket.socket(fileno=accepted.detach()) as peer:
                if not _is_trusted(peer):
                    return
                peer.setblocking(False)
                pending = bytearray()
                while (line := await self._next_line(peer, pending)) is not None:
                    await _send(peer, _encode(await self._answer(line)) + b"\n")
        except (OSError, trio.TooSlowError, trio.ClosedResourceError):
            log.debug("a control connection ended early", exc_info=True)
        finally:
            self._connections.release()

    async def _next_line(self, peer: socket.socket, pending: bytearray) -> bytes | None:
        """Takes one line out of `pending`, reading more if it has none. None: the peer closed, or
        the line is overlong. Raises ClosedResourceError after IDLE_S seconds of silence."""
        looked_at = 0
        while (end := pending.find(b"\n", looked_at)) < 0:
            looked_at = len(pending)
            if len(pending) > LINE_LIMIT:
                return None
            self._waiting[peer] = time.monotonic() + IDLE_S
            self._has_waited.set()
            try:
                await trio.lowlevel.wait_readable(peer)
            finally:
                del self._waiting[peer]
            part = peer.recv(65536)
            if not part:
                return None
            pending += part
        line = bytes(pending[:end])
        del pending[: end + 1]
        return line

    async def _end_silent_ones(self) -> None:
        """Ends the waits whose time is over, until cancelled. Sleeps while there are none."""
        while True:
            await self._has_waited.wait()
            while self._waiting:
                await trio.sleep(_TICK_S)
                now = time.monotonic()
                for peer, deadline in list(self._waiting.items()):
                    if deadline <= now:
                        trio.lowlevel.notify_closing(peer)
            self._has_waited = trio.Event()

    async def _answer(self, line: bytes) -> ControlResponse:
        try:
            request = _decode_request(line)
            _check_version(request, self._oldest)
            handler = self.handlers.get(request.method)
            if handler is None:
                known = ", ".join(sorted(self.handlers))
                raise errors.NotSupported(
                    f"this node has no method '{request.method}'; there are: {known}"
                )
            return ControlResponse(result=await handler(request.params))
        except errors.KvfsError as error:
            return ControlResponse(error=ErrorBody(type(error).__name__, str(error)))
        except msgspec.MsgspecError as error:
            return ControlResponse(error=ErrorBody("Invalid", f"not a control request: {error}"))
        except Exception as error:
            log.exception("a control request failed")
            return ControlResponse(error=ErrorBody("Unavailable", f"the node failed: {error!r}"))


def _check_version(request: ControlRequest, oldest: Callable[[], int]) -> None:
    """Raises NotSupported for a version too far away, or one that `oldest` excludes."""
    if request.version == CONTROL or request.method in _OF_ANY_VERSION:
        return
    is_newer = request.version > CONTROL
    if not is_newer and request.version < oldest():
        raise errors.NotSupported(
            f"the metadata have taken the form of KVFS {VERSION}, and the program that asks is of"
            " an earlier version: start the program anew, with this one"
        )
    if abs(request.version - CONTROL) == 1:
        return
    remedy = "restart the node with the newer one" if is_newer else "start the program anew"
    raise errors.NotSupported(
        f"the program that asks speaks version {request.version} of the control socket, the node"
        f" (KVFS {VERSION}) version {CONTROL}: they may be one apart; {remedy}"
    )


async def _accept(listener: trio.socket.SocketType) -> trio.socket.SocketType:
    """Returns the next connection; if descriptors or memory ran out, once there are some again."""
    while True:
        try:
            peer, _ = await listener.accept()
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            log.warning("no control connection can be accepted: %s", error)
            await trio.sleep(_EXHAUSTED_PAUSE_S)
        else:
            return peer


def call(
    path: Path,
    method: str,
    params: Mapping[str, object] | None = None,
    deadline_s: float = DEADLINE_S,
) -> Any:
    """Asks the node whose control socket is `path`, and returns its result.

    Raises NoNode when none runs there, Unavailable when it does not answer within `deadline_s`
    seconds, else the error that the node raised. Blocks the thread.
    """
    request = _request(method, params)
    with _no_node(path), _connect(path, deadline_s) as peer:
        return _result(_exchange(peer, request, deadline_s))


class ControlClient:
    """Asks one node again and again, from any thread; `call` works like the function of that name.

    Connections are kept for the next request, which then takes a third of the time. The node closes
    those that are idle for long: a request that it did not read to its end before it closed is sent
    again over another one. No request is done twice: if it may have been read and no answer came,
    that is Unavailable.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._idle: list[socket.socket] = []
        self._waiting: dict[socket.socket, float] = {}
        """The connections that `ask` waits for, and its deadlines."""
        self._keeps = True
        self.node_pid = 0
        """The process of the node connected to last; 0: none, or one of another pid namespace."""
        forks.in_each_child(self)

    def begin_anew(self) -> None:
        """Lets go of the connections, which are the parent's."""
        inherited, self._idle = self._idle, []
        for peer in inherited:
            peer.close()

    def call(
        self,
        method: str,
        params: Mapping[str, object] | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> Any:
        request = _request(method, params)
        with _no_node(self._path):
            while (peer := self._kept()) is not None:
                try:
                    return self._ask(peer, request, deadline_s)
                except ConnectionAbortedError:
                    raise
                except ConnectionError:
                    continue  # it was closed while idle
            fresh = _connect(self._path, deadline_s)
            self.node_pid, _, _ = _credentials(fresh)
            return self._ask(fresh, request, deadline_s)

    async def ask(
        self,
        method: str,
        params: Mapping[str, object] | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> Any:
        """Does what `call` does, in an event loop, which calls `expire` now and then: over a kept
        connection, else in a thread. Cancelled: the node is asked all the same."""
        peer = self._kept()
        if peer is not None:
            self._waiting[peer] = time.monotonic() + deadline_s
            try:
                line = await _exchange_in_loop(peer, _request(method, params), deadline_s)
            except (BlockingIOError, ConnectionResetError, BrokenPipeError):
                peer.close()  # the node has not read it
            except BaseException as error:
                peer.close()
                with _no_node(self._path):
                    if isinstance(error, trio.ClosedResourceError):
                        raise TimeoutError from None
                    raise
            else:
                return self._answered(peer, line)
            finally:
                del self._waiting[peer]
        await aside()
        with trio.CancelScope(shield=True):
            return await trio.to_thread.run_sync(self.call, method, params, deadline_s)

    def expire(self) -> None:
        """Ends the waits of `ask` whose deadline has passed: a cancel scope for each would cost
        more than the question."""
        now = time.monotonic()
        for peer, deadline in list(self._waiting.items()):
            if deadline <= now:
                trio.lowlevel.notify_closing(peer)

    def _kept(self) -> socket.socket | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _ask(self, peer: socket.socket, request: bytes, deadline_s: float) -> Any:
        try:
            line = _exchange(peer, request, deadline_s)
        except BaseException:
            peer.close()
            raise
        return self._answered(peer, line)

    def _answered(self, peer: socket.socket, line: bytearray) -> Any:
        """Keeps the connection and returns the result."""
        self._idle.append(peer)
        if not self._keeps:  # asked before: whoever closed it did not see this one
            self.close()
        return _result(line)

    def close(self) -> None:
        """Closes the kept connections, and keeps none from now on; idempotent."""
        self._keeps = False
        while (peer := self._kept()) is not None:
            peer.close()


def _exchange(peer: socket.socket, request: bytes, deadline_s: float) -> bytearray:
    """Sends a request and receives the line that answers it. Raises ConnectionAbortedError if the
    node ended the connection before it had read all of the request: a unix socket that is closed
    before that resets the other end, or takes no more from it."""
    end, line = time.monotonic() + deadline_s, bytearray()
    peer.settimeout(deadline_s)
    peer.sendall(request)
    while not line.endswith(b"\n"):
        peer.settimeout(max(end - time.monotonic(), 0.001))
        part = peer.recv(65536)
        if not part:
            raise ConnectionAbortedError
        line += part
    return line


async def _exchange_in_loop(peer: socket.socket, request: bytes, deadline_s: float) -> bytearray:
    """Does what `_exchange` does, in an event loop. Raises BlockingIOError if the node takes no
    more: then it has not read all of the request."""
    line, deadline = bytearray(), time.monotonic() + deadline_s
    peer.setblocking(False)
    if peer.send(request) < len(request):
        raise BlockingIOError
    while not line.endswith(b"\n"):
        await until_readable(peer.fileno(), deadline)
        part = peer.recv(65536)
        if not part:
            raise ConnectionAbortedError
        line += part
    return line


def _request(method: str, params: Mapping[str, object] | None) -> bytes:
    line = _encode(ControlRequest(method, dict(params or {}), CONTROL)) + b"\n"
    if len(line) > LINE_LIMIT:
        raise errors.TooLarge(f"a control request may hold {LINE_LIMIT} bytes, not {len(line)}")
    return line


def _result(line: bytearray) -> Any:
    response = _decode_response(line)
    if response.error is None:
        return response.result
    kind = getattr(errors, response.error.type, errors.Unavailable)
    if not (isinstance(kind, type) and issubclass(kind, errors.KvfsError)):
        kind = errors.Unavailable
    raise kind(response.error.message)


def _connect(path: Path, deadline_s: float, kind: int = socket.SOCK_STREAM) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, kind)
    try:
        peer.settimeout(deadline_s)
        with socket_address(path) as address:
            peer.connect(address)
    except BaseException:
        peer.close()
        raise
    return peer


def connect_trusted(path: Path, kind: int, deadline_s: float) -> socket.socket:
    """Returns a connection to the process that listens at `path`, which is root's or this user's;
    each wait for it has that deadline. Raises OSError; PermissionError: it is another user's."""
    peer = _connect(path, deadline_s, kind)
    try:
        if not _is_trusted(peer):
            raise PermissionError(f"{path} is another user's")
    except BaseException:
        peer.close()
        raise
    return peer


def listen_privately(path: Path, kind: int, backlog: int) -> socket.socket:
    """Returns a socket that listens at `path`, in place of one that is there; from its beginning
    nobody but its owner and root may connect. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        os.fchmod(listener.fileno(), stat.S_IRUSR | stat.S_IWUSR)  # so it is when it has a name
        with socket_address(path) as address:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(address)
            listener.bind(address)
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """The address of a socket at `path`, however long that is: the system's limit is 107 bytes.
    Raises OSError."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


@contextlib.contextmanager
def _no_node(path: Path) -> Iterator[None]:
    store = path.parent.parent
    try:
        yield
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as error:
        raise NoNode(
            f"no node runs on the store {store}; start one: kvfs up --store {store}"
        ) from error
    except PermissionError as error:
        raise errors.AccessDenied(
            f"the node on {store} belongs to another user; ask as that user or as root"
        ) from error
    except (TimeoutError, BlockingIOError, trio.TooSlowError) as error:  # BlockingIOError: backlog
        raise errors.Unavailable(f"the node on {store} did not answer in time") from error
    except ConnectionError as error:
        raise WentAway(f"the node on {store} went away while it was asked") from error


def _is_trusted(peer: socket.socket) -> bool:
    _, uid, _ = _credentials(peer)
    return uid in (0, os.geteuid())


def _credentials(peer: socket.socket) -> tuple[int, int, int]:
    """Returns (pid, uid, gid) of the process that connected, or listens, at the other end."""
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid


async def _send(peer: socket.socket, data: bytes) -> None:
    view = memoryview(data)
    with contextlib.suppress(BlockingIOError):
        view = view[peer.send(view) :]
    if not view:
        return
    with trio.fail_after(DEADLINE_S):
        while view:
            await trio.lowlevel.wait_writable(peer)
            view = view[peer.send(view) :]
