"""Unlinks many data files, of which one that the disk will not give up stops no other."""

from collections.abc import Sequence

import trio

from kvfs.datastore.files import DataFiles

Name = tuple[int, int]
"""The name of a data file: inode number and data version."""


async def unlink_each(files: DataFiles, names: Sequence[Name]) -> dict[Name, OSError]:
    """Unlink these data files in a thread; those that could not be, and why. Cancelled: all are
    tried first."""
    failed: dict[Name, OSError] = {}

    def unlink() -> None:
        for ino, version in names:
            try:
                files.unlink(ino, version)
            except OSError as error:
                failed[ino, version] = error

    await trio.to_thread.run_sync(unlink)
    return failed
