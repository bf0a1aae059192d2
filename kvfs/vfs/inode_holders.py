"""The holders of inodes in this process: the kernel's look-up counts, open files, data files that
come or go.

An inode that lost its last link stays until nobody holds it: the kernel may have looked it up and
open it next (`os.replace` under concurrent opens), or it is open already. The counts live in memory
only; they end with the mount.

Where names are each node's own, a file that went here may come again under its number, as soon as
its record is gone. Several may be about to drop the former data file then, so its name is free for
another only when all of them are done (`dropping`)."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Protocol

import trio

from kvfs.meta.records import Inode


class OpenContents(Protocol):
    """The contents that a mount has open."""

    def let_go(self, ino: int) -> None:
        """Closes a data file that is kept open without a handle, before the file is evicted or its
        space is wanted back."""

    def has_content(self, ino: int, version: int) -> bool:
        """Returns whether this version's data file may be that of an open file."""

    def is_changed(self, ino: int) -> bool:
        """Returns whether the file is open, and its published content may have been changed: its
        data file differs from its record until it is closed."""

    def removed(self, ino: int, last: Inode) -> None:
        """Notes that other nodes removed the file, and dropped its record, which was this."""


class _NoMount:
    """Stands in where there is no mount: nothing is kept open, and what is open may be of any
    version."""

    def let_go(self, _ino: int) -> None:
        pass

    def has_content(self, _ino: int, _version: int) -> bool:
        return True

    def is_changed(self, _ino: int) -> bool:
        return False

    def removed(self, _ino: int, _last: Inode) -> None:
        pass


class Holders:
    """Lookup counts and open counts of inodes. Used from the event loop only."""

    def __init__(self) -> None:
        self._lookups: dict[int, int] = {}
        self._opens: dict[int, int] = {}
        self._writers: dict[int, int] = {}
        self._unrecorded: dict[int, int] = {}
        self._dropping: dict[int, int] = {}
        self._dropped = trio.Event()
        """Set, and replaced, when a block of `dropping` has ended."""
        self._contents: OpenContents = _NoMount()

    def mounted(self, contents: OpenContents) -> None:
        """Asks the node's mount for what it has open, until `unmounted`."""
        self._contents = contents

    def unmounted(self) -> None:
        """Notes that the mount has gone, with all that it had open."""
        self._contents = _NoMount()

    def let_go(self, ino: int) -> None:
        """See `OpenContents.let_go`."""
        self._contents.let_go(ino)

    def has_content(self, ino: int, version: int) -> bool:
        """See `OpenContents.has_content`."""
        return self._contents.has_content(ino, version)

    def is_changed(self, ino: int) -> bool:
        """See `OpenContents.is_changed`."""
        return self._contents.is_changed(ino)

    def removed(self, ino: int, last: Inode) -> None:
        """See `OpenContents.removed`."""
        self._contents.removed(ino, last)

    def looked_up(self, ino: int, count: int = 1) -> None:
        """Notes that the kernel was given this inode number in `count` replies."""
        self._lookups[ino] = self._lookups.get(ino, 0) + count

    def forgotten(self, ino: int, count: int) -> bool:
        """Notes that the kernel gave back `count` references; returns True when none is left."""
        left = self._lookups.get(ino, 0) - count
        if left > 0:
            self._lookups[ino] = left
            return False
        self._lookups.pop(ino, None)
        return True

    def opened(self, ino: int) -> None:
        """Notes that a handle was opened."""
        self._opens[ino] = self._opens.get(ino, 0) + 1

    def released(self, ino: int) -> bool:
        """Notes that a handle was released; returns True when none is left."""
        left = self._opens.get(ino, 0) - 1
        if left > 0:
            self._opens[ino] = left
            return False
        self._opens.pop(ino, None)
        return True

    def writing(self, ino: int, fd: int) -> None:
        """Notes that the file is open for writing; `fd` reads its data file's st_blocks."""
        self._writers[ino] = fd

    def not_writing(self, ino: int) -> None:
        """Notes that no writable handle is left."""
        self._writers.pop(ino, None)

    def unrecorded(self, ino: int) -> None:
        """Notes that a data file came here which no record names yet. Until one does it stays: a
        record that is written behind its end would make others count on it."""
        self._unrecorded[ino] = self._unrecorded.get(ino, 0) + 1

    def recorded(self, ino: int) -> None:
        """Notes that it was recorded, or dropped."""
        left = self._unrecorded.pop(ino) - 1
        if left:
            self._unrecorded[ino] = left

    def is_recorded(self, ino: int) -> bool:
        """Returns whether no arrived data file of it waits for its record."""
        return ino not in self._unrecorded

    @contextlib.contextmanager
    def dropping(self, inos: Iterable[int]) -> Iterator[None]:
        """Keeps data files of these inodes from coming while the block lasts: it looks whether they
        may go, and unlinks them."""
        doomed = list(inos)
        for ino in doomed:
            self._dropping[ino] = self._dropping.get(ino, 0) + 1
        try:
            yield
        finally:
            for ino in doomed:
                self._dropping[ino] -= 1
                if not self._dropping[ino]:
                    del self._dropping[ino]
            self._dropped.set()
            self._dropped = trio.Event()

    def is_dropping(self, ino: int) -> bool:
        """Returns whether data files of it are being unlinked."""
        return ino in self._dropping

    async def until_dropped(self, ino: int) -> None:
        """Returns when no data file of it is being unlinked; then nothing else has run since."""
        while self.is_dropping(ino):
            await self._dropped.wait()

    def keep(self, ino: int) -> bool:
        """Returns whether the inode may still be used though its last link has gone."""
        return ino in self._lookups or ino in self._opens

    def busy(self, ino: int) -> bool:
        """Returns whether a handle is open."""
        return ino in self._opens

    def in_use(self, ino: int) -> bool:
        """Like `busy`, after closing a file that was kept open without a handle; True also if it
        arrived a moment ago."""
        if self.busy(ino) or not self.is_recorded(ino):
            return True
        self.let_go(ino)
        return False

    def writes(self, ino: int) -> bool:
        """Returns whether a writable handle is open."""
        return ino in self._writers

    def writers(self) -> list[tuple[int, int]]:
        """Returns (inode, descriptor) of each file open for writing."""
        return list(self._writers.items())

    def forget_all(self) -> list[int]:
        """Drops every look-up count, since the mount has gone; returns the inodes that had one."""
        held = list(self._lookups)
        self._lookups.clear()
        return held
