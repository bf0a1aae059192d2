"""TLS: a chain of certificates, load, clients that go away in the middle or end half of it."""

import contextlib
import os
import random
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Iterator
from http.client import HTTPSConnection
from pathlib import Path

import pytest

from tests.integration.s3 import S3, serving
from tests.integration.s3api.access.test_s3_policies import allow, document

MIB = 1 << 20
CONNECTIONS = 8
TURNS = 4
RESETS = 24


def openssl(directory: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)


def request(directory: Path, name: str, subject: str) -> None:
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    files = ("-keyout", f"{name}.key", "-out", f"{name}.csr")
    openssl(directory, "req", "-new", *key, "-subj", subject, *files)


def sign(directory: Path, name: str, by: str, extensions: str) -> None:
    (directory / f"{name}.ext").write_text(extensions)
    signer = ["-CA", f"{by}.pem", "-CAkey", f"{by}.key", "-CAcreateserial"]
    if by == name:
        signer = ["-signkey", f"{name}.key"]
    files = ("-in", f"{name}.csr", "-out", f"{name}.pem", "-extfile", f"{name}.ext")
    openssl(directory, "x509", "-req", "-days", "2", *files, *signer)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """root.pem, which clients trust; chain.pem and leaf.key, which the server has."""
    made = tmp_path_factory.mktemp("tls")
    authority = "basicConstraints=critical,CA:TRUE\nkeyUsage=critical,keyCertSign,cRLSign\n"
    for name, by in (("root", "root"), ("between", "root"), ("leaf", "between")):
        request(made, name, f"/CN={name}")
        named = "subjectAltName=DNS:localhost,IP:127.0.0.1\n"
        sign(made, name, by, named if name == "leaf" else authority)
    chain = (made / "leaf.pem").read_text() + (made / "between.pem").read_text()
    (made / "chain.pem").write_text(chain)
    return made


@pytest.fixture(scope="module")
def server(certificates: Path) -> Iterator[S3]:
    flags = ["--s3-certificate", str(certificates / "chain.pem")]
    flags += ["--s3-private-key", str(certificates / "leaf.key")]
    with pytest.MonkeyPatch.context() as patch, serving("--s3-workers", "2", *flags) as made:
        patch.setenv("AWS_CA_BUNDLE", str(certificates / "root.pem"))
        made.add_user("main")
        yield made


@pytest.fixture
def tls(certificates: Path) -> ssl.SSLContext:
    """Of a client that knows the root alone."""
    return ssl.create_default_context(cafile=str(certificates / "root.pem"))


@pytest.fixture
def bucket(server: S3) -> str:
    """A fresh one in which everybody may do everything, with `key` of 2 MiB."""
    name = server.new_bucket()
    policy = document(allow("s3:*", name, f"{name}/*"))
    server.client().put_bucket_policy(Bucket=name, Policy=policy)
    server.client().put_object(Bucket=name, Key="key", Body=body_of("key"))
    return name


def body_of(name: str, size: int = 2 * MIB) -> bytes:
    return random.Random(name).randbytes(size)


def connect(server: S3, tls: ssl.SSLContext) -> ssl.SSLSocket:
    return tls.wrap_socket(server.connect(), server_hostname="localhost")


def head_of(method: str, path: str, size: int = 0) -> bytes:
    fields = f"Host: localhost\r\nContent-Length: {size}\r\nConnection: close\r\n"
    return f"{method} {path} HTTP/1.1\r\n{fields}\r\n".encode()


def read_all(peer: ssl.SSLSocket) -> bytes:
    received = bytearray()
    with contextlib.suppress(ssl.SSLZeroReturnError):  # both sides have said that they end
        while part := peer.recv(MIB):
            received += part
    return bytes(received)


def test_a_chain_leads_to_the_root_that_clients_know(
    server: S3, bucket: str, certificates: Path
) -> None:
    got = server.client().get_object(Bucket=bucket, Key="key")["Body"].read()
    assert got == body_of("key")
    strangers = ssl.create_default_context(cafile=str(certificates / "between.pem"))
    strangers.verify_flags &= ~ssl.VERIFY_X509_PARTIAL_CHAIN
    with server.connect() as peer, pytest.raises(ssl.SSLCertVerificationError):
        strangers.wrap_socket(peer, server_hostname="localhost")


def test_bodies_of_many_connections_are_whole(server: S3, bucket: str, tls: ssl.SSLContext) -> None:
    failed: list[object] = []

    def go_on(number: int) -> None:
        name = f"{number}"
        connection = HTTPSConnection("localhost", server.port, context=tls, timeout=60)
        try:
            for turn in range(TURNS):
                body = body_of(f"{name} {turn}")
                connection.request("PUT", f"/{bucket}/{name}", body)
                answer = connection.getresponse()
                answer.read()
                connection.request("GET", f"/{bucket}/{name}")
                if answer.status != 200 or connection.getresponse().read() != body:
                    failed.append((name, turn))
        except Exception as error:  # told below
            failed.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=go_on, args=(each,)) for each in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    for number in range(CONNECTIONS):
        path = server.mount / bucket / str(number)
        assert path.read_bytes() == body_of(f"{number} {TURNS - 1}")


def reset(peer: socket.socket) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()


def test_clients_that_reset_in_the_middle_harm_nobody(
    server: S3, bucket: str, tls: ssl.SSLContext, seed: int
) -> None:
    chance, body = random.Random(seed), body_of("new")
    for _ in range(RESETS):
        peer = connect(server, tls)
        if chance.random() < 0.5:
            peer.sendall(head_of("PUT", f"/{bucket}/key", len(body)))
            peer.sendall(body[: chance.randrange(len(body))])
        else:
            peer.sendall(head_of("GET", f"/{bucket}/key"))
            peer.recv(1 + chance.randrange(MIB))
        reset(peer)
        half = server.connect()  # not even a handshake
        half.sendall(b"\x16\x03\x01\x02\x00"[: 1 + chance.randrange(5)])
        reset(half)
    got = server.client().get_object(Bucket=bucket, Key="key")["Body"].read()
    assert got == body_of("key")
    assert os.listdir(server.mount / bucket) == ["key"]
    assert server.node.status()["s3"]["restarts"] == 0


@pytest.mark.parametrize("how", ["close_notify", "fin"])
def test_who_ends_its_half_gets_its_answer(
    server: S3, bucket: str, tls: ssl.SSLContext, how: str
) -> None:
    for method, body in (("GET", b""), ("PUT", body_of("half"))):
        path = f"/{bucket}/{method}" if body else f"/{bucket}/key"
        request = head_of(method, path, len(body)) + body
        if how == "fin":
            with connect(server, tls) as peer:
                peer.sendall(request)
                socket.socket.shutdown(peer, socket.SHUT_WR)
                answer = read_all(peer)
        else:
            answer = ask_and_end(server, tls, request)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert body or answer.endswith(body_of("key"))
    assert (server.mount / bucket / "PUT").read_bytes() == body_of("half")


def ask_and_end(server: S3, tls: ssl.SSLContext, request: bytes) -> bytes:
    """The answer to a request with a close_notify right behind it: both are made before either is
    sent, since an answer that comes first would be taken for a reply to the close_notify."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    peer = tls.wrap_bio(incoming, outgoing, server_hostname="localhost")
    with server.connect() as connection:

        def receive() -> bool:
            connection.sendall(outgoing.read())
            part = connection.recv(MIB)
            incoming.write(part)
            return bool(part)

        while True:
            try:
                peer.do_handshake()
                break
            except ssl.SSLWantReadError:
                assert receive()
        peer.write(request)
        with contextlib.suppress(ssl.SSLWantReadError):
            peer.unwrap()
        answer = bytearray()
        while True:
            try:
                answer += peer.read(MIB)
            except ssl.SSLWantReadError:
                assert receive(), "it ended without a close_notify"
            except ssl.SSLZeroReturnError:
                return bytes(answer)


def test_a_body_that_tls_cuts_off_is_none(server: S3, bucket: str, tls: ssl.SSLContext) -> None:
    """Nor is what an attacker, or a proxy, ends with a plain FIN."""
    with connect(server, tls) as peer:
        peer.sendall(head_of("PUT", f"/{bucket}/key", 2 * MIB) + body_of("key")[:MIB])
        socket.socket.shutdown(peer, socket.SHUT_WR)
        answer = read_all(peer)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"<Code>IncompleteBody</Code>" in answer
    assert (server.mount / bucket / "key").read_bytes() == body_of("key")


def test_keys_are_updated_and_nothing_is_renegotiated(
    server: S3, bucket: str, certificates: Path
) -> None:
    """As openssl's own client does when it reads a K or an R."""
    assert b"HTTP/1.1 200" in converse(server, bucket, certificates, "-tls1_3", "K")
    said = converse(server, bucket, certificates, "-tls1_2", "R")
    assert b"no renegotiation" in said
    assert b"HTTP/1.1 200" not in said
    assert server.client().head_object(Bucket=bucket, Key="key")["ContentLength"] == 2 * MIB


def converse(server: S3, bucket: str, certificates: Path, version: str, command: str) -> bytes:
    """A command, then a request; what the client shows of it."""
    line = ["openssl", "s_client", "-connect", f"localhost:{server.port}", version]
    line += ["-CAfile", str(certificates / "root.pem")]
    with subprocess.Popen(
        line, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as client:  # unbuffered: what it does not take any more is not written once more at the end
        assert client.stdin is not None
        assert client.stdout is not None
        out = client.stdout.fileno()
        # A command is a line of its own, read alone once the handshake is done.
        shown = read_until(out, b"Verify return code: 0")
        client.stdin.write(f"{command}\n".encode())
        shown += read_until(out, b"KEYUPDATE", b"RENEGOTIATING")
        with contextlib.suppress(BrokenPipeError):
            client.stdin.write(head_of("HEAD", f"/{bucket}/key"))
        while part := os.read(out, MIB):
            shown += part
        return shown


def read_until(fd: int, *wanted: bytes) -> bytes:
    shown = b""
    while not any(each in shown for each in wanted):
        part = os.read(fd, MIB)
        assert part, shown
        shown += part
    return shown
