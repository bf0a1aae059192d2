"""A clock for trio that jumps over every wait, and stands while a thread works: what a slow disk
does takes no time, however long it takes."""

import contextlib
import math
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import pytest
import trio
import trio.testing

T = TypeVar("T")


@contextlib.contextmanager
def jumping_clock() -> Iterator[trio.testing.MockClock]:
    """For one `trio.run`."""
    clock = trio.testing.MockClock(autojump_threshold=0)
    in_thread = trio.to_thread.run_sync
    working = 0

    async def run_sync(*arguments: Any, **options: Any) -> Any:
        nonlocal working
        working += 1
        clock.autojump_threshold = math.inf
        try:
            return await in_thread(*arguments, **options)
        finally:
            working -= 1
            if not working:
                clock.autojump_threshold = 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trio.to_thread, "run_sync", run_sync)
        yield clock


def run_jumping(main: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """`trio.run`, by such a clock."""
    with jumping_clock() as clock:
        return trio.run(main, *arguments, clock=clock)
