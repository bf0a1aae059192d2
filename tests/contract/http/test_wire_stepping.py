"""Requests that need no task get none; those that do come back from it; every wait ends."""

import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import trio
import trio.lowlevel

from kvfs.base.detach import aside, until_readable
from kvfs.http.api import Counters, Head, Limits, RequestBody, Response, connect, listen, serve
from tests.cluster.waiting import wait_until
from tests.contract.http.wire_server import DEADLINE_S, read_all, read_until, running, statuses

GET = b"GET /%b HTTP/1.1\r\nHost: a\r\n\r\n"
PUT = b"PUT /%b HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\n"


class Stepping:
    """Answers with the number of the task that it ended in, the first is 0: the server's own."""

    def __init__(self) -> None:
        self.tasks: list[trio.lowlevel.Task] = []
        self.ours, self.theirs = os.pipe()
        self.patience_s = DEADLINE_S

    def close(self) -> None:
        os.close(self.ours)
        os.close(self.theirs)

    async def handle(self, head: Head, body: RequestBody) -> Response:
        await body.read(100)
        if head.target == b"/aside":
            await aside()
            await trio.lowlevel.checkpoint()
        elif head.target == b"/pipe":
            await until_readable(self.ours, time.monotonic() + self.patience_s)
            os.read(self.ours, 1)
        task = trio.lowlevel.current_task()
        if task not in self.tasks:
            self.tasks.append(task)
        return Response(200, [], b"%d" % self.tasks.index(task))


@contextmanager
def serving(
    handle: Callable[[Head, RequestBody], Awaitable[Response]], limits: Limits | None = None
) -> Iterator[tuple[str, int]]:
    listeners = listen("127.0.0.1", 0)
    started, ends = threading.Event(), []

    async def main() -> None:
        stop, token = trio.Event(), trio.lowlevel.current_trio_token()
        ends.append(lambda: token.run_sync_soon(stop.set))
        async with trio.open_nursery() as nursery:
            await nursery.start(_serve, stop)
            started.set()

    async def _serve(stop: trio.Event, *, task_status: trio.TaskStatus[None]) -> None:
        await serve(
            listeners,
            handle,
            limits,
            steps=True,
            counters=Counters(),
            stop=stop,
            task_status=task_status,
        )

    address = listeners[0].getsockname()
    thread = threading.Thread(target=lambda: trio.run(main), daemon=True)
    thread.start()
    assert started.wait(DEADLINE_S)
    try:
        yield address
    finally:
        ends[0]()
        thread.join(DEADLINE_S)
    assert not thread.is_alive(), "the server did not stop"


@pytest.fixture
def stepping() -> Iterator[Stepping]:
    stepping = Stepping()
    yield stepping
    stepping.close()


def connected(address: tuple[str, int]) -> socket.socket:
    sock = socket.create_connection(address, timeout=DEADLINE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def answer(sock: socket.socket, data: bytes) -> bytes:
    sock.sendall(data)
    return _answer(sock)


def _answer(sock: socket.socket) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += sock.recv(1) or pytest.fail(f"closed after {head!r}")
    return sock.recv(100)


def test_requests_of_all_connections_are_answered_by_one_task(stepping: Stepping) -> None:
    with serving(stepping.handle) as address, connected(address) as one, connected(address) as two:
        for sock in (one, two, one, one):
            assert answer(sock, GET % b"ok") == b"0"
            assert answer(sock, PUT % b"ok" + b"body") == b"0"


def test_a_body_that_comes_late_needs_no_task_either(stepping: Stepping) -> None:
    with serving(stepping.handle) as address, connected(address) as sock:
        for piece in (PUT % b"ok", b"b", b"od"):
            sock.sendall(piece)
            time.sleep(0.005)  # mostly it is seen by itself
        assert answer(sock, b"y") == b"0"


def test_a_request_that_must_wait_gets_a_task_and_comes_back(stepping: Stepping) -> None:
    with serving(stepping.handle) as address, connected(address) as sock:
        assert answer(sock, GET % b"ok") == b"0"
        for _ in range(3):
            assert answer(sock, GET % b"aside") == b"1", "the task is kept for the next"
            assert answer(sock, PUT % b"ok" + b"body") == b"0"


def test_requests_that_wait_for_a_descriptor_need_no_task(stepping: Stepping) -> None:
    with serving(stepping.handle) as address, connected(address) as sock, connected(address) as two:
        for _ in range(3):
            sock.sendall(GET % b"pipe")
            assert answer(two, GET % b"ok") == b"0", "nobody waits for it"
            os.write(stepping.theirs, b"x")
            assert _answer(sock) == b"0"


def test_a_wait_for_a_descriptor_has_a_deadline(stepping: Stepping) -> None:
    stepping.patience_s = 0.1
    ended: list[type[BaseException]] = []

    async def handle(head: Head, body: RequestBody) -> Response:
        try:
            return await stepping.handle(head, body)
        except trio.ClosedResourceError as error:
            ended.append(type(error))
            return Response(503)

    limits = Limits(idle_s=1, stall_s=1, linger_s=1, first_head_s=1)
    with serving(handle, limits) as address, connected(address) as sock:
        sock.sendall(GET % b"pipe")
        assert statuses(read_until(sock, b"\r\n\r\n")) == [503]
        assert ended == [trio.ClosedResourceError]
        assert answer(sock, GET % b"ok") == b"0"


@pytest.mark.parametrize("request_", [GET % b"pipe", PUT % b"ok", b"GET /ok HTT"])
def test_the_end_waits_for_no_request_for_ever(stepping: Stepping, request_: bytes) -> None:
    with serving(stepping.handle, Limits(stop_s=0.2)) as address:
        sock = connected(address)
        assert answer(sock, GET % b"ok") == b"0"
        sock.sendall(request_)
        time.sleep(0.05)  # mostly it has come
        began = time.monotonic()
    with sock:
        assert time.monotonic() - began < DEADLINE_S
        assert read_all(sock) == b""


def test_a_server_with_an_idle_connection_costs_nothing() -> None:
    with running() as server, server.connect() as sock, server.connect() as slow:
        sock.sendall(GET % b"ok")
        read_until(sock, b"ok")
        slow.sendall(PUT % b"echo")
        wait_until(lambda: server.counters.requests == 2, "both requests have come")
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.2


def test_more_servers_of_a_process_than_the_kernel_watches_together_all_answer() -> None:
    """Linux has a socket seen along a hundred ways of three epoll descriptors, and no more."""

    async def handle(head: Head, _body: RequestBody) -> Response:
        return Response(200, [], head.target)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(120):
                listeners = listen("127.0.0.1", 0)
                await nursery.start(partial(serve, listeners, handle))
                connection = await connect("127.0.0.1", listeners[0].getsockname()[1])
                with trio.fail_after(DEADLINE_S):
                    await connection.ask("GET", b"/here")
                    assert await connection.read(100) == b"/here"
                connection.close()
            nursery.cancel_scope.cancel()

    trio.run(main)
