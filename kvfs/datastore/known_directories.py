"""The directories that the kernel may know by the node's mount, shared with every process of the
store.

A process that changes names behind the mount's back asks here whether any program could have seen
them: under a directory that no kernel knows there is no name, no absent name, no listing and no
attribute to be forgotten. So a commit there costs no round trip to the node.

It is a file of counters, mapped by all: a directory counts in the slot of its inode number. The
node counts it before a reply first names it to the kernel, and takes it back when the kernel
forgets it (FORGET) or the mount has gone.

Why no stale reply can occur: the node counts a directory, and reads what it replies, in one turn of
the engine's only writer lock (`Engine.transact`); a process that changes names looks at the counter
in the turn in which it changes them. If its turn comes first, the node reads the change. If the
node's does, the process sees the counter, as the lock orders both. There is no third case, however
the processors order memory. Once counted, a directory is read without the lock: a process that
changes it sees the counter and tells the node after the commit.

Invariants
- Before the file exists, and while no node serves, every directory counts as known. A node that was
  killed leaves its counts: too many, which cost only round trips. The next one, whose mount is not
  made yet, begins anew in the same file.
- A process that finds no file, or one of another size or layout (another version's), takes every
  directory for known.
- Directories may share a slot. The root is always known.
"""

import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from kvfs.base.descriptors import closing
from kvfs.meta.records import ROOT_INODE

_SLOTS: Final = 1 << 16
_HEADER: Final = 16
"""Words before the slots; the first is 0 while no node serves, else the layout of the rest."""
_LAYOUT: Final = 1
_SIZE: Final = 4 * (_HEADER + _SLOTS)
_SPREAD: Final = 0x9E37
"""Spreads directories of different namespaces, which have the same low bits."""


class KnownDirectories:
    """Written by the node alone, from its event loop."""

    def __init__(self, path: Path, *, goes_on: bool = False) -> None:
        """Marks only the root as known, and the node as serving. Call it before the engine's first
        transaction of the node. Raises OSError: on a full disk too, where a page without a block
        would be a SIGBUS. `goes_on`: the kernel knows what it knew of the node before, of which the
        counters tell; those are never taken back."""
        with closing(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)) as fd:
            os.ftruncate(fd, _SIZE)
            os.posix_fallocate(fd, 0, _SIZE)
            self._map = mmap.mmap(fd, _SIZE)
        self._words = memoryview(self._map).cast("I")
        self._inos: set[int] = set()
        if not goes_on:
            self._words[0] = 0
            self._map[4 * _HEADER :] = bytes(_SIZE - 4 * _HEADER)
        self.add(ROOT_INODE)
        self._words[0] = _LAYOUT

    def __contains__(self, ino: int) -> bool:
        return ino in self._inos

    def add(self, ino: int) -> None:
        """Counts a directory. Call it in a transaction that changes the engine or could, in which
        the reply about the directory is read."""
        if ino not in self._inos:
            self._inos.add(ino)
            self._words[_slot(ino)] += 1

    def forget(self, ino: int) -> None:
        """Notes that the kernel knows it no more; does nothing if it is no directory."""
        if ino in self._inos and ino != ROOT_INODE:
            self._inos.remove(ino)
            self._words[_slot(ino)] -= 1

    def forget_all(self) -> None:
        """Notes that the mount has gone."""
        for ino in list(self._inos):
            self.forget(ino)

    def close(self) -> None:
        """Notes that no node serves any more; idempotent."""
        if not self._map.closed:
            self._words[0] = 0
            self._words.release()
            self._map.close()


class Known:
    """The view of any process of the store, from any thread."""

    def __init__(self, path: Path) -> None:
        self._path = os.fspath(path)
        self._seen: tuple[tuple[int, int], memoryview] | None = None
        """The file (device, inode), and its mapping."""

    def close(self) -> None:
        """Lets go of the file: a store in use keeps its filesystem mounted. Idempotent."""
        self._seen = None

    def __contains__(self, ino: int) -> bool:
        return self.any_of((ino,))

    def any_of(self, inos: Iterable[int]) -> bool:
        """Returns whether a kernel may know one of these directories. Call in the transaction that
        changes them."""
        words = self._current()
        if words is None or words[0] != _LAYOUT:
            return True
        found = 0
        for ino in inos:
            found |= words[_HEADER + ((ino ^ (ino >> 48) * _SPREAD) & (_SLOTS - 1))]  # `_slot`
        return found != 0

    def _current(self) -> memoryview | None:
        """Returns the counters of the present file: it may have been removed between two nodes, and
        a mapping of a killed one's file is no longer counted in. None while no node of this store
        ever ran, or it was another user's."""
        try:
            found = os.stat(self._path)
            if found.st_size != _SIZE:
                return None
            seen = self._seen
            if seen is None or seen[0] != (found.st_dev, found.st_ino):
                seen = self._seen = self._open()
        except (OSError, ValueError):  # ValueError: it is shorter by now
            return None
        return seen[1]

    def _open(self) -> tuple[tuple[int, int], memoryview]:
        """Raises OSError."""
        with closing(os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)) as fd:
            found = os.fstat(fd)
            # The map outlives the descriptor; it goes with its last view.
            mapped = mmap.mmap(fd, _SIZE, access=mmap.ACCESS_READ)
        return (found.st_dev, found.st_ino), memoryview(mapped).cast("I")


def _slot(ino: int) -> int:
    return _HEADER + ((ino ^ (ino >> 48) * _SPREAD) & (_SLOTS - 1))
