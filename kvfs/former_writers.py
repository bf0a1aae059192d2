"""Programs that have files open for writing by a mount that is gone.

The end of a mount's connection does not end I/O by passthrough: the kernel hands it to the data
file without asking anybody, as long as a descriptor or a mapping from before lives. So when a mount
has gone, in order or by a kill, each published file that somebody still has open for writing gets
another data file, a copy, under the same name; what is written by the old mount goes to the old
one, which has no name any more, and to nobody else.

Which files these may be the engine lists already: a file is unsealed from before its first handle
for writing is given out until the kernel has said that nobody has it open or mapped for writing
(`sealer`). So opens and closes keep no other journal, and a kill takes nothing of this one.

| step | on disk | after a kill here |
|---|---|---|
| 1 copied with its times, synced | the data file, a copy without its name | the copy is dropped |
| 2 the copy takes the name | the copy | nothing to do: its record is taken anew |

Where the filesystem cannot say who has a file open (`lease`), nothing is copied; nor in a directory
that several nodes share, where others may have it open by mounts of theirs.
"""

import logging
import os
import time
from functools import partial
from typing import Final

import trio

from kvfs.client.transfer import copy, go_on
from kvfs.media import SHARED
from kvfs.meta.interface import Engine, Transaction
from kvfs.meta.records import Flag, Inode
from kvfs.namespace import lifecycle
from kvfs.namespace.inodes import read_inodes
from kvfs.store import lease
from kvfs.store.files import DataFiles

Name = tuple[int, int]
"""Inode number and version of a data file."""
_BATCH: Final = 256
_PAUSE_S: Final = 0.2
"""Before a file is looked at again: whoever ends now may have it open for a moment more."""
log = logging.getLogger(__name__)


async def part(engine: Engine, files: DataFiles) -> int:
    """Give another data file to each file that a mount which has gone still lets somebody change;
    how many. No mount serves while this runs. Cancelled: a file has the old one or the new one.
    Raises Unavailable."""
    after = parted = 0
    while inos := await engine.read(partial(_unsealed, after)):
        after = inos[-1]
        inodes = await engine.read(lambda t, inos=inos: read_inodes(t, inos))  # type: ignore[misc]
        names = [
            (ino, inode.version)
            for ino, inode in zip(inos, inodes, strict=True)
            if inode is not None and _is_offered(inode)
        ]
        parted += await trio.to_thread.run_sync(_part, files, names)
    if parted:
        log.warning(
            "programs still have %d files open for writing by a mount that is gone: what they write"
            " there from now on reaches nobody else",
            parted,
        )
    return parted


def _unsealed(after: int, t: Transaction) -> list[int]:
    return lifecycle.unsealed(t, after, _BATCH)


def _is_offered(inode: Inode) -> bool:
    return bool(inode.nlink and inode.flags & Flag.PUBLISHED and not inode.flags & Flag.ASSEMBLY)


def _part(files: DataFiles, names: list[Name]) -> int:
    """Of some files, in a thread."""
    written = [name for name in names if _is_written(files, name)]
    if written:
        time.sleep(_PAUSE_S)
        written = [name for name in written if _is_written(files, name)]
    return sum(_renew(files, name) for name in written)


def _is_written(files: DataFiles, name: Name) -> bool:
    """Whether somebody has it open or mapped for writing."""
    try:
        fd = files.open(*name, os.O_RDONLY | os.O_NOATIME)
    except OSError:
        return False  # it is not here, or cannot be read: who opens it is told
    try:
        return lease.is_quiet(fd) is False and not files.medium(*name).startswith(SHARED)
    finally:
        os.close(fd)


def _renew(files: DataFiles, name: Name) -> bool:
    try:
        files.renew(*name, lambda source, target: copy(source, target, go_on))
    except OSError as error:
        log.error(
            "%s is still written by a mount that is gone, and cannot be copied: what is written"
            " there changes the file (%s)",
            files.path(*name),
            error,
        )
        return False
    return True
