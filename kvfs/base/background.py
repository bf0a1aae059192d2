"""Tasks that one part of a program begins without waiting for them, owned by the task that runs
it."""

from collections.abc import Awaitable, Callable
from typing import Any

import trio


class Background:
    """The tasks of one part. They end with `run`: what is begun before or after is refused by
    whoever looks at `runs`."""

    def __init__(self) -> None:
        self.runs = False
        self._nursery: trio.Nursery | None = None

    async def run(self, *steps: Callable[[], Awaitable[object]]) -> None:
        """Runs these, and what is begun meanwhile, until cancelled."""
        async with trio.open_nursery() as self._nursery:
            self.runs = True
            try:
                for each in steps:
                    self._nursery.start_soon(each)
                await trio.sleep_forever()
            finally:
                self.runs = False
                self._nursery = None

    def begin(self, step: Callable[..., Awaitable[object]], *arguments: Any) -> None:
        """Begins a task; `runs` must be true."""
        assert self._nursery is not None, "it runs"
        self._nursery.start_soon(step, *arguments)
