"""The quarantine of one directory of data files: files that no record names, or that are damaged,
apart from the others until an administrator removes them.

`quarantine/<inode>.<version>.<since>.<reason>`; since: nanoseconds since the epoch.

Invariants
- A data file enters by one rename and leaves by a link and an unlink, all within its filesystem: a
  kill or a power cut at any point loses nothing.
- Nothing in it is overwritten, and only `kvfs quarantine --empty` removes from it.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from enum import Enum
from typing import Final, NamedTuple

DIRECTORY: Final = "quarantine"
FORMER: Final = "damaged"
"""The directory where earlier versions of KVFS kept damaged data files; their names have neither
time nor reason."""


class Reason(Enum):
    """The reason why a data file is in quarantine."""

    UNNAMED = "unnamed"
    """No record names it."""
    OUTDATED = "outdated"
    """Its record has another version, whose content is nowhere."""
    DAMAGED = "damaged"
    """Its content is not what its record says."""


class Quarantined(NamedTuple):
    """A data file in quarantine."""

    root: str
    """The directory of data files that it was in."""
    name: str
    ino: int
    version: int
    since_ns: int
    """The time since when it is there, since the epoch."""
    reason: Reason
    size_bytes: int
    used_bytes: int
    """Bytes that it takes of the disk."""

    @property
    def path(self) -> str:
        return f"{self.root}/{DIRECTORY}/{self.name}"


def enter(root: str, source: str, ino: int, version: int, reason: Reason) -> str | None:
    """Moves a data file (`source`: its path) into quarantine, and returns its path there; None when
    it is gone. A process that has it open keeps it."""
    os.makedirs(f"{root}/{DIRECTORY}", 0o700, exist_ok=True)
    target = f"{root}/{DIRECTORY}/{_name(ino, version, time.time_ns(), reason)}"
    try:
        os.rename(source, target)
    except FileNotFoundError:
        return None
    return target


def leave(entry: Quarantined, target: str) -> None:
    """Moves it back, to the path `target`. FileExistsError if there is a data file."""
    os.link(entry.path, target)
    os.unlink(entry.path)


def entries(root: str) -> Iterator[Quarantined]:
    """Yields everything in quarantine, in no order."""
    _take_over(root)
    try:
        names = os.listdir(f"{root}/{DIRECTORY}")
    except FileNotFoundError:
        return
    for name in names:
        parsed = _parse(name)
        if parsed is None:
            continue
        try:
            found = os.lstat(f"{root}/{DIRECTORY}/{name}")
        except FileNotFoundError:
            continue
        yield Quarantined(root, name, *parsed, found.st_size, 512 * found.st_blocks)


def stamp(root: str) -> int:
    """Returns another number after each change of what `entries` lists; 0 while there is no
    quarantine."""
    try:
        return os.stat(f"{root}/{DIRECTORY}").st_mtime_ns
    except FileNotFoundError:
        return 0


def _take_over(root: str) -> None:
    """Moves the files here that an earlier version of KVFS found damaged."""
    try:
        names = os.listdir(f"{root}/{FORMER}")
    except FileNotFoundError:
        return
    os.makedirs(f"{root}/{DIRECTORY}", 0o700, exist_ok=True)
    for name in names:
        former = f"{root}/{FORMER}/{name}"
        with contextlib.suppress(FileNotFoundError):  # another process does the same
            since = os.stat(former).st_ctime_ns
            new = f"{root}/{DIRECTORY}/{name}.{since}.{Reason.DAMAGED.value}"
            os.rename(former, new)
    with contextlib.suppress(OSError):
        os.rmdir(f"{root}/{FORMER}")


def _name(ino: int, version: int, since_ns: int, reason: Reason) -> str:
    return f"{ino:016x}.{version:x}.{since_ns}.{reason.value}"


def _parse(name: str) -> tuple[int, int, int, Reason] | None:
    """Returns the parts of a name; None: it is no data file in quarantine."""
    try:
        ino, version, since_ns, reason = name.split(".")
        parsed = int(ino, 16), int(version, 16), int(since_ns), Reason(reason)
    except ValueError:
        return None
    return parsed if name == _name(*parsed) else None
