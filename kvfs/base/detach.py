"""Coroutines that begin outside any task, and continue in one of their own once they must wait.

Most requests of a mount are answered from memory, in one step, and a task for each would cost more
than all the rest. Whether one must wait, for another host or a disk, is often known only halfway:
there it calls `aside`, and its driver gets the rest of it, to be run as a task.

Invariants
- Before `aside` a coroutine has awaited nothing that may suspend, nor entered anything that belongs
  to a task (a cancel scope, a nursery, trio's locks).
- In a task `aside` does nothing. It is no checkpoint.
- Used from one thread, the event loop's.
"""

import types
from collections.abc import Coroutine, Generator
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")
_ASIDE: Final = object()
_driving = False


async def aside() -> None:
    """Moves the caller into a task; to be called before anything that may suspend."""
    if _driving:
        await _leave()


@types.coroutine
def _leave() -> Generator[object, None, None]:
    yield _ASIDE


class Unfinished(Generic[T]):
    """The rest of a coroutine that went aside: await it in a task, or close it."""

    __slots__ = ("_step",)

    def __init__(self, step: Coroutine[Any, Any, T]) -> None:
        self._step = step

    def __await__(self) -> Generator[Any, Any, T]:
        resume, value = self._step.send, None
        while True:
            try:
                trap = resume(value)
            except StopIteration as done:
                result: T = done.value
                return result
            try:
                resume, value = self._step.send, (yield trap)
            except BaseException as error:  # passed on to the coroutine, which is ours to drive
                resume, value = self._step.throw, error

    def close(self) -> None:
        """Ends it without running it on."""
        self._step.close()


def begin(step: Coroutine[Any, Any, T]) -> T | Unfinished[T]:
    """Runs a coroutine to its end, or until it goes aside. Its errors pass through. Raises
    RuntimeError if it waits without having gone aside."""
    global _driving
    _driving = True
    try:
        trap = step.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        _driving = False
    if trap is _ASIDE:
        return Unfinished(step)
    step.close()
    raise RuntimeError("a request that must not wait did")


def finish(step: Coroutine[Any, Any, T]) -> T | None:
    """Returns the result of a coroutine that can be run to its end at once; None, and it is given
    up, if it would have to wait."""
    result = begin(step)
    if isinstance(result, Unfinished):
        result.close()
        return None
    return result
