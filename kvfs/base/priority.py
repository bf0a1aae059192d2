"""Priority at a busy CPU: work that programs wait for goes before other programs, the rest does
not.

A program on the mount waits for the node at each name, so beside N busy processes each of its calls
would wait for N turns. The priority is that of nice(2) and, if the kernel groups processes by their
sessions (autogroup), that of the group too: without it nice would mean nothing to programs of other
sessions. Children inherit the first, and take the second by `follow`.
"""

import contextlib
import os
import resource
import threading
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_CAP_SYS_NICE: Final = 23
_REFUSED: Final = "the system refuses it"


def raise_to(nice: int) -> str:
    """Gives this process, and threads and children that it starts from now on, this nice value; to
    be called in its main thread. 0: leaves it as it is. Returns why it could not; empty if it
    could."""
    if not nice:
        return ""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    except OSError as error:
        return error.strerror or _REFUSED
    return follow()


def follow(pid: int = 0) -> str:
    """Gives the session's group, if there is one and this process (or the one of that number) leads
    it, the process's nice value: a terminal's session has the user's other programs in it too.
    Returns what `raise_to` does."""
    pid = pid or os.getpid()
    try:
        if os.getsid(pid) != pid:
            return ""
        with open(f"/proc/{pid}/autogroup", "w", encoding="ascii") as group:
            group.write(str(os.getpriority(os.PRIO_PROCESS, pid)))
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except OSError as error:
        return f"its session's group: {error.strerror or _REFUSED}"
    return ""


def may_raise() -> bool:
    """Returns whether this process may have a nice value below 0: by CAP_SYS_NICE, or by the limit
    that stands for it (20 less the value)."""
    if resource.getrlimit(resource.RLIMIT_NICE)[0] > 20:
        return True
    with open("/proc/self/status", "rb") as status:
        (mask,) = (line.split()[1] for line in status if line.startswith(b"CapEff:"))
    return bool(int(mask, 16) >> _CAP_SYS_NICE & 1)


def current() -> int:
    """Returns the nice value of this process."""
    return os.getpriority(os.PRIO_PROCESS, os.getpid())


def at_ordinary(work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Does work that nobody waits for, in this thread, at the priority of ordinary programs."""
    thread = threading.get_native_id()
    before = os.getpriority(os.PRIO_PROCESS, thread)
    if before >= 0:
        return work(*arguments, **named)
    os.setpriority(os.PRIO_PROCESS, thread, 0)
    try:
        return work(*arguments, **named)
    finally:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, before)
