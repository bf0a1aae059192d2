"""The owners that a node trusts with its store, tiers and shared directories, and with the
directories above them.

Anyone who may write in a directory can replace its content by links or files of their own. So a
directory of data belongs to root or to the node's user and nobody else may write in it; the same
holds for all directories above it. If others may write in one of these, it has to be root's and
sticky, and the next one below already has to be trusted: /dev/shm/kvfs may be used if root or the
node's user made it.
"""

import errno
import os
import pwd
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Final

from kvfs.base.errors import AccessDenied

_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_LINKS: Final = 40
"""Symbolic links on one path, as many as the kernel follows."""


def trusted(*declared: int) -> frozenset[int]:
    """Returns the users whose files this process trusts, beside the declared ones."""
    return frozenset((0, os.geteuid(), *declared))


def require_directory(
    path: Path, what: str, owners: Collection[int], *, make: bool = False
) -> None:
    """Refuses a directory that anyone else owns, may write in or could replace. `make`: it is made,
    for its owner alone, if missing, as are those above it; `what` names its purpose, with its
    article.

    Raises AccessDenied, naming path, owner and remedy; FileNotFoundError, NotADirectoryError and
    other OSErrors of the path itself.
    """
    found = os.lstat("/")
    here, left, links = "/", _reversed_parts(os.path.abspath(path)), 0
    while left:
        name = left.pop()
        if name == "..":
            here = os.path.dirname(here)
            found = os.lstat(here)
            continue
        above, child = found, os.path.join(here, name)
        found = _found(child, make_mode=(0o755 if left else 0o700) if make else None)
        _require_kept(here, above, child, found, f"{what} {path}", owners)
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if links > _LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
            target = os.readlink(child)
            here = "/" if target.startswith("/") else here
            found = os.lstat(here)
            left += _reversed_parts(target)
        else:
            here = child
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fspath(path))
    if found.st_uid not in owners:
        raise _of_a_stranger(here, found, f"{what} {path}")
    if found.st_mode & _OTHERS_WRITE:
        raise AccessDenied(
            f"others may write in {what} {here} (mode {stat.S_IMODE(found.st_mode):04o}), and so "
            f"change what lies there: {_remedy(here, found)}"
        )


def _remedy(here: str, found: os.stat_result) -> str:
    """Returns the remedy; a tmpfs of a container, or /dev/shm, is for all users on purpose."""
    if found.st_mode & stat.S_ISVTX and found.st_uid == 0:
        return f"name a directory below it, such as {os.path.join(here, 'kvfs')}"
    return f"chmod go-w {here}, or name another directory"


def _found(path: str, *, make_mode: int | None) -> os.stat_result:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        if make_mode is None:
            raise
    try:
        os.mkdir(path, make_mode & ~_OTHERS_WRITE)
    except FileExistsError:  # somebody was faster: it is looked at like any other
        pass
    return os.lstat(path)


def _require_kept(
    here: str,
    above: os.stat_result,
    child: str,
    found: os.stat_result,
    what: str,
    owners: Collection[int],
) -> None:
    """Requires that nobody else can replace `child`, which is in the directory `here`."""
    if above.st_uid not in owners:
        raise _of_a_stranger(here, above, what)
    if not above.st_mode & _OTHERS_WRITE:
        return
    if not above.st_mode & stat.S_ISVTX or above.st_uid != 0:
        raise AccessDenied(
            f"others may write in {here} (mode {stat.S_IMODE(above.st_mode):04o}), and so replace "
            f"{what}: chmod go-w {here}, or name another directory"
        )
    if found.st_uid not in owners:
        raise _of_a_stranger(child, found, what)


def _of_a_stranger(path: str, found: os.stat_result, what: str) -> AccessDenied:
    return AccessDenied(
        f"{path} belongs to {owner_name(found.st_uid)}, who could read and change {what}: it has "
        f"to be root's or of the node's user ({owner_name(os.geteuid())}); name another directory, "
        "or look through what is there and chown it"
    )


def owner_name(uid: int) -> str:
    """Returns a user, for people."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _reversed_parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")][::-1]
