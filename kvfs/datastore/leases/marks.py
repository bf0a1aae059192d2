"""The marks of a store: the files that its node is about to take away, mapped by every process.

Words of eight bytes; the first are a header, the others inode numbers in network order, 0 where
none is marked. Only the node, which holds the store's lock, marks; it makes the file once and never
replaces it, so that a mapping stays good through its restarts.
"""

import contextlib
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

_WORD: Final = 8
_HEADER: Final = 8
SLOTS: Final = 4_096
"""Files marked at once, of all takings; a batch of the evictor has up to 1,024."""
_SIZE: Final = _WORD * (_HEADER + SLOTS)
_LOCKS: Final = 0
"""1: the node has no membarrier, so that both sides take the lock of the file."""
_LEASING: Final = 1
"""1: there may be a table of leases."""
_CAPACITY: Final = 3
_USED: Final = 2
"""The slots that may be marked, counted from the first."""


class Marks:
    """The mapped marks, in any process; any thread may read them."""

    def __init__(self, fd: int) -> None:
        """Takes over the descriptor. Raises OSError, ValueError (another size)."""
        self._fd = fd
        self._map = mmap.mmap(fd, _SIZE)
        self._words = memoryview(self._map).cast("Q")
        self._held: dict[int, int] = {}
        """The inode number in each slot, for the process that marks."""

    @classmethod
    def open(cls, path: Path) -> "Marks":
        """Opens the marks that a node made. Raises OSError, ValueError."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(fd).st_size != _SIZE:
                raise ValueError("another version's marks")
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def made(cls, path: Path) -> "Marks":
        """Makes the marks if they are missing, and opens them, with nothing marked: what a killed
        node marked has been taken, or never will be. For the node. Raises OSError, ValueError."""
        if not path.exists() or path.stat().st_size != _SIZE:
            draft = path.with_name(f".{path.name}.{os.getpid()}")
            fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, _SIZE)  # a hole would be a SIGBUS on a full disk
                os.rename(draft, path)
            except BaseException:
                os.unlink(draft)
                raise
            finally:
                os.close(fd)
        marks = cls.open(path)
        marks._words[_USED] = 0
        marks._map[_HEADER * _WORD :] = bytes(SLOTS * _WORD)
        return marks

    def close(self) -> None:
        """Lets go of the file; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._words.release()
            self._map.close()
            os.close(fd)

    def __del__(self) -> None:
        if hasattr(self, "_words"):
            self.close()

    # ---- the header

    @property
    def needs_lock(self) -> bool:
        """Whether the node has no membarrier."""
        return self._words[_LOCKS] == 1

    @needs_lock.setter
    def needs_lock(self, value: bool) -> None:
        self._words[_LOCKS] = value

    @property
    def capacity(self) -> int:
        """The bytes that the store may hold; 0: its node did not say yet."""
        return self._words[_CAPACITY]

    @capacity.setter
    def capacity(self, value: int) -> None:
        self._words[_CAPACITY] = value

    @property
    def is_leasing(self) -> bool:
        """Whether any process may hold a lease."""
        return self._words[_LEASING] == 1

    @is_leasing.setter
    def is_leasing(self, value: bool) -> None:
        self._words[_LEASING] = value

    # ---- the marks

    def mark(self, inos: Sequence[int]) -> list[int]:
        """Marks these files; returns the slots, fewer where all are taken."""
        slots: list[int] = []
        for ino in inos:
            slot = self._free_slot()
            if slot == SLOTS:
                break
            self._held[slot] = ino
            struct.pack_into(">Q", self._map, (_HEADER + slot) * _WORD, ino)
            slots.append(slot)
        self._count()
        return slots

    def _free_slot(self) -> int:
        used = len(self._held)
        if used not in self._held:  # mostly: one taking at a time fills them from the first on
            return used
        return next((slot for slot in range(SLOTS) if slot not in self._held), SLOTS)

    def unmark(self, slots: Sequence[int]) -> None:
        """Clears these slots."""
        for slot in slots:
            del self._held[slot]
            self._words[_HEADER + slot] = 0
        self._count()

    def _count(self) -> None:
        self._words[_USED] = 1 + max(self._held, default=-1)

    def marked(self) -> frozenset[int]:
        """Returns the inode numbers that are marked now."""
        used = min(self._words[_USED], SLOTS)
        if not used:
            return frozenset()
        start = _HEADER * _WORD
        raw = self._map[start : start + used * _WORD]
        return frozenset(struct.unpack(f">{used}Q", raw)) - {0}

    # ---- the lock

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Keeps takers out meanwhile; they do not wait, and take nothing. Raises OSError."""
        fcntl.flock(self._fd, fcntl.LOCK_SH)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        """Keeps others out meanwhile; False: one is there now."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
