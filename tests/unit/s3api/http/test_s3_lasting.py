"""What takes long is answered before it is known, ends in time, and keeps nobody else waiting."""

import threading
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from kvfs.base.errors import Unavailable
from kvfs.http.api import Head, Response
from kvfs.http.response import release
from kvfs.objects.object_errors import NoSuchUpload
from s3api.http.request_context import Call
from s3api.http.s3_errors import DECLARATION, S3Error
from s3api.operations import long_running
from s3api.operations.long_running import WorkPace, answer_lasting

LONG = 1 << 30
RESULT = {"CopyObjectResult": {"ETag": '"t-1"'}}


class _Call:
    """What it asks of its call."""

    operation = "CopyObject"
    request_id = "ID"
    head = Head(
        method="PUT",
        target=b"/b/k",
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

    def __init__(self, threads: int = 1) -> None:
        self.service = SimpleNamespace(lasting=trio.CapacityLimiter(threads))
        self._short = trio.CapacityLimiter(1)

    async def blocking(self, step: Callable[[], Any]) -> Any:
        return await trio.to_thread.run_sync(step, limiter=self._short)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_running, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(long_running, "_SPACE_S", 0.05)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch, _impatient: None) -> None:
    """What is quick is in time also where the machine is busy."""
    monkeypatch.setattr(long_running, "_PATIENCE_S", 60.0)


class Held:
    """Work that goes on in pieces until it is let go."""

    def __init__(self, outcome: object = RESULT, size: int = LONG) -> None:
        self.begun, self.go_on, self.ended = (threading.Event() for _ in range(3))
        self._outcome, self._size = outcome, size

    def __call__(self, pace: WorkPace) -> Any:
        pace.begin(self._size)
        self.begun.set()
        try:
            while not self.go_on.wait(0.01):
                pace.step(0)
            if isinstance(self._outcome, Exception):
                raise self._outcome
            return self._outcome
        finally:
            self.ended.set()


def started(call: _Call, work: Held, **options: Any) -> Any:
    return answer_lasting(cast("Call", call), work, LONG, **options)


async def read(response: Response, work: Held) -> tuple[int, list[bytes]]:
    """Let the work go on when the client has had some spaces."""
    pieces = []
    async for piece in cast("AsyncGenerator[bytes, None]", response.body):
        pieces.append(piece)
        if len(pieces) == 4:
            work.go_on.set()
    return response.status, pieces


def slowly(outcome: object) -> tuple[int, list[bytes]]:
    async def main() -> tuple[int, list[bytes]]:
        work = Held(outcome)
        return await read(await started(_Call(), work), work)

    return trio.run(main)


@pytest.mark.usefixtures("patient")
def test_work_that_is_quick_is_answered_like_any() -> None:
    work = Held()
    work.go_on.set()
    response = trio.run(started, _Call(), work)
    assert response.status == 200
    assert isinstance(response.body, bytes)
    assert b"<ETag>" in response.body


def test_spaces_keep_the_client_waiting() -> None:
    status, pieces = slowly(RESULT)
    assert status == 200
    assert pieces[0] == DECLARATION
    assert set(pieces[1:-1]) == {b" "}
    whole = b"".join(pieces)
    assert whole.count(b"<?xml") == 1
    assert whole.endswith(b"</CopyObjectResult>")


def test_an_error_comes_after_the_status() -> None:
    status, pieces = slowly(NoSuchUpload("gone"))
    assert status == 200
    whole = b"".join(pieces)
    assert whole.startswith(DECLARATION + b" ")
    assert b"<Error><Code>NoSuchUpload</Code>" in whole


@pytest.mark.usefixtures("patient")
def test_an_error_in_time_is_raised() -> None:
    work = Held(NoSuchUpload("gone"))
    work.go_on.set()
    with pytest.raises(NoSuchUpload):
        trio.run(started, _Call(), work)


def test_a_short_step_waits_for_no_thread_of_the_long_ones() -> None:
    async def main() -> None:
        call, work, short = _Call(), Held(), Held()
        short.go_on.set()
        response = await started(call, work)
        with trio.fail_after(10):
            done = await answer_lasting(cast("Call", call), short, 1000)
        assert isinstance(done.body, bytes)
        assert not work.ended.is_set()
        await read(response, work)

    trio.run(main)


def test_too_many_that_wait_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_running, "_WAITING", 1)

    async def main() -> None:
        call, first, second = _Call(), Held(), Held()
        answers = [await started(call, first), await started(call, second)]
        with pytest.raises(S3Error) as told:
            await started(call, Held())
        assert told.value.code == "SlowDown"
        second.go_on.set()
        for response, work in zip(answers, (first, second), strict=True):
            await read(response, work)

    trio.run(main)


def test_where_no_thread_can_be_had_that_request_fails_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def no_thread(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> Response:
        call, work = _Call(), Held()
        with monkeypatch.context() as patched, pytest.raises(RuntimeError):
            patched.setattr(trio.to_thread, "run_sync", no_thread)
            await started(call, work)
        work.go_on.set()
        return cast("Response", await started(call, work))

    assert trio.run(main).status == 200


def test_its_deadline_goes_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_running, "_DEADLINE_S", 0.0)
    pace = WorkPace()
    pace.begin(1 << 40)
    pace.step(1)
    pace.begin(0)
    with pytest.raises(Unavailable, match="longer"):
        pace.step(1)


@pytest.mark.parametrize("pieces", [0, 1, 2])
def test_it_ends_when_the_client_goes(pieces: int) -> None:
    """Also where not even the answer's head could be sent."""

    async def main() -> bool:
        work = Held()
        response = await started(_Call(), work)
        for _ in range(pieces):
            await anext(cast("AsyncGenerator[bytes, None]", response.body))
        await release(response)
        try:
            return await trio.to_thread.run_sync(work.ended.wait, 30)
        finally:
            work.go_on.set()

    assert trio.run(main)


@pytest.mark.usefixtures("patient")
def test_it_ends_when_it_is_cancelled() -> None:
    async def main() -> Held:
        work = Held()
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(started, _Call(), work)
                await trio.to_thread.run_sync(work.begun.wait)
                scope.cancel()
        return work

    assert trio.run(main).ended.is_set()


def test_what_outlives_the_client_is_done_whoever_waits() -> None:
    async def main() -> Held:
        work = Held()
        response = await started(_Call(), work, outlives_client=True)
        body = cast("AsyncGenerator[bytes, None]", response.body)
        await anext(body)
        await body.aclose()
        assert not work.ended.wait(0.1)
        work.go_on.set()
        return work

    assert trio.run(main).ended.is_set()
