"""Takes turns at a distant server: one of the tasks that wait for work does it together for all.

A task that comes when no other is at it does the turn itself, for all that wait; tasks that come
meanwhile wait, and one of them does the next one. So a request costs the asking task one wait for a
socket, and no task in between.
"""

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import outcome
import trio


class Waiting:
    """Work that a task waits for."""

    def __init__(self) -> None:
        self.is_done = False
        self.error: Exception | None = None
        self.task: trio.lowlevel.Task | None = None
        """The task that sleeps until it is done, or until it is to do the next turn."""
        self.is_leader = False

    def conclude(self, error: Exception | None = None) -> None:
        """Ends the wait: it is done, or it failed."""
        if not self.is_done:
            self.is_done, self.error = True, error
            self.wake()

    def wake(self) -> None:
        task, self.task = self.task, None
        if task is not None:
            trio.lowlevel.reschedule(task, outcome.Value(None))


W = TypeVar("W", bound=Waiting)


class LeaderBatch(Generic[W]):
    """`turn` takes any items out of `queue`, concludes them or puts them back, and never fails
    except by what it leaves in `taken`, which then fails with it. It is not cancelled."""

    def __init__(self, turn: Callable[[], Awaitable[None]]) -> None:
        self.queue: deque[W] = deque()
        self.taken: list[W] = []
        self._turn = turn
        self._is_busy = False
        self._idle = trio.lowlevel.ParkingLot()

    async def until_idle(self) -> None:
        """Returns when nothing waits."""
        while self._is_busy:
            await self._idle.park()

    async def wait(self, item: W) -> None:
        """Waits until the item is done; raises its error. Cancelled: no turn has taken it, and it
        is not done."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self.queue.append(item)
        if self._is_busy:
            await self._sleep(item)
        else:
            self._is_busy = item.is_leader = True
        if item.is_leader:
            await self._lead(item)
        if item.error is not None:
            raise item.error

    def fail(self, error: Exception) -> None:
        """Fails all that wait and were not taken."""
        while self.queue:
            self.queue.popleft().conclude(error)

    async def _sleep(self, item: W) -> None:
        def abort(_: object) -> trio.lowlevel.Abort:
            if item not in self.queue:
                return trio.lowlevel.Abort.FAILED
            self.queue.remove(item)
            item.task = None
            return trio.lowlevel.Abort.SUCCEEDED

        item.task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(abort)

    async def _lead(self, item: W) -> None:
        try:
            with trio.CancelScope(shield=True):
                while not item.is_done:
                    await self._one()
        finally:
            self._is_busy = bool(self.queue)
            if self.queue:
                self.queue[0].is_leader = True
                self.queue[0].wake()
            else:
                self._idle.unpark_all()

    async def _one(self) -> None:
        try:
            await self._turn()
        except BaseException as error:
            failure = error if isinstance(error, Exception) else RuntimeError("it was ended")
            for each in self.taken:
                each.conclude(failure)
            self.fail(failure)
            raise
        finally:
            self.taken = []
