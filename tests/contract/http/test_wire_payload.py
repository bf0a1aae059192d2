"""Payload is moved, not held: little memory however much passes, and no connection keeps another
waiting."""

import select
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import trio

from kvfs.http.http_client import ClientConnection
from tests.contract.http.wire_server import Server, read_until, running, statuses

SIZE = 64 << 20
PART = bytes(1 << 20)
GET = b"GET /ok HTTP/1.1\r\nHost: a\r\n\r\n"
WAIT_S = 10.0
"""A request beside a flood takes milliseconds, and on a busy machine perhaps a second."""


@contextmanager
def little_memory(limit_bytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit_bytes
    finally:
        tracemalloc.stop()


def test_a_large_body_takes_little_memory() -> None:
    with running() as server, server.connect() as sock, little_memory(1 << 20):
        for framing, begin, end in (
            (b"Content-Length: %d" % SIZE, b"", b""),
            (b"Transfer-Encoding: chunked", b"%x\r\n" % SIZE, b"\r\n0\r\n\r\n"),
        ):
            sock.sendall(b"PUT /count HTTP/1.1\r\nHost: a\r\n%b\r\n\r\n%b" % (framing, begin))
            for _ in range(SIZE // len(PART)):
                sock.sendall(PART)
            sock.sendall(end)
            read_until(sock, b"%d" % SIZE)


def test_a_large_file_takes_little_memory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (tmp_path / "file").open("r+b") as file:
        file.truncate(SIZE)
    buffer = bytearray(1 << 20)
    with running(directory=tmp_path) as server, server.connect() as sock, little_memory(1 << 20):
        sock.sendall(b"GET /file HTTP/1.1\r\nHost: a\r\n\r\n")
        received = 0
        while received < SIZE:
            count = sock.recv_into(buffer)
            assert count
            received += count


def flood(server: Server, begin: bytes, data: bytes, ended: threading.Event) -> None:
    """Send `data` again and again after `begin`, and read what comes."""
    with server.connect() as sock:
        sock.sendall(begin)
        sock.setblocking(False)
        rest = memoryview(data)
        while not ended.is_set():
            readable, writable, _ = select.select([sock], [sock], [], 0.1)
            if readable:
                sock.recv(1 << 20)
            if writable:
                rest = rest[sock.send(rest) :] or memoryview(data)


def latency_beside(begin: bytes, data: bytes) -> float:
    """Seconds that the slowest of some requests took while another connection was flooded."""
    ended = threading.Event()
    with running() as server, server.connect() as sock:
        thread = threading.Thread(target=flood, args=(server, begin, data, ended), daemon=True)
        thread.start()
        slowest = 0.0
        for _ in range(20):
            began = time.monotonic()
            sock.sendall(GET)
            assert statuses(read_until(sock, b"ok")) == [200]
            slowest = max(slowest, time.monotonic() - began)
        ended.set()
        thread.join()
    return slowest


def test_a_flood_of_tiny_chunks_keeps_nobody_waiting() -> None:
    chunked = b"PUT /count HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert latency_beside(chunked, b"1\r\na\r\n" * 200_000) < WAIT_S


def test_a_flood_of_requests_keeps_nobody_waiting() -> None:
    assert latency_beside(b"", GET * 1000) < WAIT_S


def test_what_came_along_with_the_head_is_taken_with_the_rest_of_the_body() -> None:
    """In one piece: a receiver hashes and writes each piece."""
    body = bytes(range(256)) * 400

    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        connection, into = ClientConnection(ours), memoryview(bytearray(len(body)))
        assert (await connection.ask("GET", b"/")).length == len(body)
        assert connection.receive_soon(into[:100], 0) == 100
        assert connection.receive_soon(into[100:], 0) == len(body) - 100
        assert into == body
        assert connection.receive_soon(into, 0) == 0
        assert theirs.recv(100).startswith(b"GET / ")
        theirs.close()
        connection.close()

    trio.run(main)
