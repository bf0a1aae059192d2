"""Bases: whole copies of the engine's file, from which and the journals after them it can be
rebuilt.

| step of a rotation | a power cut leaves | rebuilt from |
|---|---|---|
| 1 make journal.<g+1>, sync it | it may be missing | base.g, journal.g |
| 2 commit: the next record goes there | both journals | base.g, both journals |
| 3 sync both; copy the engine's file into base.tmp, sync it | an unfinished copy | as before |
| 4 sync the journal up to where the copy ends; base.tmp becomes base.<g+1> | either base | either |
| 5 remove base.g, journal.g | some left over | base.<g+1>, journal.<g+1> |

Invariants
- There is always a whole base with all journals from its generation on.
- Every rotation and rebuild holds the engine's state file locked.
"""

import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import lmdb

from kvfs.errors import Corrupt
from kvfs.meta import journal_damage
from kvfs.meta.journal import (
    FIRST,
    GENERATION_KEY,
    MIRROR_KEY,
    POSITION_KEY,
    Position,
    chained_records,
    cut_journal,
    generations,
    journal_path,
    pack_generation,
    pack_position,
    prepare_journal,
    read_start,
    replay,
    start_journal,
    sync_journals,
    unpack_position,
)
from kvfs.meta.reserve import give_up, is_full, wanted_bytes
from kvfs.private_file import sync_directory

_TEMPORARY = "base.tmp"
_REBUILD = "rebuild"
_DAMAGED: Final = "damaged"
"""What the name of a damaged journal that is kept ends with."""
_log = logging.getLogger(__name__)


def base_path(directory: Path, generation: int) -> Path:
    return directory / f"base.{generation}"


def read_position(environment: lmdb.Environment) -> Position:
    """Where the journal ends as of the last commit; `FIRST` in a new file."""
    with environment.begin() as transaction:
        packed = transaction.get(POSITION_KEY)
    return FIRST if packed is None else unpack_position(packed)


def rotate(environment: lmdb.Environment, directory: Path) -> None:
    """Start a new journal and make a new base. Others may go on committing: they wait for step 2
    alone.

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


class Rebuilt(NamedTuple):
    """What a rebuild came to."""

    damage: str | None
    """What the journals had that is lost, or may be; they are kept under another name."""
    is_worn: bool
    """Whether the next rebuild would find the same: the journals must be replaced by a base."""


def rebuild(
    directory: Path,
    open_environment: Callable[[Path], lmdb.Environment],
    *,
    past_damage: bool = False,
) -> Rebuilt:
    """Make `data.mdb` anew from the newest base and the journals. Nobody may have it open.

    `past_damage`: go on behind what cannot be read, for an administrator who says so. A crash
    halfway leaves everything for the next attempt. On a full disk it takes the room of the file
    that it replaces, which nobody believes. Raises Corrupt (the journals lack what was on disk),
    OSError, lmdb.Error.
    """
    try:
        return _rebuild(directory, open_environment, past_damage)
    except (OSError, lmdb.Error) as error:
        if not is_full(error):
            raise
    shutil.rmtree(directory / _REBUILD, ignore_errors=True)
    (directory / "data.mdb").unlink(missing_ok=True)
    while give_up(directory):
        pass
    return _rebuild(directory, open_environment, past_damage)


def _rebuild(
    directory: Path, open_environment: Callable[[Path], lmdb.Environment], past_damage: bool
) -> Rebuilt:
    work = directory / _REBUILD
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(mode=0o700)
    generation = generations(directory, "base")[-1]
    shutil.copyfile(base_path(directory, generation), work / "data.mdb")
    (work / "data.mdb").chmod(0o600)
    environment = open_environment(work)
    try:
        start = read_position(environment)
        if start.generation != generation:
            path = base_path(directory, generation)
            raise Corrupt(f"{path} is damaged: restore {directory} from a backup")
        reached = replay(environment, chained_records(directory, start), start)
        found = journal_damage.find(directory, start, reached)
        damage = None
        if found is not None:
            _require_leave(found, directory, past_damage)
            reached, damage = _go_on(environment, directory, reached, found, past_damage)
        is_worn = past_damage or read_start(journal_path(directory, generation)) is None
        with environment.begin(write=True) as transaction:
            transaction.put(POSITION_KEY, pack_position(reached))
            # Of who has the base's generation in mind: what was replayed came after it.
            transaction.put(GENERATION_KEY, pack_generation(reached))
        environment.sync(True)
    finally:
        environment.close()
    _drop_tail(directory, reached)
    (directory / "lock.mdb").unlink(missing_ok=True)
    (work / "data.mdb").rename(directory / "data.mdb")
    sync_directory(directory)
    shutil.rmtree(work)
    return Rebuilt(damage, is_worn)


def damaged_journals(directory: Path) -> list[str]:
    """The paths of the journals that were damaged and are kept, until an administrator removes
    them."""
    return sorted(map(os.fspath, directory.glob(f"journal.*.{_DAMAGED}")))


def _require_leave(found: journal_damage.Damage, directory: Path, past_damage: bool) -> None:
    if found.is_certain and not past_damage:
        raise Corrupt(
            f"{found}. Nothing was changed. `kvfs fsck --repair --store {directory.parent}` goes on"
            " behind the damage as far as it can and mends what does not fit then; or restore"
            f" {directory} from a backup"
        )


def _go_on(
    environment: lmdb.Environment,
    directory: Path,
    reached: Position,
    found: journal_damage.Damage,
    past_damage: bool,
) -> tuple[Position, str]:
    """Keep the damaged journals, and replay what is behind the damage where that was asked for; how
    far it goes, and what is lost. A mirror has what follows from its engine."""
    kept = _keep(directory, reached.generation)
    lost: list[int] = []
    behind = 0
    if past_damage and not _is_mirror(environment):
        records = journal_damage.records_past_damage(directory, reached, lost)
        end = replay(environment, records, reached)
        behind, reached = end.sequence - reached.sequence - len(lost), end
    given_up = max(found.following - behind, 0)
    damage = f"{found}. {behind} of them were taken, {given_up} given up; it is kept as {kept}"
    _log.warning("%s", damage)
    return reached, damage


def _keep(directory: Path, first: int) -> str:
    """Copy the journals from generation `first` on; the path of the first copy."""
    for generation in generations(directory, "journal"):
        if generation >= first:
            path = journal_path(directory, generation)
            copy = path.with_name(f"{path.name}.{_DAMAGED}")
            shutil.copyfile(path, copy)
            copy.chmod(0o600)
    sync_directory(directory)
    return f"{journal_path(directory, first)}.{_DAMAGED}"


def _is_mirror(environment: lmdb.Environment) -> bool:
    with environment.begin() as transaction:
        return transaction.get(MIRROR_KEY) is not None


def _drop_tail(directory: Path, reached: Position) -> None:
    """What lies behind the last commit, in whichever journal."""
    if journal_path(directory, reached.generation).exists():
        cut_journal(directory, reached)
    for generation in generations(directory, "journal"):
        if generation > reached.generation:
            journal_path(directory, generation).unlink()


def _require_space(directory: Path) -> None:
    """A journal that is begun on a full disk could take no commit. Raises OSError."""
    disk = os.statvfs(directory)
    data = directory / "data.mdb"
    needed = data.stat().st_blocks * 512 if data.exists() else 0
    if disk.f_bavail * disk.f_frsize < needed + wanted_bytes(disk.f_blocks * disk.f_frsize):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))


def _write_base(environment: lmdb.Environment, directory: Path) -> None:
    """A compact copy: LMDB writes it from a snapshot, in C, without the GIL."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    fd = os.open(directory / _TEMPORARY, flags, 0o600)
    try:
        environment.copyfd(fd, compact=True)
        os.fsync(fd)
    except BaseException:
        (directory / _TEMPORARY).unlink()
        raise
    finally:
        os.close(fd)
