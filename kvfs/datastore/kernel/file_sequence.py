"""Opens many data files one after the other, as safely as `safe_open`.

Threads that read many small files hand the interpreter's lock (GIL) to each other at each call that
lets go of it. On a local filesystem statx of an open file and close do not wait, so `FileSequence`
keeps the lock during these two there. On any other one each may ask a server, and a server that
hangs must not stop the whole process: there they let go of it.
"""

import ctypes
import errno
import functools
import os
import stat
import struct
from collections.abc import Callable, Collection
from typing import Final

from kvfs.datastore.kernel import filesystem_magic
from kvfs.datastore.kernel.safe_open import AT_ONCE, WAY

_LOCAL: Final = (
    filesystem_magic.EXT4,
    filesystem_magic.XFS,
    filesystem_magic.BTRFS,
    filesystem_magic.TMPFS,
)
_READING: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | AT_ONCE
_with_lock: Final = ctypes.PyDLL(None)
"""Calls of it keep the GIL."""
_close_with_lock: Final = _with_lock["close"]
_OF_DESCRIPTOR: Final = 0x1000
"""AT_EMPTY_PATH."""
_WANTED: Final = 0x20B
"""STATX_TYPE, _MODE, _UID and _SIZE."""
_STATX_BYTES: Final = 256
_unpack_statx: Final = struct.Struct("=I16xI4xH10xQ").unpack_from
"""Mask, owner, mode and size in struct statx of linux/stat.h."""


def is_local(directory: int) -> bool:
    """Returns whether no server is asked about the files in `directory`, a descriptor."""
    return filesystem_magic.magic_of(directory) in _LOCAL


class FileSequence:
    """Opens regular files for reading, one after the other, for one thread; `end` it. The directory
    of the last one stays open: its neighbours cost a look-up of one name each."""

    def __init__(
        self, directory: Callable[[], int], owners: Collection[int], *, is_local: bool
    ) -> None:
        """`directory` returns a descriptor, or -1 once it is closed: its number may be another
        file's then. `owners`: see `open_file`. `is_local`: see the function."""
        self._directory = directory
        self._owners = owners
        self._above = ""
        self._near = -1
        """A descriptor of the directory `_above`."""
        self._statx = _find_statx() if is_local else None
        self._found = ctypes.create_string_buffer(_STATX_BYTES)
        self._address = ctypes.addressof(self._found)
        self.close: Final[Callable[[int], object]] = _close_with_lock if is_local else os.close
        """Closes a file that was opened here; may raise OSError."""

    def open(self, above: str, name: str) -> tuple[int, int]:
        """Returns a new descriptor of the file `name` in `above`, a directory in the one given, and
        its size in bytes. The descriptor is non-blocking. Raises OSError where `open_file` raises
        it, waits or logs: ask that."""
        if above != self._above:
            self.end()
            self._near = os.open(above, WAY, dir_fd=self._directory())
            self._above = above
        fd = os.open(name, _READING, dir_fd=self._near)
        try:
            owner, mode, size = self._look(fd)
            if mode & 0o170000 == stat.S_IFREG and owner in self._owners:
                return fd, size
            raise OSError(errno.EIO, "it is no regular file of a trusted owner", name)
        except BaseException:
            self.close(fd)
            raise

    def _look(self, fd: int) -> tuple[int, int, int]:
        """Returns owner, mode and size."""
        if self._statx is None:
            found = os.fstat(fd)
            return found.st_uid, found.st_mode, found.st_size
        if self._statx(fd, b"", _OF_DESCRIPTOR, _WANTED, self._address) == 0:
            mask, owner, mode, size = _unpack_statx(self._found)
            if mask & _WANTED == _WANTED:
                return owner, mode, size
        raise OSError(errno.EIO, "the kernel does not tell its owner, kind and size")

    def end(self) -> None:
        """Lets go of the directory; idempotent."""
        near, self._near, self._above = self._near, -1, ""
        if near >= 0:
            os.close(near)


@functools.cache
def _find_statx() -> Callable[..., int] | None:
    try:
        found = _with_lock["statx"]
    except AttributeError:  # an older libc
        return None
    found.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)
    return found
