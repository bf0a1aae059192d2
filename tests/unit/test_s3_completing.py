"""Completions that take long: the answer begins before it is known."""

import threading
import time
from typing import Any, cast

import pytest
import trio

from kvfs.objects.problems import NoSuchUpload
from kvfs.wire.http import Head
from s3api.call import Call
from s3api.errors import DECLARATION
from s3api.operations import completing


class _Call:
    """What a completion asks of its call here."""

    operation = "CompleteMultipartUpload"
    request_id = "ID"
    head = Head(
        method="POST",
        target=b"/b/k?uploadId=u",
        headers=[],
        fields={},
        content_length=None,
        chunked=False,
        persistent=True,
        http_1_0=False,
        expects_continue=False,
        peer=("::1", 1),
        secure=False,
    )

    async def blocking(self, step: Any) -> Any:
        return await trio.to_thread.run_sync(step)


async def answer_of(
    monkeypatch: pytest.MonkeyPatch, outcome: object, blocked: threading.Event
) -> tuple[int, list[bytes] | bytes]:
    def complete(_: Call) -> object:
        assert blocked.wait(10)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(completing, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(completing, "_SPACE_S", 0.05)
    monkeypatch.setattr(completing, "_complete", complete)
    response = await completing.complete_multipart_upload(cast("Call", _Call()))
    if isinstance(response.body, bytes):
        return response.status, response.body
    pieces = []
    assert response.body is not None
    async for piece in cast("Any", response.body):
        pieces.append(piece)
        if len(pieces) == 4:
            blocked.set()
    return response.status, pieces


def test_one_that_is_quick_is_an_answer_like_any(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = threading.Event()
    blocked.set()
    status, body = trio.run(answer_of, monkeypatch, {"ETag": '"t-1"'}, blocked)
    assert status == 200
    assert isinstance(body, bytes)
    assert b"<ETag>" in body


def test_spaces_keep_the_client_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    status, pieces = trio.run(answer_of, monkeypatch, {"ETag": '"t-1"'}, threading.Event())
    assert status == 200
    assert pieces[0] == DECLARATION
    assert set(pieces[1:-1]) == {b" "}
    whole = b"".join(cast("list[bytes]", pieces))
    assert whole.count(b"<?xml") == 1
    assert whole.endswith(b"</CompleteMultipartUploadResult>")


def test_an_error_comes_after_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    status, pieces = trio.run(answer_of, monkeypatch, NoSuchUpload("gone"), threading.Event())
    assert status == 200
    whole = b"".join(cast("list[bytes]", pieces))
    assert whole.startswith(DECLARATION + b" ")
    assert b"<Error><Code>NoSuchUpload</Code>" in whole


def test_an_error_in_time_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = threading.Event()
    blocked.set()
    with pytest.raises(NoSuchUpload):
        trio.run(answer_of, monkeypatch, NoSuchUpload("gone"), blocked)


def test_the_servers_end_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()

    def complete(_: Call) -> dict[str, str]:
        time.sleep(0.2)
        done.set()
        return {}

    async def leave() -> None:
        monkeypatch.setattr(completing, "_complete", complete)
        with trio.move_on_after(0.05):
            await completing.complete_multipart_upload(cast("Call", _Call()))

    trio.run(leave)
    assert done.is_set()
