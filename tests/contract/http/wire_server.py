"""A server of kvfs.http on loopback in a thread of its own, and raw clients for it."""

import contextlib
import json
import os
import re
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio
import trio.lowlevel

from kvfs.base.detach import aside
from kvfs.http.api import (
    Counters,
    FileRange,
    Head,
    Limits,
    RequestBody,
    RequestRefused,
    Response,
    ServerTls,
    WireError,
    listen,
    serve,
)

DEADLINE_S = 20.0


@dataclass
class Server:
    address: tuple[str, int]
    counters: Counters = field(default_factory=Counters)
    answers: list[tuple[Head | None, int, int, float]] = field(default_factory=list)
    errors: list[WireError] = field(default_factory=list)
    """What reading a body raised in the handler."""
    closed_files: int = 0
    stop: Callable[[], None] = lambda: None
    go_on: Callable[[], None] = lambda: None
    """Has `/held` answer."""
    held: trio.Event = field(default_factory=trio.Event)
    directory: Path = Path()

    def connect(self) -> socket.socket:
        sock = socket.create_connection(self.address, timeout=DEADLINE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def exchange(self, data: bytes) -> bytes:
        """What the server sends until it closes, for `data`, after which nothing follows."""
        with self.connect() as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            return read_all(sock)

    def until_closed(self, data: bytes) -> bytes:
        """The same, while the client leaves its side open: the server must end it."""
        with self.connect() as sock:
            sock.sendall(data)
            return read_all(sock)


def read_all(sock: socket.socket) -> bytes:
    parts = []
    while part := sock.recv(1 << 20):
        parts.append(part)
    return b"".join(parts)


def read_until(sock: socket.socket, end: bytes) -> bytes:
    data = b""
    while not data.endswith(end):
        part = sock.recv(65536)
        assert part, f"closed after {data!r}"
        data += part
    return data


def status_of(response: bytes) -> int:
    return int(response.split(b" ", 2)[1])


def statuses(data: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", data)]


class Handler:
    """Answers by path; `/echo` with what the server made of the request."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def __call__(self, head: Head, body: RequestBody) -> Response:
        name = head.target.split(b"?")[0].strip(b"/").decode("latin-1") or "ok"
        answer = getattr(self, f"answer_{name}", None)
        if answer is None:
            return Response(404, [], b"nothing here")
        response = await answer(head, body)
        assert isinstance(response, Response)
        return response

    async def answer_ok(self, _head: Head, _body: RequestBody) -> Response:
        return Response(200, [(b"Content-Type", b"text/plain")], b"ok")

    async def answer_proven(self, head: Head, _body: RequestBody) -> Response:
        assert head.session is not None
        head.session.prove()
        return Response(200)

    async def answer_echo(self, head: Head, body: RequestBody) -> Response:
        seen: dict[str, Any] = {
            "method": head.method,
            "target": head.target.decode("latin-1"),
            "headers": [[n.decode("latin-1"), v.decode("latin-1")] for n, v in head.headers],
            "length": head.content_length,
            "chunked": head.chunked,
        }
        try:
            seen["body"] = (await body.read(1 << 20)).decode("latin-1")
        except WireError as error:
            self._server.errors.append(error)
            raise
        seen["trailers"] = [[n.decode(), v.decode()] for n, v in body.trailers]
        return Response(200, [], json.dumps(seen).encode())

    async def answer_count(self, _head: Head, body: RequestBody) -> Response:
        buffer, total = memoryview(bytearray(100_000)), 0
        while count := await body.receive_into(buffer):
            total += count
        return Response(200, [], b"%d" % total)

    async def answer_unread(self, _head: Head, _body: RequestBody) -> Response:
        return Response(403, [], b"no")

    async def answer_part(self, _head: Head, body: RequestBody) -> Response:
        await body.receive_into(memoryview(bytearray(10)))
        return Response(200, [], b"part")

    async def answer_file(self, head: Head, _body: RequestBody) -> Response:
        fd = os.open(self._server.directory / "file", os.O_RDONLY)
        size = os.fstat(fd).st_size
        offset, length = 0, size
        if b"?" in head.target:
            offset, length = map(int, head.target.split(b"?")[1].split(b","))
        unchanged = None
        if watch := head.get(b"x-watch"):
            seen = -1 if watch == b"in vain" else size
            unchanged = lambda: os.fstat(fd).st_size == seen  # noqa: E731
        return Response(200, [], FileRange(fd, offset, length, self._closer(fd), unchanged))

    def _closer(self, fd: int) -> Callable[[], None]:
        def close() -> None:
            os.close(fd)
            self._server.closed_files += 1

        return close

    async def answer_bytes(self, head: Head, _body: RequestBody) -> Response:
        return Response(200, [], b"x" * int(head.target.split(b"?")[1]))

    async def answer_chunks(self, _head: Head, _body: RequestBody) -> Response:
        async def pieces() -> AsyncGenerator[bytes, None]:
            for piece in (b"one", b"", b"two", b"three" * 10_000):
                await trio.lowlevel.checkpoint()
                yield piece

        return Response(200, [], pieces())

    async def answer_broken_chunks(self, _head: Head, _body: RequestBody) -> Response:
        async def pieces() -> AsyncGenerator[bytes, None]:
            yield b"one"
            raise ValueError("in the middle")

        return Response(200, [], pieces())

    async def answer_status(self, head: Head, _body: RequestBody) -> Response:
        return Response(int(head.target.split(b"?")[1]))

    async def answer_length(self, _head: Head, _body: RequestBody) -> Response:
        return Response(200, [], None, length=12345)

    async def answer_injection(self, _head: Head, _body: RequestBody) -> Response:
        return Response(200, [(b"X-Name", b"a\r\nSet-Cookie: b")], b"")

    async def answer_own_length(self, _head: Head, _body: RequestBody) -> Response:
        return Response(200, [(b"CONTENT-length", b"3")], b"abc")

    async def answer_failing(self, _head: Head, _body: RequestBody) -> Response:
        raise ZeroDivisionError

    async def answer_refusing(self, _head: Head, _body: RequestBody) -> Response:
        raise RequestRefused(411, "say how long it is")

    async def answer_slow(self, head: Head, _body: RequestBody) -> Response:
        await aside()
        await trio.sleep(float(head.target.split(b"?")[1]))
        return Response(200, [], b"slow")

    async def answer_held(self, _head: Head, _body: RequestBody) -> Response:
        await aside()
        await self._server.held.wait()
        return Response(200, [], b"held")

    async def answer_closing(self, _head: Head, _body: RequestBody) -> Response:
        return Response(200, [], b"bye", close=True)

    async def answer_patient(self, _head: Head, body: RequestBody) -> Response:
        """Gives up on a silent client again and again, and loses nothing of what it sends."""
        received = bytearray()
        buffer = memoryview(bytearray(100))
        await aside()
        while body.remaining:
            with trio.move_on_after(0.01):
                count = await body.receive_into(buffer)
                received += buffer[:count]
        return Response(200, [], bytes(received))


@contextlib.contextmanager
def running(
    limits: Limits | None = None,
    *,
    tls: ServerTls | None = None,
    directory: Path | None = None,
    host: str = "127.0.0.1",
    steps: bool = True,
) -> Iterator[Server]:
    """A server until the block ends, which then must have ended by itself. `steps`: requests are
    answered without a task where that is possible."""
    listeners = listen(host, 0)
    server = Server(listeners[0].getsockname()[:2], directory=directory or Path())
    started, failure = threading.Event(), []

    async def main() -> None:
        stop, token = trio.Event(), trio.lowlevel.current_trio_token()
        server.stop = lambda: token.run_sync_soon(stop.set)
        server.go_on = lambda: token.run_sync_soon(server.held.set)
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_it, stop)
            started.set()

    async def serve_it(stop: trio.Event, task_status: trio.TaskStatus[None]) -> None:
        await serve(
            listeners,
            Handler(server),
            limits,
            steps=steps,
            tls=tls,
            on_response=lambda *answer: server.answers.append(answer),
            counters=server.counters,
            stop=stop,
            task_status=task_status,
        )

    def run() -> None:
        try:
            trio.run(main)
        except BaseException as error:
            failure.append(error)
            started.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    started.wait()
    try:
        yield server
    finally:
        with contextlib.suppress(trio.RunFinishedError):
            server.stop()
        thread.join(DEADLINE_S)
    assert not thread.is_alive(), "the server did not stop"
    assert not failure, failure
    assert server.counters.open_connections == 0
