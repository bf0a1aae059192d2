"""However a client's bytes are cut and put one after another, the answers are those to each request
by itself: whether it is answered in one step, in several or by a task."""

import re
import socket
import time
from itertools import pairwise
from typing import Final

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from s3api.auth.presign import presign
from tests.integration.s3 import REGION, S3

_HEAD: Final = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r]*\r\n(.*?)\r\n\r\n", re.DOTALL)
_LENGTH: Final = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_ETAG: Final = re.compile(rb'etag: ("[^"]*")', re.IGNORECASE)

Told = tuple[int, bytes | None, bytes]
"""Status, ETag, and the body unless it is an error's, which names its request."""
STEPS: Final = st.tuples(
    st.sampled_from(["GET", "HEAD", "PUT", "PUT", "DELETE", "LIST", "WRONG"]),
    st.sampled_from(["a", "b"]),
    st.binary(min_size=0, max_size=200) | st.just(b"x" * 70_000),
)


def _request(s3: S3, bucket: str, step: tuple[str, str, bytes]) -> bytes:
    kind, key, content = step
    method = {"LIST": "GET", "WRONG": "GET"}.get(kind, kind)
    path = f"/{bucket}" if kind == "LIST" else f"/{bucket}/{key}"
    pair = s3.users["main"]
    keys = pair.access_key, pair.secret
    now = time.time()
    url = presign(method, s3.endpoint, path.encode(), *keys, region=REGION, now=now, expires_s=900)
    if kind == "WRONG":
        url = url[:-1] + ("0" if url[-1] != "0" else "1")
    body = content if kind == "PUT" else b""
    target = url.removeprefix(s3.endpoint)
    host = f"{s3.host}:{s3.port}"
    head = f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _answers(sock: socket.socket, methods: list[str]) -> list[Told]:
    data, told = b"", list[Told]()
    for method in methods:
        while (head := _HEAD.match(data)) is None:
            data += _received(sock)
        length = _LENGTH.search(head[2])
        size = int(length[1]) if length is not None and method != "HEAD" else 0
        while len(data) < head.end() + size:
            data += _received(sock)
        body, data = data[head.end() : head.end() + size], data[head.end() + size :]
        etag = _ETAG.search(head[2])
        is_stable = int(head[1]) < 300 and b"<ListBucketResult" not in body
        told.append((int(head[1]), etag and etag[1], body if is_stable else b""))
    assert data == b"", "nothing follows the last answer"
    return told


def _received(sock: socket.socket) -> bytes:
    part = sock.recv(1 << 20)
    assert part, "it was closed before the last answer"
    return part


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    steps=st.lists(STEPS, min_size=1, max_size=6),
    places=st.sets(st.floats(0, 1), max_size=8),
)
def test_requests_are_answered_the_same_however_they_are_cut(
    s3: S3, bucket: str, steps: list[tuple[str, str, bytes]], places: set[float]
) -> None:
    requests = [_request(s3, bucket, step) for step in steps]
    methods = ["HEAD" if step[0] == "HEAD" else "" for step in steps]
    expected: list[Told] = []
    _delete(s3, bucket)
    for request, method in zip(requests, methods, strict=True):
        with s3.connect() as sock:
            sock.sendall(request)
            expected += _answers(sock, [method])
    whole = b"".join(requests)
    ends = sorted({round(place * len(whole)) for place in places} | {0, len(whole)})
    for cuts in ([0, len(whole)], ends):
        _delete(s3, bucket)
        with s3.connect() as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for begin, end in pairwise(cuts):
                sock.sendall(whole[begin:end])
                time.sleep(0.001)  # mostly each piece is seen by itself
            assert _answers(sock, methods) == expected


def _delete(s3: S3, bucket: str) -> None:
    for key in ("a", "b"):
        with s3.connect() as sock:
            sock.sendall(_request(s3, bucket, ("DELETE", key, b"")))
            assert _answers(sock, [""])[0][0] == 204
