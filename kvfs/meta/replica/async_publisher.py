"""Makes known, in the background, files that were published in the metadata replica alone.

They are remembered in the replica's file: a kill loses nothing, and the next start goes on with
them. A file that comes after a rest goes at once; files in close succession go together, since a
request for each would cost more than all the rest of a new file.
"""

import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice
from typing import Final

import trio

from kvfs.base.errors import KvfsError, TooLarge

MOST: Final = 2_048
"""Files that may wait: beyond it a publisher waits for the server."""
_BATCH: Final = 64
_GATHER_S: Final = 0.005
"""Time after a batch has gone within which published files go together."""
_GATHER_MOST_S: Final = 0.025
_REST: Final = 4
"""The pause is as many times as long as the batch took, between these two: if that is slow for the
load on this host, larger batches reduce it."""
_RETRY_S: Final = 0.25
_log = logging.getLogger(__name__)


class Behind:
    """A queue of inodes. `make_known` commits private writes of some."""

    def __init__(self, make_known: Callable[[list[int]], Awaitable[None]]) -> None:
        self._make_known = make_known
        self._inos: dict[int, None] = {}
        self._arrived = trio.Event()

    @property
    def is_full(self) -> bool:
        return len(self._inos) >= MOST

    def add(self, inos: Iterable[int]) -> None:
        """Adds inodes, which are made known soon."""
        self._inos.update(dict.fromkeys(inos))
        self._arrived.set()

    async def drain(self) -> None:
        """Returns when all that wait now are known. Raises Unavailable, Conflict."""
        waiting = list(self._inos)
        for start in range(0, len(waiting), _BATCH):
            await self._one(waiting[start : start + _BATCH])

    async def run(self) -> None:
        """Makes them known until cancelled."""
        complained = False
        next_at = -math.inf
        while True:
            await self._arrived.wait()
            if len(self._inos) < _BATCH and trio.current_time() < next_at:
                await trio.sleep_until(next_at)
            began = trio.current_time()
            try:
                await self._one(list(islice(self._inos, _BATCH)))
                complained = False
            except KvfsError as error:
                if not complained:
                    _log.warning("new files are not known to other nodes yet: %s", error)
                complained = True
                await trio.sleep(_RETRY_S)
            gone = trio.current_time()
            next_at = gone + min(max(_GATHER_S, _REST * (gone - began)), _GATHER_MOST_S)
            if not self._inos:
                self._arrived = trio.Event()

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
            self._inos.pop(ino, None)
