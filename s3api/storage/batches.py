"""Does work for many waiting requests at once.

Requests that come while a batch is being done go together next: alone, a request waits for its own
step and no more; under load one transaction and one round trip serve all.
"""

from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, TypeVar

import trio

from kvfs.base.detach import aside

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


def in_a_thread(
    step: Callable[[Sequence[Item]], Sequence[Result | Exception]],
) -> Callable[[Sequence[Item]], Awaitable[Sequence[Result | Exception]]]:
    """Returns a step of `Together` that does this one in a thread."""

    async def run(items: Sequence[Item]) -> Sequence[Result | Exception]:
        return await trio.to_thread.run_sync(step, items)

    return run


class _Waiting(Generic[Item, Result]):
    """A request that waits."""

    __slots__ = ("done", "error", "item", "result")
    result: Result
    """The result, set when it is done, unless there is an error."""

    def __init__(self, item: Item) -> None:
        self.item = item
        self.done = trio.Event()
        self.error: Exception | None = None

    async def outcome(self) -> Result:
        """Returns the result when it is done, or raises the error."""
        await self.done.wait()
        if self.error is not None:
            raise self.error
        return self.result


class Together(Generic[Item, Result]):
    """The batches of one worker. `run` must be running while any request waits."""

    def __init__(
        self, step: Callable[[Sequence[Item]], Awaitable[Sequence[Result | Exception]]]
    ) -> None:
        """`step` gives a result or an exception for each item. Its own exception is raised to
        all."""
        self._step = step
        self._waiting: list[_Waiting[Item, Result]] = []
        self._somebody = trio.Event()

    async def do(self, item: Item) -> Result:
        """Returns the item's result, or raises its exception. Cancelled: it is done all the
        same."""
        await aside()
        mine: _Waiting[Item, Result] = _Waiting(item)
        self._waiting.append(mine)
        self._somebody.set()
        return await mine.outcome()

    async def run(self) -> None:
        """Does batches until cancelled; the one under way then is done."""
        while True:
            await self._somebody.wait()
            self._somebody = trio.Event()
            batch, self._waiting = self._waiting, []
            with trio.CancelScope(shield=True):
                results = await self._results(batch)
            for each, result in zip(batch, results, strict=True):
                if isinstance(result, Exception):
                    each.error = result
                else:
                    each.result = result
                each.done.set()

    async def _results(
        self, batch: Sequence[_Waiting[Item, Result]]
    ) -> Sequence[Result | Exception]:
        try:
            return await self._step([each.item for each in batch])
        except Exception as error:  # each of those who wait raises it
            return [error] * len(batch)


class Lanes(Generic[Key, Result]):
    """The steps of one worker about keys: each is done once for all who wait for that key then, and
    none waits for that of another key. `run` must be running while any request waits."""

    def __init__(self, step: Callable[[Key], Awaitable[Result]]) -> None:
        self._step = step
        self._waiting: dict[Key, list[_Waiting[Key, Result]]] = {}
        """The requests that wait for the next step of each key, until nobody does."""
        self._idle: list[Key] = []
        """Keys that are to have a first step."""
        self._somebody = trio.Event()

    async def do(self, key: Key) -> Result:
        """Returns the result of a step that began after the call, or raises what it raised.
        Cancelled: it is done all the same."""
        await aside()
        mine: _Waiting[Key, Result] = _Waiting(key)
        lane = self._waiting.get(key)
        if lane is None:
            self._waiting[key] = [mine]
            self._idle.append(key)
            self._somebody.set()
        else:
            lane.append(mine)
        return await mine.outcome()

    async def run(self) -> None:
        """Does steps until cancelled; those under way then are done."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._somebody.wait()
                self._somebody = trio.Event()
                keys, self._idle = self._idle, []
                for key in keys:
                    nursery.start_soon(self._serve, key)

    async def _serve(self, key: Key) -> None:
        """Does the steps of a key until nobody waits for one."""
        while batch := self._waiting[key]:
            self._waiting[key] = []
            try:
                with trio.CancelScope(shield=True):
                    result = await self._step(key)
            except Exception as error:  # each of those who wait raises it
                for each in batch:
                    each.error = error
            else:
                for each in batch:
                    each.result = result
            for each in batch:
                each.done.set()
        del self._waiting[key]
