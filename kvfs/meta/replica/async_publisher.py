"""Makes known, in the background, files that were published in the metadata replica alone.

They are remembered in the replica's file: a kill loses nothing, and the next start goes on with
them. `publish_pace` says how many go together.
"""

import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice
from typing import Final

import trio

from kvfs.base.errors import KvfsError, TooLarge
from kvfs.meta.replica.publish_pace import PublishPace

MOST: Final = 2_048
"""Files that may wait: beyond it a publisher waits for the server."""
_BATCH: Final = 128
"""Files in one commit, at most; as soon as so many wait they go."""
_RETRY_S: Final = 0.25
_log = logging.getLogger(__name__)


class AsyncPublisher:
    """A queue of inodes. `make_known` commits private writes of some; `is_waiting` says whether one
    has any (more, since)."""

    def __init__(
        self, make_known: Callable[[list[int]], Awaitable[None]], is_waiting: Callable[[int], bool]
    ) -> None:
        self._make_known = make_known
        self._is_waiting = is_waiting
        self._inos: dict[int, None] = {}
        self._pace = PublishPace()
        self._arrived = trio.Event()
        self._has_batch = trio.Event()

    @property
    def is_full(self) -> bool:
        return len(self._inos) >= MOST

    def add(self, inos: Iterable[int]) -> None:
        """Adds inodes, which are made known soon."""
        self._inos.update(dict.fromkeys(inos))
        self._arrived.set()
        if len(self._inos) >= _BATCH:
            self._has_batch.set()

    @property
    def waiting(self) -> list[int]:
        """The inodes that wait."""
        return list(self._inos)

    async def drain(self) -> None:
        """Returns when all that wait now are known. Raises Unavailable, Conflict."""
        waiting = list(self._inos)
        while waiting:
            for start in range(0, len(waiting), _BATCH):
                await self._one(waiting[start : start + _BATCH])
            waiting = [ino for ino in waiting if ino in self._inos]

    async def run(self) -> None:
        """Makes them known until cancelled."""
        complained = False
        next_at = -math.inf
        while True:
            await self._arrived.wait()
            with trio.move_on_at(next_at):
                await self._has_batch.wait()
            began, batch = trio.current_time(), list(islice(self._inos, _BATCH))
            try:
                await self._one(batch)
                complained = False
            except KvfsError as error:
                if not complained:
                    _log.warning("new files are not known to other nodes yet: %s", error)
                complained = True
                await trio.sleep(_RETRY_S)
            ended = trio.current_time()
            next_at = ended + self._pace.pause_s(len(batch), began, ended)
            if not self._inos:
                self._arrived = trio.Event()
            if len(self._inos) < _BATCH:
                self._has_batch = trio.Event()

    async def _one(self, batch: list[int]) -> None:
        try:
            await self._make_known(batch)
        except TooLarge:
            if len(batch) == 1:
                raise
            for ino in batch:
                await self._one([ino])
            return
        for ino in batch:
            if not self._is_waiting(ino):
                self._inos.pop(ino, None)
