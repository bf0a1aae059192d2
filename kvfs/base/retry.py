"""How a background task of a node outlives a disk, or an engine, that fails for a while.

Invariants
- A step that raises KvfsError or OSError is left for later; anything else is a bug, and ends the
  task and with it the node. Cancellation passes.
- A failure that lasts fills no log: each message is said once in ten minutes.
"""

from collections.abc import Awaitable, Callable
from typing import Final

import trio

from kvfs.base.errors import KvfsError

PAUSE_S: Final = 1.0
"""After a failure: neither the disk nor the processor is to be busy with what does not work."""
_QUIET_S: Final = 600.0
_REMEMBERED: Final = 64
"""Messages: where each is another one, the oldest are forgotten."""


class Persistence:
    """The retry state of one task. `say` (a logger's method) is given a line; `what` comes before
    the error in it."""

    def __init__(self, say: Callable[[str], None], what: str) -> None:
        self._say = say
        self._what = what
        self._quiet_until: dict[object, float] = {}

    async def attempt(
        self, step: Callable[[], Awaitable[object]], pause_s: float = PAUSE_S
    ) -> None:
        """Run the step. Where it failed, that has been said and `pause_s` seconds have passed when
        this returns."""
        try:
            await step()
        except (KvfsError, OSError) as error:
            self.complain(error)
            await trio.sleep(pause_s)

    def complain(self, error: KvfsError | OSError) -> None:
        """Say it, unless it was said lately. Errors of the system that differ in the file alone are
        the same."""
        now = trio.current_time()
        message = (type(error), error.errno if isinstance(error, OSError) else str(error))
        if now < self._quiet_until.get(message, now):
            return
        self._quiet_until.pop(message, None)
        while len(self._quiet_until) >= _REMEMBERED:
            del self._quiet_until[next(iter(self._quiet_until))]
        self._quiet_until[message] = now + _QUIET_S
        self._say(f"{self._what}: {error}")
