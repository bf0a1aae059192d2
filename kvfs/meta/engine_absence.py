"""The behaviour of namespaces while the engine is away, as `kvfs namespace set NS --without-engine`
says. It is away from when a request was not answered within its deadline until it is heard again.

| setting | a strict namespace is read | changes that other nodes have to know |
|---|---|---|
| READ | as the replica had it when the engine was last heard | EngineAway, at once |
| WAIT | the same | wait until the engine is heard, WAIT_S at most: EngineAway |
| REFUSE | Unavailable | Unavailable |

A cache's names are misses then, whatever is set (`kvfs.cluster.coherence`), and in a peer namespace
all goes on. What no namespace has is READ.

Invariants
- EngineAway is raised of what was not begun: nothing of it is at the engine, nor will be.
- Nothing is read of a replica that is being read anew: it is of no one moment.
"""

from collections.abc import Callable
from typing import Final, Protocol

import trio

from kvfs.base import detach
from kvfs.base.errors import EngineAway, Unavailable
from kvfs.meta.records import Namespace

READ: Final = "read"
WAIT: Final = "wait"
REFUSE: Final = "refuse"
WAIT_S: Final = 60.0


class FollowedEngine(Protocol):
    """The follower of a namespace's shard."""

    @property
    def is_away(self) -> bool:
        """Whether its replica is whole, and the engine away."""

    async def until_heard(self) -> None:
        """Returns when the engine is not away."""


class EngineAbsence:
    """The behaviour of one node's namespaces. `record` gives that of a namespace (None: there is
    none), and raises Unavailable; `of` its follower."""

    def __init__(
        self, record: Callable[[int], Namespace | None], of: Callable[[int], FollowedEngine]
    ) -> None:
        self._record = record
        self._of = of

    def reads_on(self, namespace_id: int) -> bool:
        """Returns whether a namespace is read as the replica has it, since the engine is away."""
        return self._of(namespace_id).is_away and self._setting(namespace_id) != REFUSE

    async def until_heard(self, namespace_id: int, refused: EngineAway, end: float) -> None:
        """Returns when a change of a namespace, which was `refused`, is to be tried again. Raises
        it, at `end` (by trio's clock) where changes wait; Unavailable. Cancelled: nothing
        happened."""
        setting = self._setting(namespace_id)
        if setting == REFUSE:
            raise Unavailable(str(refused)) from refused
        if setting != WAIT or trio.current_time() >= end:
            raise refused
        await detach.aside()
        with trio.move_on_at(end):
            await self._of(namespace_id).until_heard()

    def _setting(self, namespace_id: int) -> str:
        record = self._record(namespace_id)
        return READ if record is None else record.without_engine
