"""The directory that is mounted on: made where it is missing, refused where a mount would harm."""

import os
from pathlib import Path

from gateway.fuse import device
from kvfs.errors import AccessDenied, Busy, Invalid, NotADirectory, NotEmpty


def prepare(mountpoint: Path, store: Path) -> bool:
    """Have an empty directory at `mountpoint`; True when a dead mount of KVFS was there and is gone
    now.

    Raises Busy (something is mounted there), NotEmpty, NotADirectory, AccessDenied, Invalid (store
    and mount hold one another).
    """
    _refuse_overlap(mountpoint, store)
    recovered = device.recover_stale(str(mountpoint))
    kind = device.mounted_type(str(mountpoint))
    if kind is not None:
        raise Busy(
            f"something is mounted at {mountpoint} already ({kind}): unmount it, or choose another "
            "directory with --mount"
        )
    _require_empty(mountpoint)
    return recovered


def _require_empty(mountpoint: Path) -> None:
    try:
        mountpoint.mkdir(parents=True, exist_ok=True)
        names = os.listdir(mountpoint)
    except (FileExistsError, NotADirectoryError):
        raise NotADirectory(
            f"{mountpoint} is not a directory: choose another with --mount"
        ) from None
    except PermissionError:
        raise AccessDenied(
            f"no permission to mount at {mountpoint}: run as root, or choose a directory of yours "
            "with --mount"
        ) from None
    if names:
        raise NotEmpty(
            f"the mountpoint {mountpoint} is not empty ('{names[0]}' for one) and a mount would "
            "hide what is in it: choose an empty directory with --mount"
        )


def _refuse_overlap(mountpoint: Path, store: Path) -> None:
    where = Path(os.path.realpath(mountpoint.parent)) / mountpoint.name
    real_store = Path(os.path.realpath(store))
    if where == real_store or where in real_store.parents:
        raise Invalid(f"a mount at {mountpoint} would hide its own store {store}: choose another")
    if real_store in where.parents:
        raise Invalid(f"{mountpoint} lies in the store {store}: choose another with --mount")
