"""The data file behind a path of a mount: what cuFile, O_DIRECT and others open that know the
filesystem of the store, and not FUSE.

An open descriptor is the lease: while it is open, its bytes stay what they are, though the file be
evicted, replaced or removed.
"""

import os
from pathlib import Path
from typing import Final, NamedTuple

from kvfs.client.blocking import Client

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

    Where the mount does not show the file under its own name (a directory of it that is mounted
    elsewhere) the descriptor is the mount's. Raises FileNotFoundError and other OSErrors of the
    path itself, and as `Client.open`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        store = Path(os.fsdecode(os.getxattr(fd, STORE_XATTR)))
    except OSError:
        return Backing(fd, None)
    try:
        name, ino = within_mount(path), os.fstat(fd).st_ino
        with Client(store) as client:
            if client.stat(name).ino != ino:
                return Backing(os.dup(fd), store)
            with client.open(name, "rb") as file:
                return Backing(os.dup(file.fileno()), store)
    finally:
        os.close(fd)


def within_mount(path: str | bytes | os.PathLike[str]) -> bytes:
    """The path from the mount's root on, symbolic links followed. Raises OSError."""
    real = os.path.realpath(os.fsencode(path))
    device = os.stat(real).st_dev
    root = real
    while os.stat(above := os.path.dirname(root)).st_dev == device and above != root:
        root = above
    return os.path.relpath(real, root)
