"""Progress, or the reason of a long wait: a bar or a line, on a terminal; nothing elsewhere."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

_PATIENCE_S: Final = 1.0


@contextlib.contextmanager
def shown(what: str, size_bytes: int | None) -> Iterator[Callable[[int], None]]:
    """Returns a function to call with the bytes moved so far. `size_bytes` None: not known.

    The bar appears after a second, so that short transfers stay silent.
    """
    with _patient(lambda stack: _bar(stack, what, size_bytes)) as step:
        yield step


@contextlib.contextmanager
def counted(what: str, number: int) -> Iterator[Callable[[int], None]]:
    """Returns a function to call with the number done so far of `number`: `3 of 64 what`. It may be
    called often, and shows nothing within a second."""
    with _patient(lambda stack: _count(stack, what, number)) as step:
        yield step


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Tells what is being done, once, if the block takes longer than a second."""
    if not sys.stderr.isatty():
        yield
        return
    timer = threading.Timer(_PATIENCE_S, print, [what], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def _patient(
    make: Callable[[contextlib.ExitStack], Callable[[int], None]],
) -> Iterator[Callable[[int], None]]:
    """Shows the result of `make` after a second."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with contextlib.ExitStack() as stack:
        bar: Callable[[int], None] | None = None
        end_of_patience = time.monotonic() + _PATIENCE_S

        def step(done: int) -> None:
            nonlocal bar
            if bar is None:
                if time.monotonic() < end_of_patience:
                    return
                bar = make(stack)
            bar(done)

        yield step


def _bar(stack: contextlib.ExitStack, what: str, size_bytes: int | None) -> Callable[[int], None]:
    # Imported when a bar is needed: rich costs more than most transfers.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    progress = stack.enter_context(
        Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
    )
    task = progress.add_task(what, total=size_bytes)
    return lambda moved_bytes: progress.update(task, completed=moved_bytes)


def _count(stack: contextlib.ExitStack, what: str, number: int) -> Callable[[int], None]:
    from rich.console import Console
    from rich.progress import Progress, TextColumn

    progress = stack.enter_context(
        Progress(
            TextColumn("{task.completed} of {task.total} {task.description}", markup=False),
            console=Console(stderr=True),
            transient=True,
        )
    )
    task = progress.add_task(what, total=number)
    return lambda done: progress.update(task, completed=done)
