"""The holders of inodes in this process: the kernel's lookup counts, and open files.

An inode that lost its last link stays until nobody holds it: the kernel may have looked it up and
open it next (`os.replace` under concurrent opens), or it is open already. The counts live in memory
only; they end with the mount."""

from collections.abc import Callable


def _nothing(_: int) -> None:
    """Nobody keeps data files open beyond their handles."""


def _any_content(_ino: int, _version: int) -> bool:
    """Whatever is open may be of any version."""
    return True


def _unchanged(_: int) -> bool:
    """Nobody has anything open."""
    return False


class Holders:
    """Lookup counts and open counts of inodes. Used from the event loop only."""

    def __init__(self) -> None:
        self._lookups: dict[int, int] = {}
        self._opens: dict[int, int] = {}
        self._writers: dict[int, int] = {}
        self._unrecorded: dict[int, int] = {}
        self.let_go: Callable[[int], None] = _nothing
        """Asked before a file is evicted or its space is wanted back: whoever keeps its data file
        open though no handle is, closes it."""
        self.has_content: Callable[[int, int], bool] = _any_content
        """Whether this version's data file may be that of a file that is open."""
        self.is_changed: Callable[[int], bool] = _unchanged
        """Whether somebody has the file open, and may have changed what was published of it: its
        data file is not what its record says until they have closed it."""

    def looked_up(self, ino: int, count: int = 1) -> None:
        """The kernel was given this inode number in `count` replies."""
        self._lookups[ino] = self._lookups.get(ino, 0) + count

    def forgotten(self, ino: int, count: int) -> bool:
        """The kernel gave back `count` references; True when none is left."""
        left = self._lookups.get(ino, 0) - count
        if left > 0:
            self._lookups[ino] = left
            return False
        self._lookups.pop(ino, None)
        return True

    def opened(self, ino: int) -> None:
        """A handle was opened."""
        self._opens[ino] = self._opens.get(ino, 0) + 1

    def released(self, ino: int) -> bool:
        """A handle was released; True when none is left."""
        left = self._opens.get(ino, 0) - 1
        if left > 0:
            self._opens[ino] = left
            return False
        self._opens.pop(ino, None)
        return True

    def writing(self, ino: int, fd: int) -> None:
        """The file is open for writing; `fd` reads its data file's st_blocks."""
        self._writers[ino] = fd

    def not_writing(self, ino: int) -> None:
        """No writable handle is left."""
        self._writers.pop(ino, None)

    def unrecorded(self, ino: int) -> None:
        """A data file of it came here, of which no record says so yet. Until one does it stays: a
        record that is written behind its end would have others count on it."""
        self._unrecorded[ino] = self._unrecorded.get(ino, 0) + 1

    def recorded(self, ino: int) -> None:
        """The record says so, or it was dropped."""
        left = self._unrecorded.pop(ino) - 1
        if left:
            self._unrecorded[ino] = left

    def is_recorded(self, ino: int) -> bool:
        """Whether nothing that came of it waits for its record."""
        return ino not in self._unrecorded

    def keep(self, ino: int) -> bool:
        """Whether somebody may still use the inode though its last link has gone."""
        return ino in self._lookups or ino in self._opens

    def busy(self, ino: int) -> bool:
        """Whether a handle is open."""
        return ino in self._opens

    def in_use(self, ino: int) -> bool:
        """As `busy`, once what was kept open without a handle has been closed; or it came a moment
        ago."""
        if self.busy(ino) or not self.is_recorded(ino):
            return True
        self.let_go(ino)
        return False

    def writes(self, ino: int) -> bool:
        """Whether a writable handle is open."""
        return ino in self._writers

    def writers(self) -> list[tuple[int, int]]:
        """(inode, descriptor) of each file open for writing."""
        return list(self._writers.items())

    def forget_all(self) -> list[int]:
        """The mount has gone: drop every lookup count; the inodes that had one."""
        held = list(self._lookups)
        self._lookups.clear()
        return held
