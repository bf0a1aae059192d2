"""Files that the page cache has nothing of, and what comes from the disk."""

import os
from pathlib import Path

from gds.io.page_cache import cached_bytes
from tests.cluster.waiting import wait_until


def make_cold(path: Path) -> int:
    """An open descriptor of a file that the page cache has nothing of."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)

    def is_cold() -> bool:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return not cached_bytes(fd, 0, 0)

    wait_until(is_cold, f"{path} is cold")
    return fd


def disk_bytes() -> int:
    """That this process had disks read so far."""
    text = Path("/proc/self/io").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if "read_bytes" in line)
