"""The directory below a mount, which shows while nothing is mounted on it.

A program that goes on writing while the mount is away would write there, on the local disk, where
the next mount hides it. So an empty directory is closed to writers once it is mounted on, and stays
so when the mount goes: programs go on during a stop for an upgrade.

| closed by | to | where |
|---|---|---|
| the immutable flag (chattr +i) | everybody | root may set it (ext4, xfs, btrfs, tmpfs have it) |
| mode 0, and an attribute that says why | all but root | root may not, or there is none |
| nothing | nobody | not root: fusermount3 mounts only where its caller may write |

A directory that is not empty stays as it is, with its content.
"""

import contextlib
import fcntl
import os
import sys
from itertools import islice
from pathlib import Path
from typing import Final

from kvfs.base.descriptors import closing

_GET_FLAGS: Final = 0x80086601
_SET_FLAGS: Final = 0x40086602
_IMMUTABLE: Final = 0x10
"""FS_IOC_GETFLAGS, FS_IOC_SETFLAGS and FS_IMMUTABLE_FL of linux/fs.h."""
_MARK: Final = "user.kvfs.mountpoint"
_WHY: Final = b"closed to writers while nothing is mounted here; chmod 755 opens it"
_SHOWN: Final = 8


class BareDirectory:
    """A bare directory, held by a descriptor from before it is mounted on."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.hides: list[str] = []
        """The first names in it."""
        try:
            with os.scandir(self._fd) as entries:
                self.hides = [entry.name for entry in islice(entries, _SHOWN)]
        except BaseException:
            self.close()
            raise

    def close_to_writers(self) -> None:
        """Closes it to writers if it is empty, and this process may."""
        if self.hides or os.geteuid() != 0:
            return
        try:
            _set_immutable(self._fd, True)
        except OSError:
            with contextlib.suppress(OSError):  # it is all that could be done
                os.setxattr(self._fd, _MARK, _WHY)
                os.fchmod(self._fd, 0)

    def close(self) -> None:
        """Lets go of it; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_to_writers(path: Path) -> None:
    """Undoes `close_to_writers` if nothing is mounted; does nothing if that did nothing."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    with contextlib.suppress(OSError), closing(os.open(path, flags)) as fd:
        with contextlib.suppress(OSError):
            _set_immutable(fd, False)
        os.removexattr(fd, _MARK)
        os.fchmod(fd, 0o755)


def _set_immutable(fd: int, is_set: bool) -> None:
    flags = bytearray(8)
    fcntl.ioctl(fd, _GET_FLAGS, flags)
    value = int.from_bytes(flags[:4], sys.byteorder)
    wanted = value | _IMMUTABLE if is_set else value & ~_IMMUTABLE
    if wanted != value:
        fcntl.ioctl(fd, _SET_FLAGS, wanted.to_bytes(8, sys.byteorder))
