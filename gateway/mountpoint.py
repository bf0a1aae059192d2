"""The directory that is mounted on: made if missing, refused if a mount would harm."""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from gateway.bare_directory import BareDirectory
from gateway.fuse.channel import device
from kvfs.base.errors import AccessDenied, Busy, Invalid, NotADirectory, Unavailable
from kvfs.base.fuse_device import UNSERVED
from kvfs.base.processes import state_of
from kvfs.datastore.kernel import filesystem_probe
from kvfs.datastore.layout import is_locked

_DYING_S: Final = 2.0
"""Time after which a killed process has usually gone."""
_END_S: Final = 10.0
_POLL_S: Final = 0.02


def check(mountpoint: Path, store: Path) -> None:
    """Refuses what `prepare` would refuse, and changes nothing: for use before the store is
    made."""
    _refuse_overlap(mountpoint, store)
    if device.is_ours(str(mountpoint)) and _is_dead(mountpoint):
        return
    _refuse_mounted(mountpoint)
    if os.path.lexists(mountpoint):
        hold(mountpoint).close()
    else:
        _require_room(mountpoint)


def prepare(mountpoint: Path, store: Path) -> bool:
    """Prepares a directory at `mountpoint`; True if a dead mount of KVFS was removed there.

    Raises Busy (something is mounted there), NotADirectory, AccessDenied, Invalid (store and mount
    contain one another).
    """
    _refuse_overlap(mountpoint, store)
    recovered = device.recover_stale(str(mountpoint))
    _refuse_mounted(mountpoint)
    with _refusals(mountpoint):
        mountpoint.mkdir(parents=True, exist_ok=True)
    return recovered


def hold(mountpoint: Path) -> BareDirectory:
    """Holds the directory that a mount there will hide. Raises NotADirectory, AccessDenied."""
    with _refusals(mountpoint):
        return BareDirectory(mountpoint)


def hidden(mountpoint: Path | str, names: Sequence[str]) -> str:
    """Returns the message about a directory that is not empty; `names`: the first of its
    entries."""
    return (
        f"{mountpoint} is not empty: the mount hides '{min(names)}' and what else is there, "
        "unchanged; `kvfs down` shows it again, to be moved away"
    )


def end_dead(mountpoint: Path, lock: Path) -> None:
    """Ends the remains of a daemon that was killed while the kernel held one of its threads in the
    lock of a directory: the holder of that lock waits for the daemon, which therefore never ends,
    and holds the store's `lock`. Returns when that is free; does nothing if its holder is alive.

    Raises Unavailable, AccessDenied."""
    if not _has_died(lock) or _is_free(lock, _DYING_S):
        return
    if device.is_ours(str(mountpoint)):
        device.abort(str(mountpoint))
    if not _is_free(lock, _END_S):
        raise Unavailable(f"the killed process that holds {lock} does not end")


def _is_free(lock: Path, deadline_s: float) -> bool:
    """Returns whether nobody holds the lock by then."""
    end = time.monotonic() + deadline_s
    while is_locked(lock):
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_S)
    return True


def _has_died(lock: Path) -> bool:
    """Returns whether the process named in a lock has ended, though not all of its threads have."""
    try:
        pid = int(lock.read_text("ascii"))
        return state_of(pid) in "ZX" and len(os.listdir(f"/proc/{pid}/task")) > 1
    except (OSError, ValueError):
        return False


def refuse_nested(store: Path) -> None:
    """Raises Invalid for a store within a mount of KVFS: one node would wait for another there, and
    a power cut would find neither in order."""
    above = store.absolute()
    while not os.path.exists(above):
        above = above.parent
    if filesystem_probe.filesystem_type(above) == device.FSTYPE:
        raise Invalid(
            f"the store {store} lies in a mount of KVFS: choose a directory on a disk with --store"
        )


def _is_dead(mountpoint: Path) -> bool:
    try:
        os.statvfs(mountpoint)
    except OSError as error:
        return error.errno in UNSERVED
    return False


def _refuse_mounted(mountpoint: Path) -> None:
    if found := device.mounted(str(mountpoint)):
        raise Busy(
            f"something is mounted at {mountpoint} already ({found.fstype}): unmount it, or choose "
            "another directory with --mount"
        )


def _require_room(mountpoint: Path) -> None:
    """Requires that a missing directory can be made."""
    above = mountpoint.absolute().parent
    while not os.path.lexists(above):
        above = above.parent
    with _refusals(mountpoint):
        if not above.is_dir():
            raise NotADirectoryError
        if not os.access(above, os.W_OK | os.X_OK):
            raise PermissionError


@contextlib.contextmanager
def _refusals(mountpoint: Path) -> Iterator[None]:
    """Translates the system's refusals, with their remedies."""
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
