"""The state of trio's event loop, for code that waits in its place.

A task that blocks the thread for a moment is woken without the loop's own work of going to sleep.
Nobody waits for the end of that block as long as it does not begin while other tasks may run, and
ends with whatever would wake the loop: `RunnableTasks` tells the one, the descriptor that
`epoll_of` finds the other.
"""

import contextlib
import os

import trio


class RunnableTasks(trio.abc.Instrument):
    """The tasks that may run, except the running one: an instrument, to be added and removed by
    its owner."""

    def __init__(self) -> None:
        self.due: set[trio.lowlevel.Task] = set()

    def task_scheduled(self, task: trio.lowlevel.Task) -> None:
        self.due.add(task)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.due.discard(task)


def epoll_of(fd: int) -> int | None:
    """Returns this process's epoll descriptor that `fd` was added to;
    None if there is none, or the kernel does not tell. Trio has no public name for its own."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                with open(f"/proc/self/fdinfo/{name}", "rb") as info:
                    added = (line.split()[1:2] for line in info if line.startswith(b"tfd:"))
                    if [b"%d" % fd] in added:
                        return int(name)
    return None
