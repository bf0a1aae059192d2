"""The directory that is mounted on: made where it is missing, refused where a mount would harm."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from gateway.fuse import device
from kvfs.errors import AccessDenied, Busy, Invalid, NotADirectory, NotEmpty
from kvfs.store import probe


def check(mountpoint: Path, store: Path) -> None:
    """Refuse what `prepare` would refuse, and change nothing: for before the store is made."""
    _refuse_overlap(mountpoint, store)
    if device.is_ours(str(mountpoint)) and _is_dead(mountpoint):
        return
    _refuse_mounted(mountpoint)
    if os.path.lexists(mountpoint):
        _require_empty(mountpoint)
    else:
        _require_room(mountpoint)


def prepare(mountpoint: Path, store: Path) -> bool:
    """Have an empty directory at `mountpoint`; True when a dead mount of KVFS was there and is gone
    now.

    Raises Busy (something is mounted there), NotEmpty, NotADirectory, AccessDenied, Invalid (store
    and mount hold one another).
    """
    _refuse_overlap(mountpoint, store)
    recovered = device.recover_stale(str(mountpoint))
    _refuse_mounted(mountpoint)
    with _refusals(mountpoint):
        mountpoint.mkdir(parents=True, exist_ok=True)
    _require_empty(mountpoint)
    return recovered


def refuse_nested(store: Path) -> None:
    """Raises Invalid for a store within a mount of KVFS: one node would wait for another there, and
    a power cut would find neither in order."""
    above = store.absolute()
    while not os.path.exists(above):
        above = above.parent
    if probe.filesystem_type(above) == device.FSTYPE:
        raise Invalid(
            f"the store {store} lies in a mount of KVFS: choose a directory on a disk with --store"
        )


def _is_dead(mountpoint: Path) -> bool:
    try:
        os.statvfs(mountpoint)
    except OSError as error:
        return error.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    return False


def _refuse_mounted(mountpoint: Path) -> None:
    if found := device.mounted(str(mountpoint)):
        raise Busy(
            f"something is mounted at {mountpoint} already ({found.fstype}): unmount it, or choose "
            "another directory with --mount"
        )


def _require_room(mountpoint: Path) -> None:
    """A directory that is missing can be made."""
    above = mountpoint.absolute().parent
    while not os.path.lexists(above):
        above = above.parent
    with _refusals(mountpoint):
        if not above.is_dir():
            raise NotADirectoryError
        if not os.access(above, os.W_OK | os.X_OK):
            raise PermissionError


def _require_empty(mountpoint: Path) -> None:
    with _refusals(mountpoint):
        names = os.listdir(mountpoint)
    if names:
        raise NotEmpty(
            f"the mountpoint {mountpoint} is not empty ('{names[0]}' for one) and a mount would "
            "hide what is in it: choose an empty directory with --mount"
        )


@contextlib.contextmanager
def _refusals(mountpoint: Path) -> Iterator[None]:
    """The system's refusals, with their remedies."""
    try:
        yield
    except (FileExistsError, FileNotFoundError, NotADirectoryError):
        raise NotADirectory(
            f"{mountpoint} is not a directory: choose another with --mount"
        ) from None
    except PermissionError:
        raise AccessDenied(
            f"no permission to mount at {mountpoint}: run as root, or choose a directory of yours "
            "with --mount"
        ) from None


def _refuse_overlap(mountpoint: Path, store: Path) -> None:
    where = Path(os.path.realpath(mountpoint.parent)) / mountpoint.name
    real_store = Path(os.path.realpath(store))
    if where == real_store or where in real_store.parents:
        raise Invalid(f"a mount at {mountpoint} would hide its own store {store}: choose another")
    if real_store in where.parents:
        raise Invalid(f"{mountpoint} lies in the store {store}: choose another with --mount")
