"""A progress bar for transfers that take long, on a terminal; nothing elsewhere."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Final

_PATIENCE_S: Final = 1.0


@contextlib.contextmanager
def shown(what: str, size_bytes: int | None) -> Iterator[Callable[[int], None]]:
    """A function to call with the bytes moved so far. `size_bytes` None: not known.

    The bar appears after a second, so that short transfers stay silent.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with contextlib.ExitStack() as stack:
        bar: Callable[[int], None] | None = None
        end_of_patience = time.monotonic() + _PATIENCE_S

        def step(moved_bytes: int) -> None:
            nonlocal bar
            if bar is None:
                if time.monotonic() < end_of_patience:
                    return
                bar = _bar(stack, what, size_bytes)
            bar(moved_bytes)

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
