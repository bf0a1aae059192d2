"""The connections that wait for their next request, and the one task that serves them.

A task for each would cost more than most requests: to fall asleep and wake up in trio takes thirty
calls of Python. Here one task asks the kernel which connections have something, and runs each
request's coroutine itself, to its end in one step or, where it waits for a descriptor (its body,
the node's answer), in a few. A request that must wait otherwise goes aside (`kvfs.base.detach`):
the rest of it runs in a task of its own, after which its connection comes back. So there is one way
of a request, and a task where one is needed.

A request that waits while there is nothing else to do blocks the thread (`detach.blocking`): to
leave its coroutines and come back to them costs twenty calls, and the node's answer comes soon.
After an answer the task blocks in epoll_wait(2), and after a while without a request sleeps as any
task does. The block ends with whatever would wake the event loop (`kvfs.base.event_loop`), and
with its next deadline. (A block of a millisecond at a time cost 13 us more of 60 for each request:
the kernel then sets its clock for each.)
"""

import contextlib
import select
import time
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

import outcome
import trio

from kvfs.base.detach import Unfinished, blocking
from kvfs.base.event_loop import RunnableTasks, epoll_of

_TURN_S: Final = 0.05
"""The longest turn: so often trio's loop is run, however many requests come, and after so long
without a request the task sleeps."""
_EVENTS: Final = 64
_FREE: Final = 32
"""Tasks that are kept for the next requests that wait."""
_clock: Final = time.monotonic


class Steppable(Protocol):
    """The part of a connection that is needed here."""

    is_idle: bool
    scope: trio.CancelScope
    """The scope of the task that serves it, if one does."""

    def fileno(self) -> int: ...

    def step(self, *, expired: bool = False) -> "bool | Unfinished[bool]":
        """Serves what has come to an idle connection. Returns whether it goes on, or the rest of a
        request that must wait, whose result says so. `expired`: it ends if nothing has come."""

    def go_on(
        self, rest: Unfinished[bool], error: Exception | None = None
    ) -> "bool | Unfinished[bool]":
        """Does the same with the rest of a request whose wait is over; `error` is raised in its
        place."""

    def rest(self) -> None:
        """Begins to be idle."""


C = TypeVar("C", bound=Steppable)


class IdleConnections(Generic[C]):
    """The idle connections of one server. `run` must be running. `ended` is called once with each
    connection that is closed."""

    def __init__(self, ended: Callable[[C], None]) -> None:
        self._ended = ended
        self._watched: dict[int, C] = {}
        """The connections whose sockets are in both of these, mostly idle ones."""
        self._waits: dict[int, tuple[C, Unfinished[bool]]] = {}
        """Requests that wait for a descriptor, their connection's or another."""
        self._asleep = select.epoll()
        """The sockets: trio's loop waits for it while the task sleeps."""
        self._awake = select.epoll()
        """The sockets and trio's loop; not the same one, for it would lead in a circle."""
        self._loop = -1
        self._has_looked = False
        """Whether that descriptor was looked for."""
        self._others = RunnableTasks()
        self._free: list[trio.lowlevel.Task] = []
        self._scope = trio.CancelScope(shield=True)
        self._nursery: trio.Nursery | None = None

    def add(self, connection: C) -> None:
        """Waits for the next request of a connection, which begins to be idle."""
        connection.rest()
        fd = connection.fileno()
        if self._watched.get(fd) is not connection:
            self._watched[fd] = connection
            self._asleep.register(fd, select.EPOLLIN)
            self._awake.register(fd, select.EPOLLIN)

    def expire(self, connection: C) -> None:
        """Ends an idle connection, unless something has come: then it is served."""
        self._follow(connection, connection.step(expired=True))

    def interrupt(self, connection: C) -> bool:
        """Ends the wait for a connection's own socket; False: no request waits here for it."""
        fd = connection.fileno()
        if fd not in self._waits or self._waits[fd][0] is not connection:
            return False
        _, rest = self._take_wait(fd)
        self._follow(connection, connection.go_on(rest, trio.ClosedResourceError()))
        return True

    def cut_off(self, connection: C) -> None:
        """Ends a request that waits: in a task, whose scope is cancelled by the next call at the
        latest."""
        for fd, (waiting, _) in self._waits.items():
            if waiting is connection:
                self._run_in_task(*self._take_wait(fd))
                return
        connection.scope.cancel()

    def look_at_deadlines(self, now: float) -> None:
        """Ends waits for other descriptors than sockets of connections, whose time is over."""
        due = [fd for fd, (_, rest) in self._waits.items() if rest.deadline <= now]
        for fd in due:
            if fd in self._waits:
                connection, rest = self._take_wait(fd)
                self._follow(connection, connection.go_on(rest, trio.ClosedResourceError()))

    def close(self) -> None:
        """Ends `run`, when all connections have ended."""
        self._scope.cancel()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves until `close`, whatever is cancelled around it."""
        trio.lowlevel.add_instrument(self._others)
        try:
            with self._scope:
                async with trio.open_nursery() as self._nursery:
                    task_status.started()
                    while True:
                        await trio.lowlevel.wait_readable(self._asleep)
                        if not self._has_looked:
                            self._watch_loop()
                        self._serve_while_busy()
        finally:
            trio.lowlevel.remove_instrument(self._others)
            self._asleep.close()
            self._awake.close()

    def _watch_loop(self) -> None:
        """Finds trio's loop, which has just waited for us. Where the kernel does not tell, or does
        not watch it (a hundred servers of this process do so already), nothing blocks."""
        self._has_looked = True
        found = epoll_of(self._asleep.fileno())
        if found is not None:
            with contextlib.suppress(OSError):
                self._awake.register(found, select.EPOLLIN)
                self._loop = found

    def _serve_while_busy(self) -> None:
        """Serves until others are due, or nothing has come for long."""
        turn_s = self._turn_s()
        until = _clock() + turn_s
        if not turn_s:
            self._serve_until(until)
            return
        with blocking(self._awake.fileno(), self._others.due, until):
            self._serve_until(until)

    def _serve_until(self, until: float) -> None:
        watched, waits, others = self._watched, self._waits, self._others.due
        while ready := self._awake.poll(max(0.0, until - _clock()), _EVENTS):
            is_loop_due = False
            for fd, _ in ready:
                connection = watched.get(fd)
                if connection is not None and connection.is_idle:
                    if (result := connection.step()) is not True:
                        self._follow(connection, result)
                elif fd in waits:
                    waiting, rest = self._take_wait(fd)
                    if (result := waiting.go_on(rest)) is not True:
                        self._follow(waiting, result)
                elif connection is not None:
                    self._unwatch(connection)
                else:
                    is_loop_due = is_loop_due or fd == self._loop
            if others or is_loop_due or _clock() >= until:
                return

    def _turn_s(self) -> float:
        """Returns how long others can do without trio's loop, unless it says so itself."""
        if self._others.due or self._loop < 0:
            return 0.0
        return min(_TURN_S, trio.lowlevel.current_statistics().seconds_to_next_deadline)

    def _unwatch(self, connection: C) -> None:
        """Looks away from a socket whose bytes a task takes."""
        fd = connection.fileno()
        del self._watched[fd]
        self._asleep.unregister(fd)
        self._awake.unregister(fd)

    def _follow(self, connection: C, result: bool | Unfinished[bool]) -> None:
        if not isinstance(result, Unfinished):
            if not result:
                self._end(connection)
        elif result.fd < 0:
            self._run_in_task(connection, result)
        else:
            self._waits[result.fd] = connection, result
            if self._watched.get(result.fd) is not connection:
                self._asleep.register(result.fd, select.EPOLLIN)
                self._awake.register(result.fd, select.EPOLLIN)

    def _take_wait(self, fd: int) -> tuple[C, Unfinished[bool]]:
        """Returns the request that waits for a descriptor, which is looked at no longer if it is
        not the connection's own."""
        connection, rest = self._waits.pop(fd)
        if self._watched.get(fd) is not connection:
            self._asleep.unregister(fd)
            self._awake.unregister(fd)
        return connection, rest

    def _run_in_task(self, connection: C, rest: Unfinished[bool]) -> None:
        job = connection, rest
        if self._free:
            trio.lowlevel.reschedule(self._free.pop(), outcome.Value(job))
        else:
            assert self._nursery is not None, "it runs"
            self._nursery.start_soon(self._serve_waiting, *job)

    async def _serve_waiting(self, connection: C, rest: Unfinished[bool]) -> None:
        """Runs the rest of a request, and then of others. Cancelled: closes the connection."""
        with trio.CancelScope() as scope:
            while True:
                connection.scope = scope
                goes_on = False
                try:
                    goes_on = await rest
                finally:
                    if goes_on:
                        self.add(connection)
                    else:
                        self._end(connection)
                if len(self._free) >= _FREE:
                    return
                connection, rest = await self._next_job()

    async def _next_job(self) -> tuple[C, Unfinished[bool]]:
        task = trio.lowlevel.current_task()

        def abort(_: Callable[[], None]) -> trio.lowlevel.Abort:
            self._free.remove(task)
            return trio.lowlevel.Abort.SUCCEEDED

        self._free.append(task)
        job: tuple[C, Unfinished[bool]] = await trio.lowlevel.wait_task_rescheduled(abort)
        return job

    def _end(self, connection: C) -> None:
        """Forgets a connection whose socket is closed: the kernel has forgotten it."""
        fd = connection.fileno()
        if self._watched.get(fd) is connection:
            del self._watched[fd]
        self._ended(connection)
