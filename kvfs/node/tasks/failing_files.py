"""Files at which a task fails for a while: on a full or failing disk, that may be each file that it
tries, again and again. The log gets a line when that begins, one for each other error, and one when
it has ended; the rest is counted."""

import logging
from collections.abc import Container
from typing import Final

_REMEMBERED: Final = 65_536
"""Most remembered files, so that memory does not grow: beyond it the end may be reported early."""


class FailingFiles:
    """The failing files of one task. `what` names the task's work on a file, as a participle."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        self.failures = 0
        """Failures since the start."""
        self._log = log
        self._what = what
        self._before = 0
        self._inos: set[int] = set()
        self._codes: set[int | None] = set()

    def failed(self, ino: int, error: OSError) -> None:
        """Notes a failure; the file will be tried again."""
        self.failures += 1
        if len(self._inos) < _REMEMBERED:
            self._inos.add(ino)
        if error.errno not in self._codes:
            self._codes.add(error.errno)
            self._log.warning(
                "inode %#x cannot be %s, it will be tried again: %s; others are counted alone",
                *(ino, self._what, error),
            )

    def look(self, waiting: Container[int]) -> None:
        """Notes the files that are still to be tried, `waiting`."""
        if not self._codes:
            return
        self._inos = {ino for ino in self._inos if ino in waiting}
        if not self._inos:
            count, self._before = self.failures - self._before, self.failures
            self._codes.clear()
            self._log.warning(
                "what could not be %s is, or has gone, after %d failures", self._what, count
            )
