"""Unlinks many data files; one that the disk does not give up stops no other."""

from collections.abc import Sequence

import trio

from kvfs.datastore.files import DataFiles

Name = tuple[int, int]
"""The name of a data file: inode number and data version."""


async def unlink_each(files: DataFiles, names: Sequence[Name]) -> dict[Name, OSError]:
    """Unlinks these data files in a thread. Returns those that failed, with their errors.
    Cancelled: all are tried first."""
    failed: dict[Name, OSError] = {}

    def unlink() -> None:
        for ino, version in names:
            try:
                files.unlink(ino, version)
            except OSError as error:
                failed[ino, version] = error

    await trio.to_thread.run_sync(unlink)
    return failed
