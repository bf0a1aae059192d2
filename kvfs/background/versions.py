"""New content of a file that was published before, on a node of a cluster.

Other nodes have data files of the old content, and some are away: so new content has a new version,
and with it another name, and nobody takes the one for the other. On a lone node content changes
under one version.

| step | on disk | record | after a kill here |
|---|---|---|---|
| 1 second name | both names, one data file | old version | the new name is a stray: `strays` |
| 2 recorded | both names | new version | the old name is one |
| 3 old name unlinked | new name | new version | nothing to do |
"""

from collections.abc import Callable
from typing import Final

from kvfs.errors import Conflict
from kvfs.meta.interface import Engine, Transaction
from kvfs.namespace.inodes import read_inode
from kvfs.store.files import DataFiles

_ATTEMPTS: Final = 16


async def publish_anew(
    engine: Engine,
    files: DataFiles,
    ino: int,
    version: int,
    record: Callable[[Transaction, int], object],
) -> int:
    """Give the data file of a version the next one, by `record(t, version)`, which raises Conflict
    where the record has that already: whoever publishes last has the last one. Returns it.

    Raises Stale, Conflict (others publish all the time), Unavailable, OSError. Where it is not
    known whether the engine took it, the data file keeps both names.
    """
    for _ in range(_ATTEMPTS):
        inode = await engine.read(lambda t: read_inode(t, ino))
        new = max(inode.version, version) + 1
        try:
            files.add_version(ino, version, new)
        except FileExistsError:  # of an attempt that a kill cut short
            files.unlink(ino, new)
            files.add_version(ino, version, new)
        try:
            await engine.transact(lambda t, new=new: record(t, new))  # type: ignore[misc]
        except Conflict:
            files.unlink(ino, new)
            continue
        files.unlink(ino, version)
        return new
    raise Conflict("others publish the file all the time: its last content is not recorded")
