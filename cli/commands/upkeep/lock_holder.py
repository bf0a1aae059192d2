"""The process that holds the lock of a store, as the kernel names it: a node that serves, or is
starting or stopping."""

import os
import signal
from pathlib import Path
from typing import Final

from kvfs.datastore.kernel.ownership import require_directory, trusted

_LOCKS: Final = Path("/proc/locks")


def find(lock: Path, table: Path = _LOCKS) -> int | None:
    """Returns the process's number; None: no process holds it, or one that cannot be seen from here
    (of another container). Raises OSError of the lock itself."""
    found = os.lstat(lock)
    where = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    for line in table.read_text().splitlines():
        fields = line.split()
        # 7: FLOCK  ADVISORY  WRITE 4711 fd:01:1234 0 EOF; a waiting one has '->' before FLOCK
        if fields[1:4] == ["FLOCK", "ADVISORY", "WRITE"] and fields[5] == where:
            return int(fields[4]) if int(fields[4]) > 0 else None
    return None


def ask_to_stop(lock: Path) -> bool:
    """Sends SIGTERM to the node that holds the lock, which ends it in order, even while it waits
    for its engine. False: no node may be told. A process that holds the lock and did not write its
    number into it is no node: a backup, say. Raises AccessDenied: the store belongs to another
    user, who may have put another program's lock there."""
    require_directory(lock.parent, "the store", trusted())
    try:
        pid = find(lock)
        if pid is None or pid != int(lock.read_text("ascii")):
            return False
        process = os.pidfd_open(pid)
    except (OSError, ValueError, IndexError):
        return False
    try:
        if find(lock) != pid:  # it ended, and its number may be another's
            return False
        signal.pidfd_send_signal(process, signal.SIGTERM)
    except OSError:
        return False
    finally:
        os.close(process)
    return True
