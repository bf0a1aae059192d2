"""Tells the node of commits: one round trip for all waiting requests.

A response goes out only after the node's mount has forgotten what the commit replaced. One request
tells it by itself; under load many commits wait at once, so that those which came while the node
was being told go together next. Changes that the mount cannot know are told later: nobody waits for
that.
"""

from collections.abc import Sequence
from typing import Final

import trio

from kvfs.objects.object_store import ObjectStore
from kvfs.vfs.post_commit import Changed
from s3api.storage.batches import Together

_TICK_S: Final = 1.0
"""How often deadlines are looked at."""


class Teller:
    """The notifier of one worker. `run` must be running while any request waits."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._together: Together[Sequence[Changed], None] = Together(self._finish)
        self._is_telling = False

    async def run(self) -> None:
        """Serves those that wait, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._together.run)
            while True:
                await trio.sleep(_TICK_S)
                self._store.expire()

    async def tell(self, changed: list[Changed]) -> None:
        """Returns when the node's mount has forgotten what these commits replaced.

        Raises Unavailable: the node did not answer in time. Cancelled: the node is told all the
        same."""
        urgent = self._store.put_off(changed)
        if not urgent:
            return
        if self._is_telling:
            await self._together.do(urgent)
            return
        self._is_telling = True
        try:
            await self._store.tell_in_loop(urgent)
        finally:
            self._is_telling = False

    async def _finish(self, batch: Sequence[Sequence[Changed]]) -> list[None]:
        # The link to the node has a deadline of its own.
        await self._store.tell_in_loop([one for each in batch for one in each])
        return [None] * len(batch)
