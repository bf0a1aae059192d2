"""The task that keeps a process beside a mount: the mount's watchdog, or its holder."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import trio

Keep = Callable[[trio.CancelScope, trio.Event], Awaitable[None]]
"""Keeps the process within the scope; sets the event when it was started, or could not be."""


@contextlib.asynccontextmanager
async def beside(keep: Keep) -> AsyncIterator[trio.Event]:
    """Keeps a process while the block lasts, until the block has ended, even if that is cancelled.
    Entering it is no checkpoint: nobody else removes the mount just made. Raises what the block
    raises, as it was."""
    scope, begun = trio.CancelScope(shield=True), trio.Event()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep, scope, begun)
            try:
                yield begun
            finally:
                scope.cancel()
    except BaseExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        raise group.exceptions[0] from None
