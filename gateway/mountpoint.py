"""The directory that is mounted on: made where it is missing, refused where a mount would do
harm."""

import os
from pathlib import Path

from gateway.fuse import device
from kvfs.errors import AccessDenied, Invalid, NotADirectory


def prepare(mountpoint: Path, store: Path) -> bool:
    """Have a directory at `mountpoint`; True when a dead mount of KVFS was there and is gone now.

    Raises NotADirectory, AccessDenied, Invalid (store and mount hold one another).
    """
    _refuse_overlap(mountpoint, store)
    recovered = device.recover_stale(str(mountpoint))
    try:
        mountpoint.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise NotADirectory(
            f"{mountpoint} is not a directory: choose another with --mount"
        ) from None
    except PermissionError:
        raise AccessDenied(
            f"no permission to make {mountpoint}: make it, run as root, or choose a directory "
            "of yours with --mount"
        ) from None
    return recovered


def _refuse_overlap(mountpoint: Path, store: Path) -> None:
    where = Path(os.path.realpath(mountpoint.parent)) / mountpoint.name
    real_store = Path(os.path.realpath(store))
    if where == real_store or where in real_store.parents:
        raise Invalid(f"a mount at {mountpoint} would hide its own store {store}: choose another")
    if real_store in where.parents:
        raise Invalid(f"{mountpoint} lies in the store {store}: choose another with --mount")
