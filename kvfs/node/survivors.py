"""Files that programs have open by a mount which outlived its daemon.

A start holds their data files open, and counts them as open, before it repairs or begins anything
that could seal, evict or drop them; the mount then gives them their handles again
(`gateway.fuse.files.restored_files`). Nobody has parted from these programs, so they are no
`former_writers`.
"""

import contextlib
import logging
import os
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from kvfs.datastore.files import DataFiles
from kvfs.vfs.inode_holders import Holders

log = logging.getLogger(__name__)


class SurvivingHandle(NamedTuple):
    """One open of a file that the kernel has."""

    fh: int
    ino: int
    version: int
    """That of the data file."""
    flags: int
    """The flags of the open."""
    owner: int | None
    """The user among whose open files it counts; None: nobody's."""
    request: int
    """The number of the request that opened it."""
    entry: int
    """The number of its entry in the mount's journal."""
    is_viewed: bool = False
    """Whether a view of the mount has it."""

    @property
    def writable(self) -> bool:
        """Whether it may change the file."""
        return self.flags & os.O_ACCMODE != os.O_RDONLY or bool(self.flags & os.O_TRUNC)


class Survivors:
    """The handles of one mount, whose daemon is another from now on."""

    def __init__(self, handles: Iterable[SurvivingHandle], noted: Collection[int]) -> None:
        """`noted`: inodes that requests under way when the daemon ended were about."""
        self.by_file: Final[dict[int, list[SurvivingHandle]]] = {}
        for each in handles:
            self.by_file.setdefault(each.ino, []).append(each)
        self.alive: Final = frozenset((*self.by_file, *noted))
        """The inodes that a start leaves as they are, though they were never closed or have no
        name."""
        self.lost: Final[list[int]] = []
        """The journal's entries of handles that no mount can have any more."""
        self.descriptors: Final[dict[int, int]] = {}
        """By inode, its data file."""

    def hold(self, files: DataFiles, holders: Holders) -> None:
        """Opens the data files, and counts their handles. One that cannot be opened is left out:
        its programs get ESTALE."""
        for ino, handles in list(self.by_file.items()):
            writable = any(each.writable for each in handles)
            access = os.O_RDWR if writable else os.O_RDONLY
            try:
                fd = files.open(ino, handles[0].version, access)
            except OSError as error:
                log.warning("inode %x was open and cannot be opened again: %s", ino, error)
                self.lost.extend(each.entry for each in self.by_file.pop(ino))
                continue
            self.descriptors[ino] = fd
            for _ in handles:
                holders.opened(ino)
            if writable:
                holders.writing(ino, fd)

    def close(self) -> None:
        """Closes the data files that no mount has taken."""
        for fd in self.descriptors.values():
            with contextlib.suppress(OSError):
                os.close(fd)
        self.descriptors.clear()
