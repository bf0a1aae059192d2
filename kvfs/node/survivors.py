"""Files that programs have open by a mount which outlived its daemon.

A start holds their data files open, and counts them as open, before it repairs or begins anything
that could seal, evict or drop them; the mount then gives them their handles again
(`gateway.fuse.files.restored_files`). Nobody has parted from these programs, so they are no
`former_writers`.

| the data file | is found |
|---|---|
| of the version that the journal has | by its name |
| truncated to nothing before its data had come (a draft) | as such |
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
    view: int = 0
    """The namespace whose view has it; 0: the mount itself."""
    is_cut: bool = False
    """Whether the file was cut to nothing since it was opened for writing, or published last."""

    @property
    def writable(self) -> bool:
        """Whether it may change the file."""
        return self.flags & os.O_ACCMODE != os.O_RDONLY or bool(self.flags & os.O_TRUNC)


class SurvivingFile:
    """A data file with the handles that lead to it, by the mount and by its views."""

    def __init__(self, ino: int, version: int) -> None:
        self.ino = ino
        self.version = version
        self.handles: list[SurvivingHandle] = []
        self.fd = -1
        """-1: the data file is not here, or somebody has taken it."""
        self.is_draft = False

    @property
    def writable(self) -> bool:
        """Whether a handle may change it."""
        return any(each.writable for each in self.handles)

    def take(self) -> int:
        """Returns the descriptor, which is the caller's from now on; -1: there is none."""
        fd, self.fd = self.fd, -1
        return fd

    def join(self, other: "SurvivingFile") -> None:
        """Takes over another, which is the same data file."""
        self.handles += other.handles
        if self.fd < 0:
            self.fd, self.is_draft = other.take(), other.is_draft
        other.close()

    def close(self) -> None:
        """Closes the data file, if it is open here."""
        if self.fd >= 0:
            os.close(self.take())


class Survivors:
    """The handles of one mount and its views, whose daemon is another from now on."""

    def __init__(self, handles: Iterable[SurvivingHandle], noted: Collection[int]) -> None:
        """`noted`: inodes that requests under way when the daemon ended were about."""
        by_inode: dict[tuple[int, int], SurvivingFile] = {}
        for each in handles:
            found = by_inode.setdefault(
                (each.view, each.number), SurvivingFile(each.ino, each.version)
            )
            found.handles.append(each)
        self.files = list(by_inode.values())
        """One for each inode of each kernel, until they are held: then for each data file."""
        self.alive: Final = frozenset((*(each.ino for each in self.files), *noted))
        """The inodes that a start leaves as they are, though they were never closed or have no
        name."""

    def numbers(self, view: int = 0) -> set[int]:
        """Returns the numbers of the inodes that the kernel has open by the mount, or by the view
        of a namespace."""
        handles = (each for file in self.files for each in file.handles)
        return {each.number for each in handles if each.view == view}

    def requests(self) -> dict[int, int]:
        """Returns the number of the request that opened each handle."""
        return {each.fh: each.request for file in self.files for each in file.handles}

    def hold_drafts(self, files: DataFiles) -> None:
        """Opens the data files that have no name yet."""
        for each in self.files:
            if each.writable:
                with contextlib.suppress(OSError):
                    each.fd = files.open_draft(each.ino, each.version)
                    each.is_draft = True

    async def hold(self, engine: Engine, files: DataFiles, holders: Holders) -> None:
        """Opens the data files, and counts their handles. Raises Unavailable."""
        held: dict[tuple[int, int], SurvivingFile] = {}
        for each in self.files:
            if each.fd < 0:
                each.version = await engine.read(lambda t, of=each: _version(t, files, of))  # type: ignore[misc]
            same = held.setdefault((each.ino, each.version), each)
            if same is not each:  # two kernels have it open
                same.join(each)
        self.files = list(held.values())
        for each in self.files:
            if each.fd < 0:
                access = os.O_RDWR if each.writable else os.O_RDONLY
                try:
                    each.fd = files.open(each.ino, each.version, access)
                except OSError as error:
                    log.info("inode %x was open, its data file is not here: %s", each.ino, error)
            for _ in each.handles:
                holders.opened(each.ino)
            if each.writable and each.fd >= 0:
                holders.writing(each.ino, each.fd)

    def close(self) -> None:
        """Closes the data files that no mount has taken."""
        for each in self.files:
            with contextlib.suppress(OSError):
                each.close()


def _version(t: Transaction, files: DataFiles, file: SurvivingFile) -> int:
    """Returns the version under which a data file is found."""
    if t.node and not files.has(file.ino, file.version):
        (inode,) = read_inodes(t, [file.ino])
        if inode is not None and is_version_of(inode.version, unpack_node(t.node)):
            return inode.version
    return file.version
