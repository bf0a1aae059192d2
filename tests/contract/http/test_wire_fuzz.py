"""However the bytes are cut, the answers are the same; whatever the bytes are, the server lives."""

import re
import socket
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfs.http.api import Limits
from kvfs.http.chunks import ChunkFraming
from kvfs.http.connection_errors import RequestRefused
from kvfs.http.parser import head_end, parse_head
from tests.contract.http.wire_server import Server, read_all, running, statuses

LIMITS = Limits(head_bytes=1024, target_bytes=512, drain_bytes=64, idle_s=5, head_s=5, stall_s=5)
FEW = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

TOKEN = st.from_regex(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,12}", fullmatch=True)
VALUE = st.from_regex(r"[!-~]([ -~]{0,20}[!-~])?", fullmatch=True)
METHOD = st.sampled_from(["GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS"])
TARGET = st.from_regex(r"/(echo|ok|unread|missing)(\?[!-~]{0,10})?", fullmatch=True)
PIECES = st.lists(st.binary(min_size=1, max_size=40), max_size=4)


@st.composite
def request_bytes(draw: st.DrawFn) -> bytes:
    lines = [f"{draw(METHOD)} {draw(TARGET)} HTTP/1.1", "Host: a"]
    # A prefix keeps clear of the fields that mean something.
    lines += [
        f"x-{name}: {value}" for name, value in draw(st.lists(st.tuples(TOKEN, VALUE), max_size=4))
    ]
    pieces = draw(PIECES)
    if draw(st.booleans()):
        body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        lines.append("Transfer-Encoding: chunked")
    else:
        body = b"".join(pieces)
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


@st.composite
def cut(draw: st.DrawFn, data: bytes) -> list[bytes]:
    places = sorted(draw(st.sets(st.integers(0, len(data)), max_size=12)))
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(LIMITS) as server:
        yield server


@pytest.fixture(scope="module")
def with_tasks() -> Iterator[Server]:
    """A server that answers each request in a task."""
    with running(LIMITS, steps=False) as server:
        yield server


def answers_to(server: Server, pieces: list[bytes]) -> bytes:
    with server.connect() as sock:
        try:
            for piece in pieces:
                sock.sendall(piece)
                if len(pieces) > 1:
                    time.sleep(0.0005)
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it has had enough, and said so
        return re.sub(rb"Date: [^\r]*", b"", read_all(sock))


@FEW
@given(data=st.data(), requests=st.lists(request_bytes(), min_size=1, max_size=4))
def test_a_sequence_of_requests_is_answered_the_same_however_it_is_cut(
    server: Server, with_tasks: Server, data: st.DataObject, requests: list[bytes]
) -> None:
    whole = b"".join(requests)
    expected = answers_to(with_tasks, [whole])
    assert answers_to(server, [whole]) == expected
    assert answers_to(server, data.draw(cut(whole))) == expected
    assert 1 <= len(statuses(expected)) <= len(requests)


@FEW
@given(data=st.data(), request=request_bytes())
def test_a_head_is_parsed_the_same_however_it_arrives(data: st.DataObject, request: bytes) -> None:
    end = head_end(request, 0, LIMITS)
    expected = parse_head(request[:end], LIMITS, ("", 0), False)
    arrived, found = b"", -1
    for piece in data.draw(cut(request)):
        arrived += piece
        if found < 0:
            found = head_end(arrived, 0, LIMITS)
    assert found == end
    assert parse_head(arrived[:found], LIMITS, ("", 0), False) == expected


@FEW
@given(data=st.data(), pieces=PIECES, rest=st.binary(max_size=10))
def test_chunks_are_framed_the_same_however_they_arrive(
    data: st.DataObject, pieces: list[bytes], rest: bytes
) -> None:
    body = b"".join(b"%x;a\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    body += b"0\r\nX-Sum: y\r\n\r\n" + rest
    framing, payload, left = ChunkFraming(LIMITS), b"", b""
    for arrived in data.draw(cut(body)):
        left += arrived
        while not framing.ended:
            if framing.left:
                taken, left = left[: framing.left], left[framing.left :]
                payload += taken
                framing.left -= len(taken)
                if not taken:
                    break
            elif (end := framing.advance(left, 0)) >= 0:
                left = left[end:]
            else:
                break
    assert framing.ended
    assert payload == b"".join(pieces)
    assert framing.trailers == [(b"x-sum", b"y")]
    assert left == rest


@FEW
@given(garbage=st.binary(max_size=300), begin=st.sampled_from([b"", b"GET / HTTP/1.1\r\n"]))
def test_garbage_is_parsed_or_refused(garbage: bytes, begin: bytes) -> None:
    block = begin + garbage
    try:
        if (end := head_end(block, 0, LIMITS)) >= 0:
            parse_head(block[:end], LIMITS, ("", 0), False)
    except RequestRefused as refusal:
        assert 400 <= refusal.status <= 505


MUTATIONS = st.tuples(st.integers(0, 400), st.binary(max_size=3))


@FEW
@given(
    requests=st.lists(request_bytes(), min_size=1, max_size=3),
    changes=st.lists(MUTATIONS, max_size=3),
)
def test_what_is_spoilt_is_answered_or_refused_and_never_hangs(
    server: Server, requests: list[bytes], changes: list[tuple[int, bytes]]
) -> None:
    spoilt = bytearray(b"".join(requests))
    for place, change in changes:
        spoilt[place : place + len(change)] = change
    answer = answers_to(server, [bytes(spoilt)])
    assert 500 not in statuses(answer)
    assert statuses(server.exchange(b"GET /ok HTTP/1.1\r\nHost: a\r\n\r\n")) == [200]
