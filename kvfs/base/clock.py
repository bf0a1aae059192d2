"""The clock of leases and of freshness, and that of files' times."""

import time
from typing import Final

_COARSE: Final = 5
"""CLOCK_REALTIME_COARSE, which the module `time` does not name."""


def now() -> float:
    """Returns seconds of a clock that nobody sets and that counts while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def file_time_ns() -> int:
    """Returns the time, ns since the epoch, by the clock by which the kernel stamps data files: it
    stands still for some milliseconds, and a file's times never run backwards by it."""
    return time.clock_gettime_ns(_COARSE)
