"""Programs that have files open for writing by a mount that is gone.

The end of a mount's connection does not end I/O by passthrough: the kernel hands it to the data
file without asking anybody, as long as a descriptor or a mapping from before lives. So when a mount
has gone, in order or by a kill, each published file that is still open for writing gets another
data file, a copy, under the same name; writes by the old mount go to the old one, which has no name
any more, and to nobody else.

The engine already lists the candidates: a file is unsealed from before its first handle for writing
is given out until the kernel has reported that nobody has it open or mapped for writing (`sealer`).
So opens and closes keep no other journal, and a kill takes nothing of this one.

A start waits for no large copy: if the filesystem shares no blocks, files with more data than
AT_ONCE_BYTES are copied behind it, one after the other. Until then the mount opens none of them,
nor are they given to other nodes; an open of one waits, and gets Busy if that takes long. Other
processes of the host read it as it is.

| step | on disk | after a kill here |
|---|---|---|
| 1 copied with its times, synced | the data file, a copy without its name | the copy is dropped |
| 2 the copy takes the name | the copy | nothing to do: its record is taken anew |

If the filesystem cannot tell who has a file open (`datastore.file_lease`), nothing is copied; nor
in a directory that several nodes share, where others may have it open by mounts of theirs.
"""

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import trio

from kvfs.base import detach
from kvfs.base.descriptors import closing
from kvfs.base.errors import Busy, KvfsError
from kvfs.base.media import SHARED
from kvfs.datastore import file_lease
from kvfs.datastore.files import DataFiles
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.records import Flag, Inode
from kvfs.session.byte_transfer import copy, go_on
from kvfs.tree import lifecycle
from kvfs.tree.inodes import read_inodes

Name = tuple[int, int]
"""Inode number and version of a data file."""
_BATCH: Final = 256
_PAUSE_S: Final = 0.2
"""Pause before a file is checked again: a process that is ending may have it open for a moment
more."""
_BLOCK: Final = 512
_PATIENCE_S: Final = 10.0
"""Time for which an open waits until a file has been copied."""
AT_ONCE_BYTES: Final = 64 << 20
log = logging.getLogger(__name__)


class FormerWriters:
    """The former writers of one store's files."""

    def __init__(self, engine: Engine, files: DataFiles) -> None:
        self._engine = engine
        self._files = files
        self._copying = trio.Lock()
        """Keeps copies of one file apart: the later one would replace the earlier one."""
        self.left: dict[int, tuple[Name, int, trio.Event]] = {}
        """The files yet to be copied, by inode: their bytes, and the event for those who wait."""

    def __contains__(self, ino: int) -> bool:
        return ino in self.left

    def describe(self) -> dict[str, int]:
        """Returns the amount yet to be copied."""
        return {
            "files": len(self.left),
            "bytes": sum(size for _, size, _ in self.left.values()),
        }

    async def part(self, *, at_once: bool) -> int:
        """Gives another data file to each file that a gone mount still lets a program change;
        returns how many. Except for `at_once` large ones are left to `run`. No mount serves while
        this runs. Cancelled: a file has the old one or the new one. Raises Unavailable."""
        async with self._copying:
            return await self._part(at_once=at_once)

    async def _part(self, *, at_once: bool) -> int:
        after = parted = 0
        leave = None if at_once else self._leave
        while inos := await self._engine.read(partial(_unsealed, after)):
            after = inos[-1]
            names = await self._offered(inos)
            parted += await trio.to_thread.run_sync(_part, self._files, names, leave)
        if at_once:
            while self.left:
                self.left.popitem()[1][2].set()
        if parted:
            log.warning(
                "programs still have %d files open for writing by a mount that is gone: what they"
                " write there from now on reaches nobody else",
                parted,
            )
        if self.left:
            log.warning(
                "%(files)d more with %(bytes)d bytes are being copied: who opens them waits",
                self.describe(),
            )
        return parted

    async def _offered(self, inos: list[int]) -> list[Name]:
        inodes = await self._engine.read(lambda t: read_inodes(t, inos))
        return [
            (ino, inode.version)
            for ino, inode in zip(inos, inodes, strict=True)
            if inode is not None and _is_offered(inode)
        ]

    def _leave(self, name: Name, size: int) -> None:
        self.left[name[0]] = name, size, trio.Event()

    async def run(self) -> None:
        """Copies what `part` left. Cancelled: a file has the old data file or the new one."""
        for ino in list(self.left):
            async with self._copying:
                if ino in self.left:
                    await self._copy(self.left[ino][0])

    async def _copy(self, name: Name) -> None:
        ino = name[0]
        await trio.to_thread.run_sync(_renew, self._files, name, _unless_cancelled)
        try:
            if await self._offered([ino]) != [name]:  # removed, or replaced elsewhere meanwhile
                self._files.unlink(*name)
        except (KvfsError, OSError) as error:
            log.warning("inode %x: its copy may be left without a record: %s", ino, error)
        self.left.pop(ino)[2].set()

    async def parted(self, ino: int) -> None:
        """Returns when no program changes the file by a gone mount. Raises Busy."""
        await detach.aside()
        with trio.move_on_after(_PATIENCE_S):
            while (left := self.left.get(ino)) is not None:
                await left[2].wait()
            return
        raise Busy("it is being copied, since a program writes it by a mount that is gone")


def _unsealed(after: int, t: Transaction) -> list[int]:
    return lifecycle.unsealed(t, after, _BATCH)


def _is_offered(inode: Inode) -> bool:
    return bool(inode.nlink and inode.flags & Flag.PUBLISHED and not inode.flags & Flag.ASSEMBLY)


def _part(files: DataFiles, names: list[Name], leave: Callable[[Name, int], None] | None) -> int:
    """Copies some files, in a thread; `leave` takes those that take long."""
    written = [name for name in names if _is_written(files, name)]
    if written:
        time.sleep(_PAUSE_S)
        written = [name for name in written if _is_written(files, name)]
    parted = 0
    for name in written:
        size = _BLOCK * files.stat(*name).st_blocks
        if leave is None or size <= AT_ONCE_BYTES:
            parted += _renew(files, name, go_on)
            continue
        try:
            parted += _renew(files, name, partial(_unless_shared, files.stat(*name).st_size))
        except _NotShared:
            leave(name, size)
    return parted


class _NotShared(Exception):
    """The filesystem does not share the blocks of a copy."""


def _unless_shared(size: int, copied: int) -> None:
    """Raises if a copy does not share its blocks; a copy that does is whole at the first call."""
    if copied < size:
        raise _NotShared


def _unless_cancelled(_: int) -> None:
    trio.from_thread.check_cancelled()


def _is_written(files: DataFiles, name: Name) -> bool:
    """Returns whether somebody has it open or mapped for writing."""
    try:
        fd = files.open(*name, os.O_RDONLY | os.O_NOATIME)
    except OSError:
        return False  # it is not here, or cannot be read: who opens it is told
    with closing(fd):
        return file_lease.is_quiet(fd) is False and not files.medium(*name).startswith(SHARED)


def _renew(files: DataFiles, name: Name, step: Callable[[int], None]) -> bool:
    try:
        files.renew(*name, lambda source, target: copy(source, target, step))
    except FileNotFoundError:
        return False  # it was removed meanwhile
    except OSError as error:
        log.error(
            "%s is still written by a mount that is gone, and cannot be copied: what is written"
            " there changes the file (%s)",
            files.path(*name),
            error,
        )
        return False
    return True
