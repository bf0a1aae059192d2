"""Every wait ends: slow and silent peers, full servers, and the server's own end."""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from kvfs.http.api import Head, Limits, RequestBody, Response, listen, serve
from kvfs.http.connection_errors import BodyStalled
from tests.cluster.waiting import wait_until
from tests.contract.http.wire_server import (
    DEADLINE_S,
    Server,
    read_all,
    read_until,
    running,
    statuses,
)

FIRST_HEAD_S = 2.0
"""What a busy machine takes to say something on a new connection is less."""
QUICK = Limits(
    idle_s=0.3,
    first_head_s=FIRST_HEAD_S,
    head_s=0.3,
    stall_s=0.3,
    progress_bytes=1000,
    linger_s=0.3,
    connections=4,
)
GET = b"GET /ok HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(QUICK) as server:
        yield server


def trickle(sock: socket.socket, data: bytes, pause_s: float) -> None:
    """Byte by byte, until the server has had enough."""
    try:
        for byte in data:
            sock.send(bytes((byte,)))
            time.sleep(pause_s)
    except OSError:
        pass


def in_background(sock: socket.socket, data: bytes, pause_s: float) -> threading.Thread:
    thread = threading.Thread(target=trickle, args=(sock, data, pause_s), daemon=True)
    thread.start()
    return thread


def test_an_idle_connection_is_closed_in_silence(server: Server) -> None:
    for said in (b"", GET):
        began = time.monotonic()
        with server.connect() as sock:
            sock.sendall(said)
            assert statuses(read_all(sock)) == ([200] if said else [])
            assert time.monotonic() - began > 0.2


@pytest.mark.parametrize("pause_s", [0.005, 30.0])
def test_a_slow_head(server: Server, pause_s: float) -> None:
    with server.connect() as sock:
        in_background(sock, b"GET / HTTP/1.1\r\nX: " + b"y" * 1000, pause_s)
        assert statuses(read_all(sock)) == [408]


@pytest.mark.parametrize("pause_s", [0.005, 30.0])
@pytest.mark.parametrize("framing", [b"Content-Length: 5000", b"Transfer-Encoding: chunked"])
def test_a_slow_body(server: Server, framing: bytes, pause_s: float) -> None:
    """A byte now and then is no progress."""
    server.errors.clear()
    with server.connect() as sock:
        sock.sendall(b"PUT /echo HTTP/1.1\r\nHost: a\r\n%b\r\n\r\n" % framing)
        in_background(sock, b"1000\r\n" + b"y" * 4000, pause_s)
        assert statuses(read_all(sock)) == [408]
    assert [type(error) for error in server.errors] == [BodyStalled]


def test_a_body_that_makes_progress_may_take_its_time() -> None:
    """More than what one without progress has, each piece far less."""
    with running(replace(QUICK, stall_s=2.0)) as server, server.connect() as sock:
        sock.sendall(b"PUT /count HTTP/1.1\r\nHost: a\r\nContent-Length: 8000\r\n\r\n")
        for _ in range(8):
            time.sleep(0.3)
            sock.sendall(b"x" * 1000)
        assert read_until(sock, b"8000").startswith(b"HTTP/1.1 200")


def test_a_client_that_waits_for_an_answer_is_not_slow(server: Server) -> None:
    with server.connect() as sock:
        sock.sendall(b"GET /slow?1 HTTP/1.1\r\nHost: a\r\n\r\n")
        assert read_until(sock, b"slow").startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("target", [b"bytes?30000000", b"file"])
def test_a_client_that_does_not_read_is_cut_off(tmp_path: Path, target: bytes) -> None:
    (tmp_path / "file").write_bytes(bytes(30_000_000))
    with running(QUICK, directory=tmp_path) as server, server.connect() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(b"GET /%b HTTP/1.1\r\nHost: a\r\n\r\n" % target)
        wait_until(
            lambda: server.counters.failed == 1 and server.counters.open_connections == 0,
            "it failed and is closed",
        )
        assert server.closed_files == (target == b"file")


def test_a_client_that_reads_slowly_gets_everything(tmp_path: Path) -> None:
    """Steadily, but so slowly that the server's socket, which holds megabytes, takes nothing more
    for longer than a peer may take for `progress_bytes`."""
    size, slowly = 8 << 20, replace(QUICK, stall_s=2.0)
    (tmp_path / "file").write_bytes(bytes(size))
    with running(slowly, directory=tmp_path) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
        sock.settimeout(20)
        sock.connect(server.address)
        sock.sendall(b"GET /file HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        received = 0
        for _ in range(60):
            received += len(sock.recv(16 << 10))
            time.sleep(0.1)
        assert received + len(read_all(sock)) > size


def test_lingering_ends(server: Server) -> None:
    """A refused client that never stops sending is left after a while."""
    with server.connect() as sock:
        thread = in_background(sock, b"?" * 10_000, 0.005)
        read_all(sock)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def test_a_full_server_closes_what_is_idle(server: Server) -> None:
    wait_until(lambda: server.counters.open_connections == 0, "the connection is closed")
    with running(Limits(connections=2, shed_idle_s=0.1)) as full:
        first, second = full.connect(), full.connect()
        with first, second:
            for sock in (first, second):
                sock.sendall(GET)
                read_until(sock, b"ok")
            with full.connect() as third:
                third.sendall(GET)
                read_until(third, b"ok")
            assert first.recv(1) == b""  # idle for longest
            second.sendall(GET)
            read_until(second, b"ok")


PATIENT = Limits(
    connections=8,
    idle_s=600,
    first_head_s=600,
    head_s=600,
    stall_s=600,
    shed_idle_s=0.1,
    shed_stalled_s=0.1,
)
"""Whoever ends here ends for others."""
HALF = b"GET /ok HTTP/1.1\r\nHost: a\r\nX: "
NO_BODY = b"PUT /count HTTP/1.1\r\nHost: a\r\nContent-Length: 8000\r\n\r\n"


def hold(
    server: Server, count: int, data: bytes, address: str, stack: contextlib.ExitStack
) -> list[socket.socket]:
    """Connections from `address` that say no more than this."""
    held = []
    for _ in range(count):
        sock = socket.create_connection(server.address, 20, source_address=(address, 0))
        held.append(stack.enter_context(sock))
        sock.sendall(data)
    return held


@pytest.mark.parametrize("data", [b"", HALF, NO_BODY], ids=["nothing", "half a head", "no body"])
@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"], ids=["here", "elsewhere"])
def test_unfinished_requests_give_way(data: bytes, address: str) -> None:
    """More than there are connections, from the caller's own address or another one."""
    with running(PATIENT) as full, contextlib.ExitStack() as stack:
        hold(full, 20, data, address, stack)
        with full.connect() as sock:
            sock.sendall(GET)
            assert statuses(read_until(sock, b"ok")) == [200]


@pytest.mark.parametrize("data", [HALF, NO_BODY], ids=["half a head", "no body"])
def test_what_gives_way_is_answered(data: bytes) -> None:
    with running(PATIENT) as full, contextlib.ExitStack() as stack:
        held = hold(full, 20, data, "127.0.0.1", stack)
        assert statuses(read_all(held[0])) == [408]


def test_one_address_does_not_get_all_connections() -> None:
    """Another one is served at once while those of the first may still stay."""
    with running(replace(PATIENT, shed_stalled_s=600)) as full, contextlib.ExitStack() as stack:
        hold(full, 12, NO_BODY, "127.0.0.2", stack)
        wait_until(lambda: full.counters.waiting_connections == 6, "all have come")
        with full.connect() as sock:
            sock.sendall(GET)
            assert statuses(read_until(sock, b"ok")) == [200]
        assert full.counters.open_connections >= 6


def test_the_last_connections_are_kept_for_proven_callers() -> None:
    """Strangers of many addresses; who was there before, and was proven, is served at once."""
    limits = replace(PATIENT, shed_stalled_s=600)
    with running(limits) as full, contextlib.ExitStack() as stack:
        with full.connect() as sock:
            sock.sendall(b"GET /proven HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            assert statuses(read_all(sock)) == [200]
        for number in range(2, 12):
            hold(full, 1, NO_BODY, f"127.0.0.{number}", stack)
        wait_until(lambda: full.counters.waiting_connections == 3, "all have come")
        with full.connect() as sock:
            sock.sendall(GET)
            assert statuses(read_until(sock, b"ok")) == [200]
        assert full.counters.waiting_connections == 3


def test_connections_that_were_just_used_are_not_shed() -> None:
    """Answers end connections while others wait, so that no client sends into one that ends."""
    clients, rounds = 24, 40
    lost: list[object] = []

    def ask_again_and_again(full: Server) -> None:
        sock, left = full.connect(), rounds
        while left:
            sock.sendall(GET)
            try:
                answer = read_until(sock, b"ok")
            except (OSError, AssertionError) as error:
                lost.append(error)
                break
            left -= 1
            if b"Connection: close" in answer:
                sock.close()
                sock = full.connect()
        sock.close()

    with running(replace(PATIENT, shed_idle_s=5)) as full:
        threads = [
            threading.Thread(target=ask_again_and_again, args=(full,)) for _ in range(clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not lost
        assert full.counters.requests == clients * rounds


def test_a_full_server_lets_others_wait() -> None:
    with running(Limits(connections=1)) as full, full.connect() as busy, full.connect() as waiting:
        busy.sendall(b"GET /held HTTP/1.1\r\nHost: a\r\n\r\n")
        wait_until(lambda: full.counters.requests == 1, "the request has come")
        waiting.sendall(GET)
        assert full.counters.open_connections == 1
        full.go_on()
        read_until(busy, b"held")
        read_until(waiting, b"ok")


def test_the_end_is_graceful() -> None:
    with running(Limits(stop_s=60)) as server:
        idle, silent, busy = server.connect(), server.connect(), server.connect()
        with idle, silent, busy:
            idle.sendall(GET)
            read_until(idle, b"ok")
            busy.sendall(b"GET /held HTTP/1.1\r\nHost: a\r\n\r\n" + GET)
            wait_until(lambda: server.counters.requests == 2, "both requests have come")
            server.stop()
            assert idle.recv(1) == b""
            assert silent.recv(1) == b""
            assert not select.select([busy], [], [], 0)[0], "a request is under way"
            with pytest.raises(OSError, match="refused"):
                server.connect()
            server.go_on()
            answer = read_all(busy)
            assert statuses(answer) == [200]
            assert b"Connection: close\r\n" in answer


def test_the_end_does_not_wait_for_ever() -> None:
    with running(Limits(stop_s=0.2)) as server, server.connect() as busy:
        busy.sendall(b"GET /slow?60 HTTP/1.1\r\nHost: a\r\n\r\n")
        wait_until(lambda: server.counters.requests == 1, "the request has come")
        server.stop()
        assert busy.recv(1) == b""


def test_cancellation_is_as_graceful() -> None:
    listeners = listen("127.0.0.1", 0)
    address = listeners[0].getsockname()
    answers: list[bytes] = []

    async def main() -> None:
        begun = trio.Event()

        async def handler(_head: Head, _body: RequestBody) -> Response:
            begun.set()
            await trio.sleep(0.2)
            return Response(200, [], b"done")

        def ask() -> None:
            with socket.create_connection(address, timeout=DEADLINE_S) as sock:
                sock.sendall(GET)
                answers.append(read_all(sock))

        async with trio.open_nursery() as client, trio.open_nursery() as nursery:
            await nursery.start(serve, listeners, handler)
            client.start_soon(trio.to_thread.run_sync, ask)
            await begun.wait()
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert [statuses(answer) for answer in answers] == [[200]]


def test_listeners_share_a_port_and_speak_ipv6() -> None:
    first = listen("127.0.0.1", 0, share_port=True)
    port = first[0].getsockname()[1]
    second = listen("127.0.0.1", port, share_port=True)
    with pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", port)
    for listener in first + second:
        listener.close()
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with running(host="::1") as server:
        assert statuses(server.exchange(GET)) == [200]
