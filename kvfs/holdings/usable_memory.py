"""The memory that this process may use."""

import contextlib
import os
from pathlib import Path

_CONTROL_GROUP = Path("/sys/fs/cgroup/memory.max")


def usable_bytes() -> int:
    """Returns the host's memory, or what the control group of this container may use of it."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # there is none, or "max"
        found = min(found, int(_CONTROL_GROUP.read_text()))
    return found
