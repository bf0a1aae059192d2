"""Paths of KVFS's files on this host's mount, for operations on open files."""

import os
from typing import Any

from cli import node_requests
from kvfs.base.config import Config
from kvfs.base.errors import Invalid, KvfsError, NotFound, Unavailable
from kvfs.client.mount.mount_store import STORE_XATTR


def find(config: Config, path: str) -> str:
    """Returns the path itself if it is on a mount; else that path within KVFS, on the mount of the
    running node; else the path itself, of any filesystem. Raises Invalid, NotFound, Unavailable (no
    node runs)."""
    if not path:
        raise Invalid("the path is empty: name a file or a directory")
    if is_on_mount(path):
        return path
    nowhere: KvfsError = NotFound(f"{path}: no such file, neither here nor on the mount")
    if os.path.isabs(path):
        try:
            root = mountpoint(config)
        except Unavailable as error:
            root, nowhere = None, Unavailable(f"{path}: no such file here, and {error}")
        if root is not None and os.path.lexists(inside := root + path):
            return inside
    if os.path.lexists(path):
        return path
    raise nowhere


def is_on_mount(path: str) -> bool:
    """Returns whether the path is on a mount; False also if it does not exist."""
    try:
        os.getxattr(path, STORE_XATTR)
    except OSError:
        return False
    return True


def mountpoint(config: Config) -> str | None:
    """Returns the mountpoint of the running node; None: it has no mount. Raises Unavailable: none
    runs."""
    mount: dict[str, Any] | None = node_requests.ask(config, "status")["mount"]
    return None if mount is None else str(mount["mountpoint"])
