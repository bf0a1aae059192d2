"""Bases: whole copies of the engine's file, from which and the journals after them it can be
rebuilt.

| step of a rotation | a power cut leaves | rebuilt from |
|---|---|---|
| 1 make journal.<g+1>, sync it | it may be missing | base.g, journal.g |
| 2 commit: the next record goes there | both journals | base.g, both journals |
| 3 sync both; copy the file into base.tmp, seal it, sync it | an unfinished copy | as before |
| 4 sync the journal up to where the copy ends; base.tmp becomes base.<g+1> | either base | either |
| 5 remove base.g, journal.g | some left over | base.<g+1>, journal.<g+1> |

Invariants
- There is always a whole base with all journals from its generation on.
- Every rotation holds the engine's state file locked.
"""

import errno
import os
from pathlib import Path

import lmdb

from kvfs.base.private_file import sync_directory
from kvfs.meta.lmdb import checkpoint_seal
from kvfs.meta.lmdb.journal import (
    FIRST,
    POSITION_KEY,
    Position,
    generations,
    pack_position,
    prepare_journal,
    start_journal,
    sync_journals,
    unpack_position,
)
from kvfs.meta.lmdb.reserve import wanted_bytes

_TEMPORARY = "base.tmp"


def base_path(directory: Path, generation: int) -> Path:
    return directory / f"base.{generation}"


def read_position(environment: lmdb.Environment) -> Position:
    """Returns the end of the journal as of the last commit; `FIRST` in a new file."""
    with environment.begin() as transaction:
        packed = transaction.get(POSITION_KEY)
    return FIRST if packed is None else unpack_position(packed)


def rotate(environment: lmdb.Environment, directory: Path) -> None:
    """Starts a new journal and makes a new base. Others may go on committing: they wait only for
    step 2.

    Raises OSError, lmdb.Error; then the old base and all journals are still there.
    """
    generation = read_position(environment).generation + 1
    _require_space(directory)
    prepare_journal(directory, generation)
    sync_directory(directory)
    with environment.begin(write=True) as transaction:
        packed = transaction.get(POSITION_KEY)
        old = FIRST if packed is None else unpack_position(packed)
        transaction.put(POSITION_KEY, pack_position(start_journal(directory, old)))
    sync_journals(directory, generation)
    _write_base(environment, directory)
    sync_journals(directory, generation)
    (directory / _TEMPORARY).rename(base_path(directory, generation))
    sync_directory(directory)
    for kind in ("base", "journal"):
        for older in generations(directory, kind):
            if older < generation:
                (directory / f"{kind}.{older}").unlink()


def find_base_damage(directory: Path) -> str | None:
    """Returns the damage of the newest base, or None. Reads all of it. Raises OSError."""
    path = base_path(directory, generations(directory, "base")[-1])
    wrong = checkpoint_seal.find_damage(path)
    return wrong and f"{path} is damaged: {wrong}"


def _require_space(directory: Path) -> None:
    """Checks for space: a journal begun on a full disk could take no commit. Raises OSError."""
    disk = os.statvfs(directory)
    data = directory / "data.mdb"
    needed = data.stat().st_blocks * 512 if data.exists() else 0
    if disk.f_bavail * disk.f_frsize < needed + wanted_bytes(disk.f_blocks * disk.f_frsize):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))


def _write_base(environment: lmdb.Environment, directory: Path) -> None:
    """Makes a compact copy: LMDB writes it from a snapshot, in C, without the GIL."""
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    fd = os.open(directory / _TEMPORARY, flags, 0o600)
    try:
        environment.copyfd(fd, compact=True)
        checkpoint_seal.seal(fd)
        os.fsync(fd)
    except BaseException:
        (directory / _TEMPORARY).unlink()
        raise
    finally:
        os.close(fd)
