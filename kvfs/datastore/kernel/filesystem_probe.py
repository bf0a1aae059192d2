"""The abilities of the filesystem beneath a store, found out by trying them on two files without
names.

Nothing here is needed for correctness: each ability has a fallback, which its fact names.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from kvfs.base.descriptors import closing
from kvfs.datastore.layout import translate
from kvfs.datastore.spare_files import name_spare

_MOUNTS: Final = Path("/proc/self/mountinfo")
_FICLONE: Final = 0x40049409
_SIZE: Final = 1 << 16
"""Two blocks and more on every filesystem; small enough to cost nothing."""


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """One ability."""

    available: bool
    reason: str
    """The basis of the ability, or the reason for its absence and what happens instead."""


class StoreFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The filesystem beneath a store."""

    filesystem: str
    """Its type in the mount table; empty if that does not list it."""
    reflink: Fact
    copy_file_range: Fact
    xattrs: Fact
    direct_io: Fact
    tmpfile: Fact


def probe(directory: Path) -> StoreFacts:
    """Tries everything in an existing directory. Raises ReadOnly, NoSpace, Invalid."""
    try:
        with _scratch(directory) as source, _scratch(directory) as target:
            os.pwrite(source, b"\xa5" * _SIZE, 0)
            return StoreFacts(
                filesystem=filesystem_type(directory),
                reflink=_attempt(
                    lambda: fcntl.ioctl(target, _FICLONE, source),
                    "a copy shares its blocks",
                    "copies are made by the kernel instead",
                ),
                copy_file_range=_attempt(
                    lambda: os.copy_file_range(source, target, _SIZE, 0, 0),
                    "the kernel copies",
                    "copies go through sendfile instead",
                ),
                xattrs=_attempt(
                    lambda: os.setxattr(source, "user.kvfs", b"probe"),
                    "data files describe themselves",
                    "lost metadata could not be rebuilt from the data files",
                ),
                direct_io=_attempt(
                    lambda: _direct(source),
                    "O_DIRECT goes to the disk",
                    "O_DIRECT is refused on the mount too",
                ),
                tmpfile=_attempt(
                    lambda: _name_spare(directory),
                    "data files are made ahead of their use where a create may take long",
                    "each create waits for the filesystem's own",
                ),
            )
    except OSError as error:
        raise translate(error, directory) from error


def _name_spare(directory: Path) -> None:
    """Makes a file as data files are made: without a name first, then named."""
    name = f".probe.{os.getpid()}.{os.urandom(4).hex()}"
    with closing(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as at:
        with closing(os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)) as spare:
            name_spare(spare, at, name)
        os.unlink(name, dir_fd=at)


def filesystem_type(path: Path) -> str:
    """Returns the type of the filesystem that `path` lies on."""
    return mount_of(os.stat(path).st_dev).type


class Mount(NamedTuple):
    """A line of the mount table; empty if it lists no such filesystem."""

    type: str
    directory: str
    owner: int | None = None
    """The user who mounted it, if it is FUSE."""


def mount_of(device: int, table: Path = _MOUNTS) -> Mount:
    """Returns the first mount of the filesystem whose st_dev is `device`."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in table.read_text(errors="replace").split("\n"):
        left, _, right = line.partition(" - ")
        if right and left.split()[2] == wanted:
            owner = re.search(r"\buser_id=(\d+)", right.split()[-1])
            return Mount(
                right.split()[0],
                _plain(left.split()[4]),
                int(owner[1]) if owner and right.startswith("fuse") else None,
            )
    return Mount("", "")


def _plain(field: str) -> str:
    """Returns a name of the mount table, where a space is \040."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)


def _attempt(step: Callable[[], object], good: str, bad: str) -> Fact:
    try:
        step()
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "error")
        return Fact(available=False, reason=f"{os.strerror(error.errno or 0)} ({name}): {bad}")
    return Fact(available=True, reason=good)


def _direct(fd: int) -> None:
    """Reads back with O_DIRECT into an aligned buffer: opening alone proves nothing on some
    filesystems."""
    flags = os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC
    with closing(os.open(f"/proc/self/fd/{fd}", flags)) as direct, mmap.mmap(-1, _SIZE) as buffer:
        os.preadv(direct, [buffer], 0)


@contextlib.contextmanager
def _scratch(directory: Path) -> Iterator[int]:
    fd, name = tempfile.mkstemp(prefix=".probe-", dir=directory)
    os.unlink(name)
    with closing(fd):
        yield fd
