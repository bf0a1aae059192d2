"""The clock of leases, and by which it is said how new something is."""

import time


def now() -> float:
    """Seconds, of a clock that nobody sets and that counts while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
