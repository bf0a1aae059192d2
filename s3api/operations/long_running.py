"""Operations whose time grows with their bytes: copies, completions, checksums of whole objects.

They have threads of their own, so that short ones never wait behind them, and a deadline in
proportion to their bytes, checked after each piece (64 MiB at most).

An answer that takes longer than _PATIENCE_S begins before it is known: status 200, then a space now
and then, which XML allows between its declaration and the document, then the result or the error.
SDKs read errors of these operations from answers with status 200. Facts for the head, such as the
id of the new version, are not told then.
"""

import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Final

import trio

from kvfs.base.errors import Unavailable
from kvfs.http.api import Response
from s3api.http.error_map import s3_error
from s3api.http.request_context import Call
from s3api.http.s3_errors import DECLARATION, S3Error, error_response
from s3api.operations.answers import answer

_WAITING: Final = 256
"""Calls that may wait for a thread; further ones are refused."""
_SHORT_BYTES: Final = 4 << 20
"""Bytes up to which an operation is done beside the short steps."""
_DEADLINE_S: Final = 60.0
_LEAST_BYTES_S: Final = 1 << 20
"""The rate that is left for each when a slow disk copies for the threads of all workers at once."""
_PATIENCE_S: Final = 5.0
_SPACE_S: Final = 5.0


class WorkPace:
    """Tells whether work may go on: `begin` at its beginning, `step` after each of its pieces."""

    def __init__(self) -> None:
        self._deadline = 0.0
        self._abandoned = False

    def begin(self, size: int) -> None:
        """Notes that so many bytes are to be moved, from now on."""
        self._deadline = time.monotonic() + _DEADLINE_S + size / _LEAST_BYTES_S

    def abandon(self) -> None:
        """Notes that nobody waits for it any more; any thread."""
        self._abandoned = True

    def step(self, _: int) -> None:
        """Raises Unavailable if the work is to end. Takes the bytes moved so far, which decide
        nothing."""
        if self._abandoned:
            raise Unavailable("nobody waits for it any more")
        if time.monotonic() > self._deadline:
            raise Unavailable("it takes longer than is granted for its size")


Step = Callable[[WorkPace], Mapping[str, Any]]
"""Does the work, blocking, and returns the members of the answer."""


async def answer_lasting(
    call: Call, step: Step, size: int | None = None, *, outlives_client: bool = False
) -> Response:
    """Returns the answer to work on about `size` bytes; None: not known. Raises SlowDown, and
    exceptions of the work in time.

    Cancelled, or if the client goes away: the work ends at its next piece; with `outlives_client`
    at its end, since a repeated request wants the same answer."""
    work = _Work(step)
    if size is not None and size <= _SHORT_BYTES:
        await call.blocking(work.do)
        return answer(call, work.result())
    limiter = call.service.lasting
    if limiter.statistics().tasks_waiting >= _WAITING:
        raise S3Error("SlowDown")
    trio.lowlevel.spawn_system_task(work.attend, limiter)
    try:
        in_time = await work.wait(_PATIENCE_S)
    except trio.Cancelled:
        work.leave(outlives_client)
        raise
    if in_time:
        return answer(call, work.result())
    fields = [(b"content-type", b"application/xml")]
    body = _slowly(call, work, outlives_client)
    await anext(body)  # one that never began would not learn that it is closed
    return Response(200, fields, body)


class _Work:
    """One piece of work. The server's end waits for it."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._pace = WorkPace()
        self._done = trio.Event()
        self._result: Mapping[str, Any] = {}
        self._error: Exception | None = None

    def do(self) -> None:
        """Runs the step in a thread."""
        try:
            self._result = self._step(self._pace)
        except Exception as error:  # told by `result`
            self._error = error

    async def attend(self, limiter: trio.CapacityLimiter) -> None:
        """Runs the task. Cancelled: at the end of the work, if that has begun."""
        try:
            await trio.to_thread.run_sync(self.do, limiter=limiter)
        except RuntimeError as error:  # no thread can be had: nobody else's request ends with this
            self._error = error
        finally:
            self._done.set()

    async def wait(self, seconds: float) -> bool:
        """Returns whether it is done by then."""
        with trio.move_on_after(seconds):
            await self._done.wait()
        return self._done.is_set()

    def leave(self, outlives_client: bool) -> None:
        """Notes that the client waits no more."""
        if not outlives_client:
            self._pace.abandon()

    def result(self) -> Mapping[str, Any]:
        """Returns the result, or raises what the step raised."""
        if self._error is not None:
            raise self._error
        return self._result


async def _slowly(call: Call, work: _Work, outlives_client: bool) -> AsyncGenerator[bytes, None]:
    """The answer in pieces, after an empty one. Closed early, it leaves the work."""
    try:
        yield b""
        yield DECLARATION
        while not await work.wait(_SPACE_S):
            yield b" "
    finally:
        work.leave(outlives_client)
    try:
        document = answer(call, work.result()).body
    except Exception as error:  # the status has gone out: the document tells it
        told = s3_error(error)
        path = call.head.target.partition(b"?")[0].decode("latin-1")
        document = error_response(told, path, call.request_id, "")[2]
    assert isinstance(document, bytes)
    yield document.removeprefix(DECLARATION)
