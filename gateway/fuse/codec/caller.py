"""The caller of a request, and the time by its clock."""

import time
from typing import Final, NamedTuple

_CLOCK: Final = 5
"""CLOCK_REALTIME_COARSE: the clock by which the kernel stamps the data files, so that times never
run backwards."""


class Caller(NamedTuple):
    """The user and process that ask."""

    uid: int
    gid: int
    pid: int


def now_ns() -> int:
    """Returns the kernel's coarse time, ns since the epoch."""
    return time.clock_gettime_ns(_CLOCK)
