"""The target of the bytes of a file that arrives."""

import os
import threading


class Sink:
    """Writes a file. Any thread may use it.

    One writes at a time: writers of one file exclude each other in the kernel anyway, and spin
    there while they wait; here they sleep."""

    def __init__(self, fd: int) -> None:
        """`fd` belongs to its owner."""
        self._fd = fd
        self._lock = threading.Lock()

    def write(self, part: memoryview, offset: int) -> None:
        """Writes all of it. Raises OSError."""
        with self._lock:
            done = 0
            while done < len(part):
                done += os.pwrite(self._fd, part[done:], offset + done)
