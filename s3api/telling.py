"""Tells the node what was committed: one round trip for all requests that wait for it.

A response goes out only after the node's mount has forgotten what the commit replaced. Under load
many commits wait at once, so that those which came while the node was being told go together next.
"""

import trio

from kvfs.client.finish import Changed
from kvfs.errors import KvfsError
from kvfs.objects.store import ObjectStore


class _Waiting:
    """A request that waits for the node."""

    __slots__ = ("changed", "error", "told")

    def __init__(self, changed: list[Changed]) -> None:
        self.changed = changed
        self.told = trio.Event()
        self.error: KvfsError | None = None


class Teller:
    """Of one worker. `run` must be running while anybody waits."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._waiting: list[_Waiting] = []
        self._somebody = trio.Event()

    async def tell(self, changed: list[Changed]) -> None:
        """The node's mount has forgotten what these commits replaced when it returns.

        Raises Unavailable: the node did not answer in time. Cancelled: the node is told all the
        same."""
        if not changed:
            return
        mine = _Waiting(changed)
        self._waiting.append(mine)
        self._somebody.set()
        await mine.told.wait()
        if mine.error is not None:
            raise mine.error

    async def run(self) -> None:
        """Tell until cancelled; what is under way then is told."""
        while True:
            await self._somebody.wait()
            self._somebody = trio.Event()
            batch, self._waiting = self._waiting, []
            with trio.CancelScope(shield=True):  # the link to the node has a deadline of its own
                error = await trio.to_thread.run_sync(self._finish, batch)
            for each in batch:
                each.error = error
                each.told.set()

    def _finish(self, batch: list[_Waiting]) -> KvfsError | None:
        try:
            self._store.finish([one for each in batch for one in each.changed])
        except KvfsError as error:
            return error
        return None
