"""Does work for many waiting requests at once.

Requests that come while a batch is being done go together next: alone, a request waits for its own
step and no more; under load one thread, one transaction and one round trip serve all.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import trio

Item = TypeVar("Item")
Result = TypeVar("Result")


class _Waiting(Generic[Item, Result]):
    """A request that waits."""

    __slots__ = ("done", "error", "item", "result")
    result: Result
    """The result, set when it is done, unless there is an error."""

    def __init__(self, item: Item) -> None:
        self.item = item
        self.done = trio.Event()
        self.error: Exception | None = None


class Together(Generic[Item, Result]):
    """The batches of one worker. `run` must be running while any request waits."""

    def __init__(self, step: Callable[[Sequence[Item]], Sequence[Result | Exception]]) -> None:
        """`step` runs in a thread; for each item it gives a result or an exception. Its own
        exception is raised to all."""
        self._step = step
        self._waiting: list[_Waiting[Item, Result]] = []
        self._somebody = trio.Event()

    async def do(self, item: Item) -> Result:
        """Returns the item's result, or raises its exception. Cancelled: it is done all the
        same."""
        mine: _Waiting[Item, Result] = _Waiting(item)
        self._waiting.append(mine)
        self._somebody.set()
        await mine.done.wait()
        if mine.error is not None:
            raise mine.error
        return mine.result

    async def run(self) -> None:
        """Does batches until cancelled; the one under way then is done."""
        while True:
            await self._somebody.wait()
            self._somebody = trio.Event()
            batch, self._waiting = self._waiting, []
            with trio.CancelScope(shield=True):
                results = await trio.to_thread.run_sync(self._results, batch)
            for each, result in zip(batch, results, strict=True):
                if isinstance(result, Exception):
                    each.error = result
                else:
                    each.result = result
                each.done.set()

    def _results(self, batch: Sequence[_Waiting[Item, Result]]) -> Sequence[Result | Exception]:
        try:
            return self._step([each.item for each in batch])
        except Exception as error:  # each of those who wait raises it
            return [error] * len(batch)
