"""Requests: what is served, what is refused, and how a connection goes on after either."""

import http.client
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvfs.http.api import Limits
from kvfs.http.connection_errors import BadChunk, BodyTooLarge, BodyTruncated, RequestRefused
from tests.cluster.waiting import wait_until
from tests.contract.http.wire_server import (
    Server,
    read_all,
    read_until,
    running,
    status_of,
    statuses,
)

SMALL = Limits(
    head_bytes=2048, header_count=10, target_bytes=512, body_bytes=100_000, drain_bytes=1000
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(SMALL) as server:
        yield server


def echo(response: bytes) -> Any:
    head, _, body = response.partition(b"\r\n\r\n")
    assert status_of(head) == 200, response
    return json.loads(body)


def get(target: str = "/", *fields: str, version: str = "1.1") -> bytes:
    lines = [f"GET {target} HTTP/{version}", "Host: here", *fields]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def test_a_request_arrives_as_it_was_sent(server: Server) -> None:
    seen = echo(server.exchange(get("/echo?a=%2F&b", "X-One: 1", "x-TWO:\t two ", "X-One: 3")))
    assert seen["method"] == "GET"
    assert seen["target"] == "/echo?a=%2F&b"
    assert seen["headers"] == [["host", "here"], ["x-one", "1"], ["x-two", "two"], ["x-one", "3"]]
    assert seen["length"] is None
    assert seen["body"] == ""


def test_an_ordinary_client_is_served(server: Server) -> None:
    connection = http.client.HTTPConnection(*server.address, timeout=10)
    for _ in range(3):
        connection.request("PUT", "/echo", b"payload", {"X-Name": "value"})
        response = connection.getresponse()
        assert json.loads(response.read())["body"] == "payload"
        assert response.headers["Server"] == "KVFS"
        assert response.headers["Date"].endswith("GMT")
    connection.request("PUT", "/echo", iter([b"one", b"two"]), encode_chunked=True)
    assert json.loads(connection.getresponse().read())["body"] == "onetwo"
    connection.close()


def test_the_absolute_form_names_its_host(server: Server) -> None:
    assert echo(server.exchange(get("http://there:80/echo?x")))["target"] == "/echo?x"
    assert status_of(server.exchange(get("http://there"))) == 200


def test_empty_lines_before_a_request_are_overlooked(server: Server) -> None:
    assert statuses(server.exchange(b"\r\n\r\n" + get() + b"\r\n" + get())) == [200, 200]


def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    requests = [
        f"PUT /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\n{i:03}" for i in range(200)
    ]
    answers = server.exchange("".join(requests).encode())
    bodies = [
        json.loads(part.split(b"\r\n\r\n")[1])["body"] for part in answers.split(b"HTTP/1.1 ")[1:]
    ]
    assert bodies == [f"{i:03}" for i in range(200)]


@pytest.mark.parametrize(
    ("version", "field", "goes_on"),
    [
        ("1.1", "X: y", True),
        ("1.1", "Connection: close", False),
        ("1.1", "Connection: x, Close", False),
        ("1.0", "X: y", False),
        ("1.0", "Connection: keep-alive", True),
    ],
)
def test_who_may_go_on_with_a_connection(
    server: Server, version: str, field: str, goes_on: bool
) -> None:
    answers = server.exchange(get("/", field, version=version) * 2)
    assert len(statuses(answers)) == (2 if goes_on else 1)
    assert (b"Connection: close" in answers) is not goes_on
    assert (b"Connection: keep-alive" in answers) is (goes_on and version == "1.0")


def test_an_offer_to_upgrade_is_not_taken(server: Server) -> None:
    request = get("/", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAM")
    assert statuses(server.exchange(request * 2)) == [200, 200]


REFUSED: list[tuple[bytes, int]] = [
    (b"GET / HTTP/1.1\r\n\r\n", 400),  # no Host
    (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    (b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    (b"GET / HTTP/1.1 \r\nHost: a\r\n\r\n", 400),
    (b"GET /a b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    (b"GET /\x01 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    (b"GET /\xc3\xa4 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    (b"GET a HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    (b"GET * HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    (b"GET /\r\nHost: a\r\n\r\n", 400),  # HTTP/0.9
    (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
    (b"GET / HTTP/1.2\r\nHost: a\r\n\r\n", 400),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    (b"FROB / HTTP/1.1\r\nHost: a\r\n\r\n", 501),
    (b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n", 501),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", 400),  # TLS on a plain port
    (b"GET / HTTP/1.1\nHost: a\n\n", 400),  # bare line feeds
    (b"GET / HTTP/1.1\r\nHost: a\nX: y\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: a\r\nX: y\r\n z\r\n\r\n", 400),  # a fold
    (b"GET / HTTP/1.1\r\nHost: a\r\nX : y\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: a\r\n X: y\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: a\r\nX: y\0z\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: a\r\nX: y\rz\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: a\r\n: y\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: a\r\nX\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: a\r\nX\xff: y\r\n\r\n", 400),
    (b"PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
    (b"PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\na", 400),
    (b"PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: 1, 1\r\n\r\na", 400),
    (b"PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: +1\r\n\r\na", 400),
    (b"PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\na", 400),
    (b"PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: 0x1\r\n\r\na", 400),
    (b"PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\na", 400),
    (
        b"PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"0\r\n\r\n",
        400,
    ),
    (
        b"PUT / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n"
        b"0\r\n\r\n",
        400,
    ),
    (b"PUT / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", 400),
    (b"PUT / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n", 400),
    (b"PUT / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, gzip\r\n\r\n", 400),
    (b"PUT / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501),
    (b"PUT / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    (b"PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: 100001\r\n\r\n", 413),
    (b"GET /" + b"a" * 512 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414),
    (b"GET /" + b"a" * 1000, 414),
    (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 10 + b"\r\n", 431),
    (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 2048 + b"\r\n\r\n", 431),
    (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 2048, 431),
    (b"GET /refusing HTTP/1.1\r\nHost: a\r\n\r\n", 411),
]


@pytest.mark.parametrize(("request_bytes", "status"), REFUSED)
def test_what_is_refused(server: Server, request_bytes: bytes, status: int) -> None:
    """The server answers once, and ends the connection though the client leaves it open and has
    said more."""
    more = get("/echo") if b"\r\n\r\n" in request_bytes else b""
    answer = server.until_closed(request_bytes + more)
    assert statuses(answer) == [status]
    assert b"Connection: close\r\n" in answer


def put(target: str, *fields: str) -> bytes:
    return get(target, *fields).replace(b"GET", b"PUT", 1)


@pytest.mark.parametrize(
    ("chunks", "kind"),
    [
        (b"x\r\n", BadChunk),
        (b"-1\r\n", BadChunk),
        (b"+1\r\n", BadChunk),
        (b"0x1\r\n", BadChunk),
        (b" 1\r\na\r\n", BadChunk),
        (b"1 \r\na\r\n", BadChunk),
        (b"\r\n", BadChunk),
        (b";a\r\n", BadChunk),
        (b"1\na\r\n", BadChunk),
        (b"1;a\x01\r\na\r\n", BadChunk),
        (b"1;" + b"a" * 300, BadChunk),
        (b"f" * 16 + b"\r\n", BadChunk),
        (b"1\r\nab\r\n", BadChunk),
        (b"1\r\na\n0\r\n", BadChunk),
        (b"0\r\nX : y\r\n\r\n", RequestRefused),
        (b"0\r\nContent-Length: 5\r\n\r\n", RequestRefused),
        (b"0\r\nX: " + b"y" * 10_000, RequestRefused),
        (b"186a1\r\n", BodyTooLarge),
        (b"1\r\na\r\n186a0\r\n", BodyTooLarge),
    ],
)
def test_bad_chunks(server: Server, chunks: bytes, kind: type[RequestRefused]) -> None:
    server.errors.clear()
    answer = server.until_closed(put("/echo", "Transfer-Encoding: chunked") + chunks)
    (error,) = server.errors
    assert type(error) is kind
    assert statuses(answer) == [error.status]


def test_chunks_extensions_and_trailers(server: Server) -> None:
    request = put("/echo", "Transfer-Encoding: Chunked")
    request += (
        b'003;a=b\r\none\r\n10 ; q="x"\r\n' + b"2" * 16 + b"\r\n0\r\nX-Sum: abc\r\nX-b:\r\n\r\n"
    )
    for answer in (server.exchange(request), server.exchange(request * 2).split(b"HTTP/1.1 ")[2]):
        seen = json.loads(answer.split(b"\r\n\r\n")[1])
        assert seen["body"] == "one" + "2" * 16
        assert seen["trailers"] == [["x-sum", "abc"], ["x-b", ""]]


@pytest.mark.parametrize(
    "request_bytes",
    [
        put("/echo", "Content-Length: 5") + b"1234",
        put("/echo", "Transfer-Encoding: chunked") + b"5\r\n1234",
        put("/echo", "Transfer-Encoding: chunked") + b"4\r\n1234\r\n",
        put("/echo", "Transfer-Encoding: chunked") + b"4\r\n1234\r\n0\r\nX: y\r\n",
    ],
)
def test_a_body_that_ends_early(server: Server, request_bytes: bytes) -> None:
    server.errors.clear()
    assert statuses(server.exchange(request_bytes)) == [400]
    assert [type(error) for error in server.errors] == [BodyTruncated]


def test_bytes_after_a_body_are_the_next_request(server: Server) -> None:
    answer = server.exchange(put("/echo", "Content-Length: 2") + b"ab" + b"?junk\r\n\r\n")
    assert statuses(answer) == [200, 400]


def test_a_body_larger_than_a_handler_allows() -> None:
    with running(Limits(body_bytes=4 << 20)) as roomy:
        large = put("/echo", f"Content-Length: {(1 << 20) + 1}")
        assert status_of(roomy.until_closed(large)) == 413
        chunked = put("/echo", "Transfer-Encoding: chunked") + b"100001\r\n" + b"x" * 0x100001
        assert status_of(roomy.until_closed(chunked)) == 413


def test_large_bodies_arrive_whole(server: Server) -> None:
    payload = bytes(range(256)) * 300
    request = put("/count", f"Content-Length: {len(payload)}") + payload
    chunked = b"".join(b"%x\r\n%b\r\n" % (size, payload[:size]) for size in (1, 70_000, 7))
    request += put("/count", "Transfer-Encoding: chunked") + chunked + b"0\r\n\r\n"
    answers = server.exchange(request)
    assert [part.split(b"\r\n\r\n")[1] for part in answers.split(b"HTTP/1.1 ")[1:]] == [
        b"76800",
        b"70008",
    ]


def test_a_handlers_own_deadline_loses_no_byte(server: Server) -> None:
    with server.connect() as sock:
        sock.sendall(put("/patient", "Content-Length: 600"))
        payload = bytes(range(200)) * 3
        for start in range(0, 600, 50):
            sock.sendall(payload[start : start + 50])
            time.sleep(0.012)
        assert read_until(sock, payload[-50:]).endswith(payload)


# --- 100-continue ---------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"payload", b""])
def test_a_client_that_asks_is_told_to_go_on(server: Server, body: bytes) -> None:
    with server.connect() as sock:
        sock.sendall(put("/echo", f"Content-Length: {len(body)}", "Expect: 100-Continue"))
        assert sock.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        sock.shutdown(socket.SHUT_WR)
        assert b'"body": "%b"' % body in read_all(sock)


def test_a_client_that_asks_before_a_chunked_body(server: Server) -> None:
    with server.connect() as sock:
        sock.sendall(put("/echo", "Transfer-Encoding: chunked", "Expect: 100-continue"))
        assert read_until(sock, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(b"1\r\na\r\n0\r\n\r\n")
        sock.shutdown(socket.SHUT_WR)
        assert b'"body": "a"' in read_all(sock)


def test_a_client_that_asks_and_is_refused_sends_nothing(server: Server) -> None:
    answer = server.until_closed(put("/unread", "Content-Length: 5", "Expect: 100-continue"))
    assert statuses(answer) == [403]


@pytest.mark.parametrize(
    ("value", "status"), [("200-maybe", 417), ("100-continue, x", 417), ("200", 200), ("", 200)]
)
def test_no_other_expectation_is_met(server: Server, value: str, status: int) -> None:
    assert statuses(server.exchange(get("/echo", f"Expect: {value}"))) == [status]


def test_http_1_0_is_not_told_to_go_on(server: Server) -> None:
    request = get("/echo", "Expect: 100-continue", "Content-Length: 0", version="1.0")
    assert statuses(server.exchange(request)) == [200]


# --- bodies that the handler leaves ---------------------------------------------------------------


@pytest.mark.parametrize(("size", "goes_on"), [(0, True), (1000, True), (1001, False)])
def test_an_unread_body_is_drained_while_small(server: Server, size: int, goes_on: bool) -> None:
    request = put("/unread", f"Content-Length: {size}") + b"x" * size
    assert statuses(server.until_closed(request * 2 + get("/closing"))) == (
        [403, 403, 200] if goes_on else [403]
    )


def test_a_half_read_chunked_body_ends_the_connection(server: Server) -> None:
    request = put("/part", "Transfer-Encoding: chunked") + b"14\r\n" + b"x" * 20 + b"\r\n0\r\n\r\n"
    assert statuses(server.until_closed(request * 2)) == [200]


def test_the_answer_is_seen_by_a_client_that_goes_on_sending() -> None:
    with running(Limits(drain_bytes=1000)) as server, server.connect() as sock:
        size = 8 << 20
        sock.sendall(put("/unread", f"Content-Length: {size}") + b"x" * size)
        assert statuses(read_all(sock)) == [403]


def test_failures_of_a_handler_are_the_servers(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    for path in ("/failing", "/injection", "/status?99", "/own_length"):
        answer = server.until_closed(get(path))
        assert statuses(answer) == [500]
        assert b"Set-Cookie" not in answer
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 4


def test_what_is_counted_and_told() -> None:
    with running(SMALL) as server:
        answer = server.exchange(put("/echo", "Content-Length: 3") + b"abc" + b"?")
        wait_until(lambda: len(server.answers) == 2, "both are answered")
        (head, status, sent, seconds), (none, refused, _, _) = server.answers
        assert head is not None
        assert (head.method, status, none, refused) == ("PUT", 200, None, 400)
        assert sent == answer.index(b"HTTP/1.1 400")
        assert 0 <= seconds < 10
        counters = server.counters
        assert (counters.connections, counters.requests, counters.refused) == (1, 1, 1)
        assert (counters.sent_bytes, counters.received_body_bytes) == (len(answer), 3)
