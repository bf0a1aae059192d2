"""The reasons why names went, remembered for every process of the store: a file of words, mapped by
all.

A process that removes names for a reason writes it here; one that misses a name finds it here,
without asking the node. `policy.miss_reasons` explains the words.

Invariants
- If there is no such file, or one of another size, a process remembers what it did itself.
- The file outlives the node: inode numbers are never used again, so its words stay true. Words that
  a power cut garbled fit no name.
- A word is written in one piece. If two processes write to one slot at once, one word is lost.
"""

import contextlib
import errno
import logging
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from kvfs.policy.miss_reasons import SLOTS, Lost, hash_of, word_of

_WORD_BYTES: Final = 4
_SIZE: Final = _WORD_BYTES * SLOTS
_LAST: Final = SLOTS - 1
log = logging.getLogger(__name__)


class GoneNames:
    """The reasons as any process of the store sees them, from any thread; `close` it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.words: memoryview | None = None
        """The table; None until `open`, and once it is closed."""

    def open(self) -> memoryview:
        """Returns the mapped table. Two threads that are here at once may map it twice."""
        words = self.words
        if words is None:
            with contextlib.suppress(OSError, ValueError):  # ValueError: it was cut meanwhile
                words = self._map()
            self.words = words = words or memoryview(mmap.mmap(-1, _SIZE)).cast("I")
        return words

    def add(self, entries: Iterable[bytes], reason: Lost) -> None:
        """Records this reason for the names with these entries (`NotFound.at`)."""
        words = self.open()
        if words.readonly:
            return
        for entry in entries:
            hashed = hash_of(entry)
            words[hashed & _LAST] = word_of(hashed, reason)

    def close(self) -> None:
        """Lets go of the file: a store in use keeps its filesystem mounted. Idempotent."""
        self.words = None

    def _map(self) -> memoryview | None:
        """Maps the table; None: it has another size. Raises OSError, ValueError."""
        fd, access = self._open()
        try:
            if os.fstat(fd).st_size != _SIZE:
                return None
            return memoryview(mmap.mmap(fd, _SIZE, access=access)).cast("I")
        finally:
            os.close(fd)

    def _open(self) -> tuple[int, int]:
        """Returns a descriptor, and the permitted access. Raises OSError."""
        try:
            return os.open(self._path, os.O_RDWR | os.O_CLOEXEC), mmap.ACCESS_WRITE
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES):
                raise
            return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC), mmap.ACCESS_READ


def made_ready(path: Path) -> GoneNames:
    """Opens the node's own table, whose file the node's start makes. If the disk has no space for
    it, other processes are not told."""
    try:
        if not path.exists() or path.stat().st_size != _SIZE:
            path.unlink(missing_ok=True)  # others may have it mapped: it is never cut
            _make(path)
    except OSError as error:
        log.warning("why names went is told to no other process: %s", error)
    return GoneNames(path)


def _make(path: Path) -> None:
    """Makes the file with all its blocks: a page without one would be a SIGBUS on a full disk.
    Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, _SIZE)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(fd)
