"""Waiting for what is to come, and ending processes by their numbers."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import trio

_STEP_S: Final = (0.01, 0.1)
"""Between two looks: the first, and after a second."""
_PATIENCE_S: Final = 60.0


def wait_until(is_so: Callable[[], bool], what: str, timeout_s: float = _PATIENCE_S) -> None:
    began = time.monotonic()
    while not is_so():
        waited = time.monotonic() - began
        if waited > timeout_s:
            raise TimeoutError(f"not so after {timeout_s:g} s: {what}")
        time.sleep(max(_STEP_S[0], min(_STEP_S[1], waited / 10)))


async def until(is_so: Callable[[], object], what: str, timeout_s: float = _PATIENCE_S) -> None:
    """The same in a trio task, on its loop's clock."""
    with trio.move_on_after(timeout_s):
        while not is_so():
            await trio.sleep(_STEP_S[0])
        return
    raise TimeoutError(f"not so after {timeout_s:g} s: {what}")


def join_all(threads: Sequence[threading.Thread], timeout_s: float) -> bool:
    """Waits for all, no longer than that in total; returns whether all have ended."""
    end = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def lives(pid: int) -> bool:
    """Whether it runs: one that has ended and waits for its parent does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def name_of(pid: int) -> str:
    """Its command line, for messages."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def end_all(processes: Callable[[], Iterable[int]], number: int = signal.SIGTERM) -> None:
    """Signal them, and wait until none is left; those that do not heed it in time are killed."""
    for pid in processes():
        _signal(pid, number)
    try:
        wait_until(lambda: not any(map(lives, processes())), "the processes have ended", 20)
    except TimeoutError:
        for pid in processes():
            _signal(pid, signal.SIGKILL)
        wait_until(lambda: not any(map(lives, processes())), "the killed processes are gone")


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
