"""Shares the moving of many files' bytes among a few threads: system calls release the GIL."""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvfs.session.session import WORKERS, Session

T = TypeVar("T")
Step = Callable[[int], None]
"""Called with the bytes moved so far, by the caller's thread; an exception of it ends the work."""


def nothing(_: int) -> None:
    """The `Step` of a caller that does not want to know."""


def each(
    session: Session,
    items: Sequence[T],
    job: Callable[[T], None],
    *,
    sizes: Sequence[int],
    alone_below: int,
    step: Step,
) -> None:
    """Does the job for each item, here and in threads of the session; alone if all `sizes` together
    are below `alone_below`.

    The first error of a job, or of `step`, or an interrupt, is raised when no thread is at work any
    more, and none will be: then the others are not done, or not all.
    """
    if len(items) <= 1 or sum(sizes) < alone_below:
        _alone(items, job, sizes, step)
        return
    rest = iter(range(len(items)))
    errors: list[BaseException] = []
    helpers = _Helpers()
    done = 0

    def help_out() -> None:
        if not helpers.come():
            return
        try:
            for at in rest:
                if errors:
                    return
                job(items[at])
        except BaseException as error:
            errors.append(error)
        finally:
            helpers.leave()

    try:
        for _ in range(min(WORKERS, len(items) - 1)):
            session.pool.submit(help_out)
        for at in rest:
            if errors:
                break
            job(items[at])
            done += sizes[at]
            step(done)
    except BaseException as error:
        errors.append(error)
    _settle(helpers, errors)
    if errors:
        raise errors[0]


def _alone(items: Sequence[T], job: Callable[[T], None], sizes: Sequence[int], step: Step) -> None:
    done = 0
    for item, size in zip(items, sizes, strict=True):
        job(item)
        done += size
        step(done)


class _Helpers:
    """The helpers at work. They are counted as they come, not as they are called: an interrupt can
    come between the call and its being noted."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._there = 0
        self._is_over = False

    def come(self) -> bool:
        """Counts a helper. False: it is over, there is nothing to do any more."""
        with self._changed:
            self._there += not self._is_over
            return not self._is_over

    def leave(self) -> None:
        with self._changed:
            self._there -= 1
            self._changed.notify_all()

    def end(self) -> None:
        """Admits no more helpers; returns when none is there."""
        with self._changed:
            self._is_over = True
            self._changed.wait_for(lambda: not self._there)


def _settle(helpers: _Helpers, errors: list[BaseException]) -> None:
    """Waits for the threads, even after an interrupt: they hold descriptors that are closed next,
    and write into memory of the caller."""
    while True:
        try:
            helpers.end()
            return
        except BaseException as error:
            errors.append(error)
