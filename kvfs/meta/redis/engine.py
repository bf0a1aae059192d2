"""The engine on a Redis or Valkey server, for callers of any thread and any event loop.

Invariants
- All connections of a `Core` belong to one event loop: a thread of the engine's own has one, and
  a loop
  that entered `within` has another.
- What is read was so after the call began.

What a commit acknowledges is in the server's memory. What survives the server's death is the
server's own setting; `sync` asks for the most that it can promise, and `promise` says what that
is.
"""

import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import trio

from kvfs.meta.engine import Transaction
from kvfs.meta.redis.calling import locate
from kvfs.meta.redis.committing import Outcome
from kvfs.meta.redis.core import Core, closed
from kvfs.meta.redis.known import Known
from kvfs.meta.redis.reading import advance, reading

T = TypeVar("T")
DEADLINE_S: Final = 10.0


class RedisEngine:
    """The metadata at `url` (`location.HELP`). `cluster` names whose they have to be; None:
    anybody's. Raises Unavailable, NotSupported, Invalid, Conflict (another cluster's)."""

    immediate = False
    reads_immediate = False

    def __init__(
        self, url: str, *, cluster: str | None = None, deadline_s: float = DEADLINE_S
    ) -> None:
        self._location = locate(url)
        self._deadline_s = deadline_s
        self._core = Core(self._location, deadline_s, cluster)
        self._within: dict[trio.lowlevel.TrioToken, Core] = {}
        self._stop = trio.Event()
        self._token: trio.lowlevel.TrioToken
        self._nursery: trio.Nursery
        ready: Future[None] = Future()
        self._thread = threading.Thread(
            target=trio.run, args=(self._main, ready), name="kvfs-redis", daemon=True
        )
        self._thread.start()
        ready.result()
        assert self._core.cluster is not None
        self.cluster: str = self._core.cluster
        """Whose the metadata are."""

    @property
    def round_trips(self) -> int:
        """Requests sent to servers so far."""
        return sum(core.round_trips for core in [self._core, *self._within.values()])

    def read_now(self, fn: Callable[[Transaction], T]) -> T:
        """As `read`, blocking; `fn` runs in the caller's thread."""
        known = Known(self._core.layout)
        steps = reading(fn, known, self._core.asker.clock)
        end = self._call(self._end).result()
        while not isinstance(step := advance(steps), Outcome):
            self._call(self._core.asker.fetch, known, step, end).result()
        result: T = step.get()
        return result

    def transact_now(self, fn: Callable[[Transaction], T]) -> T:
        """As `transact`, blocking; `fn` runs in the engine's thread."""
        result: T = self._call(self._core.transact, fn).result()
        return result

    async def read(self, fn: Callable[[Transaction], T]) -> T:
        """Run `fn` on a read-only view. Cancelled: nothing happened."""
        core = self._within.get(trio.lowlevel.current_trio_token())
        if core is not None:
            return await core.read(fn)
        await trio.lowlevel.checkpoint()
        known = Known(self._core.layout)
        steps = reading(fn, known, self._core.asker.clock)
        end = await _result(self._call(self._end))
        while not isinstance(step := advance(steps), Outcome):
            await _result(self._call(self._core.asker.fetch, known, step, end))
        result: T = step.get()
        return result

    async def transact(
        self,
        fn: Callable[[Transaction], T],
        *,
        private: int = 0,  # noqa: ARG002 -- a mirror's alone
        behind: bool = False,  # noqa: ARG002 -- a mirror's alone
    ) -> T:
        """Run `fn` and commit. Cancelled: either nothing or everything was committed; it may have
        to wait until it is known, at most until the deadline."""
        core = self._within.get(trio.lowlevel.current_trio_token())
        if core is not None:
            return await core.transact(fn)
        await trio.lowlevel.checkpoint()
        result: T = await _result(self._call(self._core.transact, fn))
        return result

    async def sync(self) -> None:
        """Everything committed before the call is kept as `promise` says. Raises Unavailable."""
        await self.promise()

    async def promise(self) -> str:
        """As `sync`; says what survives the server's death from now on."""
        core = self._within.get(trio.lowlevel.current_trio_token())
        if core is not None:
            return await core.sync()
        await trio.lowlevel.checkpoint()
        promise: str = await _result(self._call(self._core.sync))
        return promise

    @asynccontextmanager
    async def within(self) -> AsyncIterator[None]:
        """Tasks of the caller's event loop are served in it, by connections of their own, without a
        change of thread. Raises Unavailable."""
        token = trio.lowlevel.current_trio_token()
        core = Core(self._location, self._deadline_s, self.cluster)
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(core.run)
                self._within[token] = core
                try:
                    yield
                finally:
                    del self._within[token]
                    nursery.cancel_scope.cancel()
        except BaseExceptionGroup as errors:
            raise _only(errors) from None

    def close(self) -> None:
        """End the thread; idempotent."""
        if self._thread.is_alive():
            self._token.run_sync_soon(self._stop.set)
            self._thread.join()

    # ---- the engine's own thread

    async def _main(self, ready: "Future[None]") -> None:
        try:
            async with trio.open_nursery() as nursery:
                self._nursery, self._token = nursery, trio.lowlevel.current_trio_token()
                await nursery.start(self._core.run)
                ready.set_result(None)
                await self._stop.wait()
                nursery.cancel_scope.cancel()
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(_only(error))
        finally:
            self._stop.set()

    async def _end(self) -> float:
        return trio.current_time() + self._deadline_s

    def _call(self, step: Callable[..., Awaitable[Any]], *arguments: object) -> "Future[Any]":
        """Have a step done in the engine's thread."""
        future: Future[Any] = Future()

        async def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(await step(*arguments))
            except trio.Cancelled:
                future.set_exception(closed())
                raise
            except BaseException as error:
                future.set_exception(_only(error))

        def start() -> None:
            if self._stop.is_set():
                future.set_exception(closed())
            else:
                self._nursery.start_soon(run)

        try:
            self._token.run_sync_soon(start)
        except trio.RunFinishedError:
            raise closed() from None
        return future


async def _result(future: "Future[Any]") -> Any:
    """Its result, in any event loop. Cancelled: it is, if it has not begun; else it is waited
    for."""
    token, task = trio.lowlevel.current_trio_token(), trio.lowlevel.current_task()
    is_waiting = True

    def wake() -> None:
        nonlocal is_waiting
        if is_waiting:
            is_waiting = False
            trio.lowlevel.reschedule(task)

    def abort(_: object) -> trio.lowlevel.Abort:
        nonlocal is_waiting
        if not future.cancel():
            return trio.lowlevel.Abort.FAILED
        is_waiting = False
        return trio.lowlevel.Abort.SUCCEEDED

    future.add_done_callback(lambda _: token.run_sync_soon(wake))
    await trio.lowlevel.wait_task_rescheduled(abort)
    return future.result()


def _only(error: BaseException) -> BaseException:
    """The one error of a group of one."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
