"""The store behind a mount, and whether the mount can be trusted.

Anybody may mount a filesystem of their own that answers as a mount of KVFS does. So only root's and
the caller's own mounts are trusted to name their store: the caller lends neither rights nor files
to the mounts of others.
"""

import os
from pathlib import Path
from typing import Final

from kvfs.base.errors import AccessDenied
from kvfs.datastore.kernel.filesystem_probe import mount_of
from kvfs.datastore.kernel.ownership import owner_name, trusted

AnyPath = str | bytes | os.PathLike[str]
STORE_XATTR: Final = b"kvfs.store"
"""The attribute of each file on a mount that holds the store's directory."""


def told_store(place: int | str) -> Path | None:
    """Returns the store that the mount of a file names, given as descriptor or path; None: it is on
    no mount."""
    try:
        return Path(os.fsdecode(os.getxattr(place, STORE_XATTR)))
    except OSError:
        return None


def require_believed(device: int, path: AnyPath) -> None:
    """Refuses a mount (its st_dev) of another user than root and the caller. Raises
    AccessDenied."""
    mount = mount_of(device)
    if mount.owner in trusted():
        return
    whose = "is no mount that this process sees"
    if mount.owner is not None:
        whose = f"is on a mount of {owner_name(mount.owner)}"
    raise AccessDenied(
        f"{os.fsdecode(path)} {whose}, whose store is not entered: be that user, or read it from "
        "the mount"
    )
