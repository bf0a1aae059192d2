"""Moves a file's bytes between descriptors without bringing them into Python.

| source, target | tried in this order |
|---|---|
| regular files | FICLONE (shares the blocks), copy_file_range, sendfile |
| regular file to anything | sendfile |
| pipe to anything | splice |
| any others | a reused buffer of 1 MiB |

Holes stay holes between regular files. `step` is called with the bytes moved so far, at least every
64 MiB; an exception of it ends the transfer.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from typing import Final

Step = Callable[[int], None]
"""Called with the bytes moved; an exception of it ends the copy."""
_FICLONE: Final = 0x40049409
_PART_BYTES: Final = 64 << 20
_BUFFER_BYTES: Final = 1 << 20
_CANNOT: Final = frozenset(
    (
        errno.EINVAL,
        errno.EXDEV,
        errno.EOPNOTSUPP,
        errno.ENOSYS,
        errno.ENOTTY,
        errno.EBADF,
        errno.EPERM,
        errno.ETXTBSY,
        errno.EISDIR,
    )
)
"""The kernel's errors when it cannot move bytes this way, though it may in another."""


def go_on(_: int) -> None:
    """A step that ends no copy."""


def copy(source: int, target: int, step: Step) -> int:
    """Copies everything from `source`, from its start if it is a regular file; returns the bytes
    moved, or the size of files. A regular target must be empty. Raises OSError."""
    kind = os.fstat(source).st_mode
    if not stat.S_ISREG(kind):
        return _stream(source, target, step, splicing=stat.S_ISFIFO(kind))
    size = os.fstat(source).st_size
    whole = stat.S_ISREG(os.fstat(target).st_mode) and os.lseek(target, 0, os.SEEK_CUR) == 0
    if not whole:
        return _send(source, target, step, 0, size, None)
    if _clone(source, target):
        step(size)
        return size
    ranged = True
    for start, end in _extents(source, size):
        if ranged:
            start, ranged = _copy_range(source, target, step, start, end)
        if start < end:
            _send(source, target, step, start, end, start)
    size = min(size, os.fstat(source).st_size)
    if os.fstat(target).st_size < size:
        os.ftruncate(target, size)  # it ends in a hole
    step(size)
    return size


def _clone(source: int, target: int) -> bool:
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
        return False
    return True


def _extents(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Yields (start, end) of each extent that is no hole."""
    end = 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
            end = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            if error.errno not in _CANNOT:
                raise
            start, end = end, size  # this filesystem knows no holes
        yield start, end


def _copy_range(source: int, target: int, step: Step, at: int, end: int) -> tuple[int, bool]:
    """Returns how far it came, and whether the kernel can do this between the two at all."""
    while at < end:
        try:
            count = os.copy_file_range(source, target, min(end - at, _PART_BYTES), at, at)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            return at, False
        if count == 0:  # the source shrank, or is a file whose size says nothing
            return at, False
        at += count
        step(at)
    return at, True


def _send(source: int, target: int, step: Step, at: int, end: int, place: int | None) -> int:
    """Copies by sendfile: to the target's offset `place`, or to its present one if that is None."""
    if place is not None:
        os.lseek(target, place, os.SEEK_SET)
    first = at
    while at < end:
        try:
            count = os.sendfile(target, source, at, min(end - at, _PART_BYTES))
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            os.lseek(source, at, os.SEEK_SET)
            return at - first + _pump(source, target, step, at)
        if count == 0:
            break
        at += count
        step(at)
    return at - first


def _stream(source: int, target: int, step: Step, *, splicing: bool) -> int:
    moved = 0
    while splicing:
        try:
            count = os.splice(source, target, _PART_BYTES)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            break
        if count == 0:
            return moved
        moved += count
        step(moved)
    return _pump(source, target, step, moved)


def _pump(source: int, target: int, step: Step, moved: int) -> int:
    """Copies through a buffer of this process, which is reused: the fallback. Returns the bytes
    moved in all."""
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    while count := os.readv(source, [buffer]):
        done = 0
        while done < count:
            done += os.write(target, buffer[done:count])
        moved += count
        step(moved)
    return moved
