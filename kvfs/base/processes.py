"""Tells whether another process has ended, even one that the kernel cannot let go of yet; and keeps
others from looking into this one."""

import ctypes
import os
import select
from typing import Final

_ENDED: Final = "ZX"
_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4
_libc: Final = ctypes.CDLL(None)


class OtherProcess:
    """One other process, distinguished from a later one with its number."""

    def __init__(self, pid: int) -> None:
        """Raises ProcessLookupError."""
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        """Readable when it has ended, unless the kernel holds one of its threads in a lock."""

    def has_ended(self) -> bool:
        """Returns whether it, or its first thread, has ended: then all threads end that the kernel
        does not hold."""
        if select.select([self.pidfd], [], [], 0)[0]:
            return True
        return state_of(self.pid) in _ENDED

    def close(self) -> None:
        """Lets go of it; idempotent."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def state_of(pid: int) -> str:
    """Returns the letter that proc(5) has for the state of its first thread; `X` if there is
    none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


def hide_memory() -> None:
    """Closes this process's memory, environment and descriptors to all processes but those that may
    trace every other (CAP_SYS_PTRACE): to other programs of its user, also to debuggers and
    profilers. What it executes is open again. No dump is written of it."""
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def is_memory_hidden() -> bool:
    """Returns whether `hide_memory` is in force."""
    return bool(_libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 0)
