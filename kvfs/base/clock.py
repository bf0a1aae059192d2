"""The clock of leases and of freshness."""

import time


def now() -> float:
    """Returns seconds of a clock that nobody sets and that counts while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
