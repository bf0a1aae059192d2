"""Responses: bytes, files by sendfile, generators, and those without a body."""

import functools
import os
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.http.api import CertificateFiles, Limits, ServerTls
from tests.cluster.waiting import wait_until
from tests.contract.http.wire_server import (
    Server,
    read_all,
    read_until,
    running,
    status_of,
    statuses,
)

SIZE = 3 << 20


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


def make_certificate(directory: Path) -> tuple[Path, Path]:
    files = directory / "cert.pem", directory / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    output = ["-out", str(files[0]), "-keyout", str(files[1])]
    subprocess.run([*command.split(), *names, *output], check=True, capture_output=True)
    return files


def _tls(certificate: tuple[Path, Path]) -> ServerTls:
    return ServerTls(CertificateFiles(*certificate).context)


class TlsServer(Server):
    """The same with TLS."""

    certificate: Path

    def connect(self) -> socket.socket:
        context = ssl.create_default_context(cafile=str(self.certificate))
        context.set_alpn_protocols(["h2", "http/1.1"])
        return context.wrap_socket(super().connect(), server_hostname="127.0.0.1")

    def exchange(self, data: bytes) -> bytes:
        """TLS in Python has no half-close: the last request says that it is the last."""
        return self.until_closed(data)


@pytest.fixture(scope="module", params=["plain", "tls"])
def server(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    certificate: tuple[Path, Path],
) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("files")
    (directory / "file").write_bytes(payload())
    tls = _tls(certificate) if request.param == "tls" else None
    with running(directory=directory, tls=tls) as server:
        if tls is not None:
            server.__class__ = TlsServer
            assert isinstance(server, TlsServer)
            server.certificate = certificate[0]
        yield server


@functools.cache
def payload() -> bytes:
    return b"".join(i.to_bytes(4, "big") for i in range(SIZE // 4))


def ask(target: str, method: str = "GET", version: str = "1.1", last: bool = True) -> bytes:
    closing = "Connection: close\r\n" if last else ""
    return f"{method} {target} HTTP/{version}\r\nHost: a\r\n{closing}\r\n".encode()


def body_of(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]


def fields_of(answer: bytes) -> list[bytes]:
    return answer.partition(b"\r\n\r\n")[0].lower().split(b"\r\n")[1:]


@pytest.mark.parametrize("size", [0, 1, 4096, 32 << 10, (32 << 10) + 1, SIZE])
def test_bytes(server: Server, size: int) -> None:
    answer = server.exchange(ask(f"/bytes?{size}"))
    assert b"content-length: %d" % size in fields_of(answer)
    assert body_of(answer) == b"x" * size


@pytest.mark.parametrize("span", [(0, SIZE), (1, 4096), (SIZE - 1, 1), (77, 0), (5, (1 << 20) + 1)])
def test_a_range_of_a_file(server: Server, span: tuple[int, int]) -> None:
    offset, length = span
    closed = server.closed_files
    answer = server.exchange(ask(f"/file?{offset},{length}"))
    assert b"content-length: %d" % length in fields_of(answer)
    assert body_of(answer) == payload()[offset : offset + length]
    wait_until(lambda: server.closed_files == closed + 1, "the file is closed")


def test_a_file_that_is_too_short_closes_the_connection(server: Server) -> None:
    closed, failed = server.closed_files, server.counters.failed
    with server.connect() as sock:
        sock.sendall(ask(f"/file?{SIZE - 10},20", last=False) + ask("/ok"))
        data = b""
        with pytest.raises(OSError, match=r".*"):
            while part := sock.recv(65536):
                data += part
            raise ConnectionResetError  # closed in order would do as well
    assert statuses(data) in ([], [200])
    assert len(body_of(data)) <= 10
    wait_until(
        lambda: server.closed_files == closed + 1 and server.counters.failed == failed + 1,
        "it failed and the file is closed",
    )


def test_a_file_that_changes_while_it_is_sent(server: Server) -> None:
    path = server.directory / "file"
    request = ask("/file", last=False).replace(b"\r\n\r\n", b"\r\nX-Watch: 1\r\n\r\n")
    failed = server.counters.failed
    with server.connect() as sock:
        path.write_bytes(payload() * 16)  # more than sockets hold
        sock.sendall(request)
        sock.recv(100)
        try:
            path.write_bytes(payload())
            with pytest.raises(OSError, match=r".*"):
                while sock.recv(1 << 20):
                    pass
                raise ConnectionResetError
        finally:
            path.write_bytes(payload())
    wait_until(lambda: server.counters.failed == failed + 1, "it failed")


def test_a_generator_is_sent_in_chunks(server: Server) -> None:
    answer = server.exchange(ask("/chunks"))
    assert b"transfer-encoding: chunked" in fields_of(answer)
    assert body_of(answer) == (
        b"3\r\none\r\n3\r\ntwo\r\nc350\r\n" + b"three" * 10_000 + b"\r\n0\r\n\r\n"
    )


def test_a_generator_is_sent_to_http_1_0_until_the_close(server: Server) -> None:
    request = ask("/chunks", version="1.0", last=False)
    answer = server.exchange(request.replace(b"\r\n\r\n", b"\r\nConnection: keep-alive\r\n\r\n"))
    assert b"connection: close" in fields_of(answer)
    assert not any(field.startswith(b"transfer-encoding") for field in fields_of(answer))
    assert body_of(answer) == b"onetwo" + b"three" * 10_000


def test_a_generator_that_fails_leaves_the_body_without_end(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    data = b""
    with server.connect() as sock:
        sock.sendall(ask("/broken_chunks"))
        try:
            while part := sock.recv(65536):
                data += part
        except OSError:
            pass
    assert b"0\r\n\r\n" not in body_of(data)
    wait_until(
        lambda: any("in the middle" in (r.exc_text or "") for r in caplog.records),
        "the error is logged",
    )


@pytest.mark.parametrize(
    ("target", "length"),
    [("/bytes?77", b"77"), ("/file?3,99", b"99"), ("/length", b"12345"), ("/status?200", b"0")],
)
def test_head_has_the_fields_and_no_body(server: Server, target: str, length: bytes) -> None:
    answer = server.exchange(ask(target, "HEAD", last=False) + ask("/ok"))
    first, _, second = answer.partition(b"\r\n\r\n")
    assert b"content-length: " + length in fields_of(first)
    assert second.startswith(b"HTTP/1.1 200 ")


def test_head_of_a_generator(server: Server) -> None:
    assert body_of(server.exchange(ask("/chunks", "HEAD"))) == b""


@pytest.mark.parametrize("status", [204, 304])
def test_a_status_without_body(server: Server, status: int) -> None:
    answer = server.exchange(ask(f"/status?{status}", last=False) + ask("/ok"))
    first, _, second = answer.partition(b"\r\n\r\n")
    assert status_of(first) == status
    assert not any(field.startswith((b"content-length", b"transfer")) for field in fields_of(first))
    assert second.startswith(b"HTTP/1.1 200 ")


def test_an_empty_answer_has_a_length(server: Server) -> None:
    assert b"content-length: 0" in fields_of(server.exchange(ask("/status?200")))


def test_a_body_is_received(server: Server) -> None:
    request = ask("/count", "PUT").replace(b"\r\n\r\n", b"\r\nContent-Length: %d\r\n\r\n" % SIZE)
    assert body_of(server.exchange(request + payload())) == b"%d" % SIZE


def test_only_http_1_1_is_agreed_on(server: Server) -> None:
    with server.connect() as sock:
        if isinstance(sock, ssl.SSLSocket):
            assert sock.selected_alpn_protocol() == "http/1.1"


def test_the_end_of_an_encrypted_answer_is_no_truncation(server: Server) -> None:
    """Python's TLS raises an error where the peer says no goodbye, unless told otherwise."""
    if not isinstance(server, TlsServer):
        return
    context = ssl.create_default_context(cafile=str(server.certificate))
    plain = socket.create_connection(server.address, timeout=10)
    with context.wrap_socket(
        plain, server_hostname="127.0.0.1", suppress_ragged_eofs=False
    ) as sock:
        sock.sendall(ask("/chunks", version="1.0"))
        assert read_all(sock).endswith(b"three")


def test_what_speaks_no_tls_is_dropped(certificate: tuple[Path, Path]) -> None:
    limits = Limits(head_s=0.2)
    with running(limits, tls=_tls(certificate)) as server:
        with server.connect() as plain, pytest.raises(ConnectionResetError):
            plain.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b"HTTP" not in read_all(plain)
            raise ConnectionResetError  # closed in order would do as well
        with server.connect() as silent:
            assert silent.recv(1) == b""


def test_a_full_server_says_nothing_in_plain_text(certificate: tuple[Path, Path]) -> None:
    """To a peer that has waited too long, and would take it for a fault of TLS."""
    context = ssl.create_default_context(cafile=str(certificate[0]))
    with (
        running(Limits(connections=1, stall_s=0.2), tls=_tls(certificate)) as server,
        context.wrap_socket(server.connect(), server_hostname="127.0.0.1") as busy,
    ):
        busy.sendall(ask("/slow?1"))
        wait_until(lambda: server.counters.requests == 1, "the request has come")
        with server.connect() as waiting:
            assert read_all(waiting) == b""
        assert status_of(read_all(busy)) == 200


def test_certificates_that_are_replaced_are_read_anew(tmp_path: Path) -> None:
    """Of the next connection on, once both files fit; open connections go on."""
    for each in ("old", "new"):
        (tmp_path / each).mkdir()
    old, new = make_certificate(tmp_path / "old"), make_certificate(tmp_path / "new")
    used = CertificateFiles(*old)
    with running(tls=ServerTls(used.context)) as server:

        def connect(trusted: Path) -> socket.socket:
            context = ssl.create_default_context(cafile=str(trusted))
            return context.wrap_socket(server.connect(), server_hostname="127.0.0.1")

        trusted = tmp_path / "trusted"
        shutil.copy(old[0], trusted)
        with connect(trusted) as before:
            new[0].replace(old[0])
            connect(trusted).close()  # with the one before: its key is still there
            new[1].replace(old[1])
            connect(old[0]).close()
            with pytest.raises(ssl.SSLCertVerificationError):
                connect(trusted)
            before.sendall(ask("/bytes?10"))
            assert status_of(read_all(before)) == 200


def test_one_port_serves_with_tls_and_without(certificate: tuple[Path, Path]) -> None:
    tls = ServerTls(CertificateFiles(*certificate).context, plain_too=True)
    with running(Limits(head_s=0.2), tls=tls) as server:
        for _ in range(2):
            assert status_of(server.exchange(ask("/bytes?10"))) == 200
            context = ssl.create_default_context(cafile=str(certificate[0]))
            plain = server.connect()
            with context.wrap_socket(plain, server_hostname="127.0.0.1") as sock:
                sock.sendall(ask("/bytes?10"))
                assert status_of(read_all(sock)) == 200
        with server.connect() as silent:
            assert silent.recv(1) == b""
        with server.connect() as slow:
            for each in (b"G", b"ET /bytes?10 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"):
                slow.sendall(each)
            assert status_of(read_all(slow)) == 200


def test_the_kernel_holds_no_part_of_an_answer_back(server: Server) -> None:
    """On a connection that stays open, each answer comes whole and at once."""
    with server.connect() as sock:
        for target in ("/file?0,4096", "/bytes?4096", "/file?0,0", "/bytes?40000"):
            size = int(target.replace("?", ",").split(",")[-1])
            sock.sendall(ask(target, last=False))
            data = read_until_size(sock, size)
            assert len(body_of(data)) == size


def read_until_size(sock: socket.socket, size: int) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data or len(body_of(data)) < size:
        part = sock.recv(65536)
        assert part
        data += part
    return data


def test_descriptors_are_not_leaked(server: Server) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    wait_until(lambda: server.counters.open_connections == 0, "the connection is closed")
    before = count()
    for _ in range(20):
        with server.connect() as sock:
            sock.sendall(ask("/file?0,10", last=False))
            read_until(sock, payload()[:10])
    wait_until(lambda: server.counters.open_connections == 0, "the connection is closed")
    assert count() <= before


def test_a_small_file_that_the_socket_does_not_take_at_once(tmp_path: Path) -> None:
    """Many answers at once to a peer that reads late: other connections use the same buffer
    meanwhile."""
    size, count = 16 << 10, 400
    (tmp_path / "file").write_bytes(b"f" * size + b"o" * size)
    ask = b"GET /file?%d,%d HTTP/1.1\r\nHost: a\r\n\r\n"
    with running(directory=tmp_path) as server, server.connect() as late:
        late.sendall(ask % (0, size) * count)
        for _ in range(20):
            with server.connect() as quick:
                quick.sendall(ask % (size, size))
                assert b"ffff" not in read_until(quick, b"o" * size)
        late.shutdown(socket.SHUT_WR)
        received = read_all(late)
    assert received.count(b"f" * size) == count
    assert b"oooo" not in received


def test_a_small_file_that_changed_is_not_sent(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"f" * 100)
    with running(directory=tmp_path) as server:
        ask = b"GET /file?0,90 HTTP/1.1\r\nHost: a\r\nX-Watch: in vain\r\n\r\n"
        with server.connect() as sock, pytest.raises(ConnectionResetError):
            sock.sendall(ask)
            read_all(sock)
        wait_until(lambda: server.closed_files == 1, "the file is closed")
        assert (server.counters.sent_bytes, server.counters.failed) == (0, 1)
