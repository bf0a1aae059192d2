"""The load generators of the S3 benchmark: what they send, what they understand, how they end."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from benchmarks._processes import TaskFailed, together
from benchmarks._s3_http import Answer, read_answer
from benchmarks._s3_load import CONNECTIONS, new_keys
from benchmarks._s3_systems import Nginx, Server


def _in_pieces(data: bytes, size: int) -> Callable[[], bytes]:
    pieces = (data[first : first + size] for first in range(0, len(data), size))
    return lambda: next(pieces)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (b"HTTP/1.1 204 No Content\r\nDate: x\r\n\r\n", Answer(204, b"", False)),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", Answer(200, b"hello", False)),
        (
            b"HTTP/1.1 503 Slow\r\nconnection: close\r\ncontent-length: 0\r\n\r\n",
            Answer(503, b"", True),
        ),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\n\r\n",
            Answer(200, b"abc0123456789", False),
        ),
    ],
)
def test_an_answer_is_read_to_its_end_in_whatever_pieces(
    data: bytes, answer: Answer, size: int
) -> None:
    receive = _in_pieces(data, size)
    assert read_answer(receive) == answer
    with pytest.raises(StopIteration):
        receive()


def test_a_request_is_signed_for_its_own_server(tmp_path: Path) -> None:
    server = Server("any", tmp_path)
    server.address = ("127.0.0.1", 8000)
    parts = urlsplit(server.target("PUT", "a b/c", [(b"x", b"y&z")]))
    assert parts.path == "/bench/a%20b/c"
    assert parse_qs(parts.query)["x"] == ["y&z"]
    assert parse_qs(parts.query)["X-Amz-SignedHeaders"] == ["host"]
    head = server.head("PUT", "k", 4096)
    assert head.endswith(b"\r\nHost: 127.0.0.1:8000\r\nContent-Length: 4096\r\n\r\n")


def test_nginx_is_asked_for_plain_files(tmp_path: Path) -> None:
    assert Nginx(tmp_path).target("GET", "a/b") == "/files/a/b"


def test_each_connection_has_new_keys_of_its_own() -> None:
    shares = new_keys(100) + new_keys(100)
    keys = [key for share in shares for key in share]
    assert len(shares) == 2 * CONNECTIONS
    assert len(set(keys)) == len(keys) >= 200


def test_processes_answer_in_the_order_of_their_tasks() -> None:
    tasks = [lambda number=number: lambda: [number, os.getpid()] for number in range(3)]
    answers = together(tasks)
    assert [number for number, _ in answers] == [0, 1, 2]
    assert len({pid for _, pid in answers} | {os.getpid()}) == 4


def _cannot() -> Callable[[], None]:
    raise ValueError("no connection")


def _dies() -> Callable[[], None]:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


@pytest.mark.parametrize(
    ("task", "says"), [(_cannot, "ValueError: no connection"), (_dies, "without a word")]
)
def test_a_process_that_fails_is_told_of_and_holds_up_none(
    task: Callable[[], Callable[[], None]], says: str
) -> None:
    with pytest.raises(TaskFailed, match=says):
        together([lambda: lambda: None, task, lambda: lambda: None])
