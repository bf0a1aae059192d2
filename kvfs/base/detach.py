"""Coroutines that begin outside any task, and continue in one of their own once they must wait.

Most requests of a mount are answered from memory, in one step, and a task for each would cost more
than all the rest. Whether one must wait, for another host or a disk, is often known only halfway:
there it calls `aside`, and its driver gets the rest of it, to be run as a task. For a descriptor
it can wait without one, if its driver attends to descriptors (`until_readable`).

Invariants
- Before either a coroutine has awaited nothing else that may suspend, nor entered anything that
  belongs to a task (a cancel scope, a nursery, trio's locks).
- In a task `aside` does nothing, and is no checkpoint; `until_readable` waits there as trio does.
- Used from one thread, the event loop's.
"""

import contextlib
import math
import select
import time
import types
from collections.abc import Callable, Collection, Coroutine, Generator, Iterator
from typing import Any, Final, Generic, TypeVar

import msgspec
import trio

T = TypeVar("T")
_ASIDE: Final = object()
_driving = False
_others = -1
_due: Collection[object] = ()
_until = 0.0


@contextlib.contextmanager
def blocking(others: int, due: Collection[object], until: float) -> Iterator[None]:
    """Lets steps block the thread where they wait for a descriptor: to be driven on after that
    costs more than a short answer takes. The block is not begun while there is anything in `due`,
    and ends at `until` (of time.monotonic), or once the descriptor `others` is readable: then there
    is other work."""
    global _others, _due, _until
    _others, _due, _until = others, due, until
    try:
        yield
    finally:
        _others, _due = -1, ()


@types.coroutine  # a call less than a coroutine that awaits one
def aside() -> Generator[Any, Any, None]:
    """Moves the caller into a task; to be called before anything that may suspend."""
    if _driving:
        yield _ASIDE


@types.coroutine
def until_readable(fd: int, deadline: float = math.inf) -> Generator[Any, Any, None]:
    """Waits until the descriptor can be read: outside a task its driver does, which ends the wait
    with ClosedResourceError after `deadline` (of time.monotonic), or the thread blocks for a moment
    (`blocking`); in a task, `trio.lowlevel.notify_closing` ends it so."""
    if _driving:
        if _others >= 0 and not _due:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            poll.register(_others, select.POLLIN)
            if fd in dict(poll.poll(max(0.0, 1000 * (_until - time.monotonic())))):
                return
        yield fd, deadline
    else:
        yield from trio.lowlevel.wait_readable(fd).__await__()


class Unfinished(msgspec.Struct, Generic[T]):
    """The rest of a coroutine that went aside: await it in a task, or close it; or `go_on` with it
    once its descriptor can be read."""

    _step: Coroutine[Any, Any, T]
    fd: int
    """The descriptor that it waits for; negative: it needs a task."""
    deadline: float
    """The time (of time.monotonic) when that wait must end."""

    def go_on(self, error: Exception | None = None) -> "T | Unfinished[T]":
        """Runs it on outside a task, as `begin` does; `error` is raised in place of the wait."""
        return begin(self._step, error)

    def __await__(self) -> Generator[Any, Any, T]:
        resume: Callable[[Any], Any] = self._step.send
        value: Any = None
        if self.fd >= 0:
            try:
                yield from trio.lowlevel.wait_readable(self.fd).__await__()
            except BaseException as error:  # passed on, as those below
                resume, value = self._step.throw, error
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


def begin(step: Coroutine[Any, Any, T], error: Exception | None = None) -> T | Unfinished[T]:
    """Runs a coroutine to its end, or until it goes aside or waits for a descriptor. Its errors
    pass through. `error` is raised where it waits. Raises RuntimeError if it waits without having
    gone aside."""
    global _driving
    _driving = True
    try:
        trap = step.send(None) if error is None else step.throw(error)
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        _driving = False
    if trap is _ASIDE:
        return Unfinished(step, -1, math.inf)
    if type(trap) is tuple:
        return Unfinished(step, *trap)
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
