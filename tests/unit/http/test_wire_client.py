"""Requests and the heads of answers, as bytes."""

import pytest

from kvfs.http.connection_errors import ConnectionLost
from kvfs.http.http_client import parse_answer, render_request


def test_a_request_as_it_is_sent() -> None:
    assert render_request("GET", b"/a?b", [(b"x-c", b"d")], b"") == (
        b"GET /a?b HTTP/1.1\r\nHost: kvfs\r\nx-c: d\r\n\r\n"
    )
    assert render_request("POST", b"/a", [], b"body") == (
        b"POST /a HTTP/1.1\r\nHost: kvfs\r\nContent-Length: 4\r\n\r\nbody"
    )


@pytest.mark.parametrize("target", [b"", b"a", b"/a b", b"/a\r\n", b"/\xff"])
def test_a_target_that_would_break_the_request_is_not_sent(target: bytes) -> None:
    with pytest.raises(ValueError, match="no target"):
        render_request("GET", target, [], b"")


@pytest.mark.parametrize("value", [b"a\r\nb: c", b"\0", b"\xff"])
def test_a_field_that_would_break_the_request_is_not_sent(value: bytes) -> None:
    with pytest.raises(ValueError, match="no value"):
        render_request("GET", b"/", [(b"x", value)], b"")


def test_the_head_of_an_answer() -> None:
    answer = parse_answer(b"HTTP/1.1 206 Part\r\nContent-Length: 12\r\nX-A:  b \r\n\r\n")
    assert (answer.status, answer.length, answer.persistent) == (206, 12, True)
    assert answer.fields[b"x-a"] == b"b"


def test_an_answer_that_ends_the_connection() -> None:
    block = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: Close\r\n\r\n"
    assert not parse_answer(block).persistent


@pytest.mark.parametrize(
    "block",
    [
        b"\x00\x01\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\nContent-Length: 0\r\n\r\n",
    ],
)
def test_what_no_node_answers_is_refused(block: bytes) -> None:
    with pytest.raises(ConnectionLost):
        parse_answer(block)
