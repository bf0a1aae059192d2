"""The data file behind a path of a mount: what cuFile, O_DIRECT and others open that know the
filesystem of the store, and not FUSE.

An open descriptor is the lease: while it is open, its bytes stay what they are, though the file be
evicted, replaced or removed.
"""

import os
from pathlib import Path
from typing import Final, NamedTuple

from kvfs.client.blocking import Client
from kvfs.errors import KvfsError

STORE_XATTR: Final = b"kvfs.store"
"""Of each file on a mount: the store's directory."""


class Backing(NamedTuple):
    """An open data file."""

    fd: int
    """For reading; whoever asked for it closes it."""
    store: Path | None
    """None: the path is on no mount of KVFS, and the file is its own."""


def open_backing(path: str | bytes | os.PathLike[str]) -> Backing:
    """Open what is behind `path`, whole: what other nodes have of it is brought first.

    The descriptor is the mount's where the data file cannot be had: the caller may not enter the
    store, or does not see it; the file is not closed yet, or has lost its name; a directory of the
    mount is mounted elsewhere. Raises FileNotFoundError and other OSErrors of the path itself."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        store = Path(os.fsdecode(os.getxattr(fd, STORE_XATTR)))
    except OSError:
        return Backing(fd, None)
    try:
        data = _data_file(path, store, os.fstat(fd))
    except (KvfsError, OSError):
        return Backing(fd, store)
    except BaseException:
        os.close(fd)
        raise
    if data is None:
        return Backing(fd, store)
    os.close(fd)
    return Backing(data, store)


def _data_file(
    path: str | bytes | os.PathLike[str], store: Path, meant: os.stat_result
) -> int | None:
    """None: the store has another file under that name. Raises KvfsError, OSError."""
    name = within_mount(path)
    with Client(store) as client:
        found = client.stat(name)
        if (found.ino, found.size) != (meant.st_ino, meant.st_size):
            return None
        with client.open(name, "rb") as file:
            return os.dup(file.fileno())


def within_mount(path: str | bytes | os.PathLike[str]) -> bytes:
    """The path from the mount's root on, symbolic links followed. Raises OSError."""
    real = os.path.realpath(os.fsencode(path))
    device = os.stat(real).st_dev
    root = real
    while os.stat(above := os.path.dirname(root)).st_dev == device and above != root:
        root = above
    return os.path.relpath(real, root)
