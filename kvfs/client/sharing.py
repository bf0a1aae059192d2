"""Shares the moving of many files' bytes among a few threads: system calls release the GIL."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

from kvfs.client.session import WORKERS, Session

T = TypeVar("T")
Step = Callable[[int], None]
"""Called with the bytes moved so far, by the caller's thread; what it raises ends the work."""


def nothing(_: int) -> None:
    """The `Step` of who does not want to know."""


def each(
    session: Session,
    items: Sequence[T],
    job: Callable[[T], None],
    *,
    sizes: Sequence[int],
    alone_below: int,
    step: Step,
) -> None:
    """Do the job for each item, here and in threads of the session; alone where all `sizes`
    together are below `alone_below`.

    The first error of a job, or of `step`, is raised when no thread is at work any more: then the
    others are not done, or not all.
    """
    rest = iter(range(len(items)))
    errors: list[BaseException] = []
    done = 0

    def help_out() -> None:
        for at in rest:
            if errors:
                return
            try:
                job(items[at])
            except BaseException as error:
                errors.append(error)

    helpers = min(WORKERS, len(items) - 1) if sum(sizes) >= alone_below else 0
    running = [session.pool.submit(help_out) for _ in range(helpers)]
    try:
        for at in rest:
            if errors:
                break
            job(items[at])
            done += sizes[at]
            step(done)
    except BaseException as error:
        errors.append(error)
    _settle(running, errors)
    if errors:
        raise errors[0]


def _settle(running: list["Future[None]"], errors: list[BaseException]) -> None:
    """Also an interrupt does not leave before the threads: they hold descriptors that are closed
    next."""
    while True:
        try:
            wait(running)
            return
        except BaseException as error:
            errors.append(error)
