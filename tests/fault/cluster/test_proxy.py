"""The proxy that other tests put before a server does to a connection what they believe."""

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.proxy import Proxy, proxied

_NOTHING_S = 0.3
"""How long nothing must come for it to be held back; only that nothing comes depends on it."""


class _Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while block := self.request.recv(1 << 16):
                self.request.sendall(block)


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "echo"
    with _Server(str(path), _Echo) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield path
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(echo: Path) -> Iterator[Proxy]:
    with proxied(("127.0.0.1", 0), echo) as made:
        yield made


def connected(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), 60)


def received(connection: socket.socket, size: int) -> bytes:
    got = bytearray()
    while len(got) < size and (block := connection.recv(size - len(got))):
        got += block
    return bytes(got)


def test_what_comes_goes_on_as_it_is(proxy: Proxy) -> None:
    block = bytes(range(256)) * 40_000
    with connected(proxy) as connection:
        sender = threading.Thread(target=lambda: connection.sendall(block))
        sender.start()
        assert received(connection, len(block)) == block
        sender.join()
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""


def test_a_delay_is_that_of_both_ways(proxy: Proxy) -> None:
    proxy.delay_s = 0.05
    with connected(proxy) as connection:
        began = time.monotonic()
        for number in range(20):  # on their way at the same time
            connection.sendall(bytes([number]))
        assert received(connection, 20) == bytes(range(20))
        assert time.monotonic() - began >= 0.1


@pytest.mark.parametrize("ways", ["in", "out", "both"])
def test_what_is_held_back_arrives_in_the_end(proxy: Proxy, ways: str) -> None:
    with connected(proxy) as connection:
        connection.sendall(b"a")
        assert connection.recv(1) == b"a"
        proxy.held = ways  # type: ignore[assignment]
        connection.sendall(b"b")
        connection.settimeout(_NOTHING_S)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        proxy.held = None
        connection.settimeout(60)
        assert connection.recv(1) == b"b"


def test_cut_and_refused_connections_end(proxy: Proxy) -> None:
    with connected(proxy) as connection:
        connection.sendall(b"a")
        assert connection.recv(1) == b"a"
        proxy.is_refusing = True
        proxy.cut()
        assert _is_over(connection)
    with connected(proxy) as connection:
        assert _is_over(connection)
    proxy.is_refusing = False
    with connected(proxy) as connection:
        connection.sendall(b"a")
        assert connection.recv(1) == b"a"


def _is_over(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_client_that_goes_is_noticed_by_the_server(proxy: Proxy, echo: Path) -> None:
    """And the other way round: a server that is not there ends the connection."""
    with connected(proxy) as connection:
        connection.sendall(b"a")
        assert connection.recv(1) == b"a"
    echo.unlink()
    with connected(proxy) as connection:
        assert _is_over(connection)
