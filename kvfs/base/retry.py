"""Lets a background task of a node outlive a disk, or an engine, that fails for a while.

Invariants
- A step that raises KvfsError or OSError is left for later; anything else is a bug, and ends the
  task and with it the node. Cancellation passes.
- A lasting failure does not fill the log: each message is written once in ten minutes.
"""

from collections.abc import Awaitable, Callable
from typing import Final

import trio

from kvfs.base.errors import KvfsError

PAUSE_S: Final = 1.0
"""Pause after a failure: neither the disk nor the processor should be busy with what does not
work."""
_QUIET_S: Final = 600.0
_REMEMBERED: Final = 64
"""Remembered messages: if each is another one, the oldest are forgotten."""


class Persistence:
    """The retry state of one task. `say` (a logger's method) is given a line; `what` precedes the
    error in it."""

    def __init__(self, say: Callable[[str], None], what: str) -> None:
        self._say = say
        self._what = what
        self._quiet_until: dict[object, float] = {}

    async def attempt(
        self, step: Callable[[], Awaitable[object]], pause_s: float = PAUSE_S
    ) -> bool:
        """Runs the step; returns whether it succeeded: if it fails, after reporting it and
        `pause_s` seconds."""
        try:
            await step()
        except (KvfsError, OSError) as error:
            self.complain(error)
            await trio.sleep(pause_s)
            return False
        return True

    async def until_done(self, step: Callable[[], Awaitable[object]]) -> None:
        """Attempts the step until it succeeds."""
        while not await self.attempt(step):
            pass

    async def repeat(
        self, step: Callable[[], Awaitable[object]], every_s: float, *, first_s: float = 0.0
    ) -> None:
        """Attempts the step every so many seconds, the first time after `first_s`, until
        cancelled."""
        await trio.sleep(first_s)
        while True:
            await self.attempt(step)
            await trio.sleep(every_s)

    def complain(self, error: KvfsError | OSError) -> None:
        """Reports the error, unless it was reported lately. Errors of the system that differ only
        in the file are the same."""
        now = trio.current_time()
        message = (type(error), error.errno if isinstance(error, OSError) else str(error))
        if now < self._quiet_until.get(message, now):
            return
        self._quiet_until.pop(message, None)
        while len(self._quiet_until) >= _REMEMBERED:
            del self._quiet_until[next(iter(self._quiet_until))]
        self._quiet_until[message] = now + _QUIET_S
        self._say(f"{self._what}: {error}")
