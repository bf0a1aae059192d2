"""Files that programs have open by a mount which outlived its daemon.

A start holds their data files open, and counts them as open, before it repairs or begins anything
that could seal, evict or drop them; the mount then gives them their handles again
(`gateway.fuse.files.restored_files`). Nobody has parted from these programs, so they are no
`former_writers`.

| the data file | is found |
|---|---|
| of the version that the journal has | by its name |
| truncated to nothing before its data had come (a draft) | as such, before drafts are dropped |
| published anew just before the kill | by the record, whose version is this node's |
| not whole yet, or dropped since | not here: the mount brings it, or the handle is lost |
"""

import contextlib
import logging
import os
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from kvfs.datastore.files import DataFiles
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.keys import unpack_node
from kvfs.tree.inodes import read_inodes
from kvfs.vfs.content_versions import is_version_of
from kvfs.vfs.inode_holders import Holders

log = logging.getLogger(__name__)


class SurvivingHandle(NamedTuple):
    """One open of a file that the kernel has."""

    fh: int
    number: int
    """That of the kernel's inode, which has one content (`kernel_inodes`)."""
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
        self.by_number: Final[dict[int, list[SurvivingHandle]]] = {}
        """The handles of each of the kernel's inodes."""
        for each in handles:
            self.by_number.setdefault(each.number, []).append(each)
        self.alive: Final = frozenset((*(of[0].ino for of in self.by_number.values()), *noted))
        """The inodes that a start leaves as they are, though they were never closed or have no
        name."""
        self.descriptors: Final[dict[int, int]] = {}
        """The data files that are here, by the kernel's inode."""

    def hold_drafts(self, files: DataFiles) -> None:
        """Opens the data files that have no name yet."""
        for number, handles in self.by_number.items():
            if any(each.writable for each in handles):
                with contextlib.suppress(OSError):
                    fd = files.open_draft(handles[0].ino, handles[0].version)
                    self.descriptors[number] = fd

    async def hold(self, engine: Engine, files: DataFiles, holders: Holders) -> None:
        """Opens the data files, and counts their handles. Raises Unavailable."""
        for number, handles in self.by_number.items():
            ino, writable = handles[0].ino, any(each.writable for each in handles)
            if number not in self.descriptors:
                access = os.O_RDWR if writable else os.O_RDONLY
                version = await engine.read(lambda t, of=handles: _version(t, files, of[0]))  # type: ignore[misc]
                self.by_number[number] = [each._replace(version=version) for each in handles]
                try:
                    self.descriptors[number] = files.open(ino, version, access)
                except OSError as error:
                    log.info("inode %x was open, and its data file is not here: %s", ino, error)
            for _ in handles:
                holders.opened(ino)
            if writable and number in self.descriptors:
                holders.writing(ino, self.descriptors[number])

    def close(self) -> None:
        """Closes the data files that no mount has taken."""
        for fd in self.descriptors.values():
            with contextlib.suppress(OSError):
                os.close(fd)
        self.descriptors.clear()


def _version(t: Transaction, files: DataFiles, handle: SurvivingHandle) -> int:
    """Returns the version under which the data file of a handle is found."""
    if t.node and not files.has(handle.ino, handle.version):
        (inode,) = read_inodes(t, [handle.ino])
        if inode is not None and is_version_of(inode.version, unpack_node(t.node)):
            return inode.version
    return handle.version
