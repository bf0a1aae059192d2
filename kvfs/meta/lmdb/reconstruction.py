"""Rebuilds the engine's file from a base and the journals since, if it cannot be trusted.

| `checkpoint_seal` says of the newest base | action |
|---|---|
| it is as it was taken; or an earlier version took it, without a seal | it is built on |
| damaged, but a cut left the base before it, and all journals since | that is built on |
| damaged | refused; `past_damage` takes what can be read, and a replica is read anew |

`journal_damage` tells the damage of journals. Damaged files are kept, as `base.<g>.damaged` and
`journal.<g>.damaged`.

Invariants
- Every rebuild holds the engine's state file locked.
- A crash halfway leaves everything for the next attempt.
"""

import contextlib
import logging
import os
import shutil
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Final, NamedTuple

import lmdb

from kvfs.base.errors import Corrupt
from kvfs.base.private_file import sync_directory
from kvfs.meta.lmdb import checkpoint_seal, journal_damage
from kvfs.meta.lmdb.checkpoints import base_path, read_position
from kvfs.meta.lmdb.journal import (
    GENERATION_KEY,
    POSITION_KEY,
    REPLICA_KEY,
    Position,
    chained_records,
    cut_journal,
    generations,
    journal_path,
    pack_generation,
    pack_position,
    read_start,
    replay,
)
from kvfs.meta.lmdb.reserve import give_up, is_full
from kvfs.meta.lmdb.salvage import salvage
from kvfs.meta.replica.replica_mark import unfilled

_REBUILD: Final = "rebuild"
_DAMAGED: Final = "damaged"
"""The end of the name of a damaged base or journal that is kept."""
_log = logging.getLogger(__name__)


class Rebuilt(NamedTuple):
    """The result of a rebuild."""

    damage: dict[str, str]
    """The losses, certain or possible, of the newest base and of the journals, by the kinds of
    `fsck`; they are kept under other names."""
    is_worn: bool
    """Whether the next rebuild would find the same: the journals must be replaced by a base."""


def rebuild(
    directory: Path,
    open_environment: Callable[[Path], lmdb.Environment],
    *,
    past_damage: bool = False,
) -> Rebuilt:
    """Rebuilds `data.mdb` from the newest base and the journals. Nobody may have it open.

    `past_damage`: continues behind unreadable records, for an administrator who says so. A crash
    halfway leaves everything for the next attempt. On a full disk it takes the space of the file
    that it replaces, which nobody trusts. Raises Corrupt (the journals lack commits that were on
    disk), OSError, lmdb.Error.
    """
    try:
        return _rebuild(directory, open_environment, past_damage)
    except (OSError, lmdb.Error) as error:
        if not is_full(error, directory):
            raise
    shutil.rmtree(directory / _REBUILD, ignore_errors=True)
    (directory / "data.mdb").unlink(missing_ok=True)
    while give_up(directory):
        pass
    return _rebuild(directory, open_environment, past_damage)


def _rebuild(
    directory: Path, open_environment: Callable[[Path], lmdb.Environment], past_damage: bool
) -> Rebuilt:
    ground = _choose_ground(directory, past_damage)
    work = directory / _REBUILD
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(mode=0o700)
    damage: dict[str, str] = {}
    start, environment = _lay(ground, directory, work, open_environment, damage)
    try:
        reached = replay(environment, chained_records(directory, start), start)
        found = journal_damage.find(directory, start, reached, ground.least)
        if found is not None:
            _require_leave(found, directory, past_damage)
            reached, damage["damaged_journal"] = _go_on(
                environment, directory, reached, found, past_damage
            )
        is_worn = (
            past_damage
            or bool(ground.damage)
            or read_start(journal_path(directory, start.generation)) is None
        )
        with environment.begin(write=True) as transaction:
            transaction.put(POSITION_KEY, pack_position(reached))
            # Readers that remember the base's generation see that commits were replayed after it.
            transaction.put(GENERATION_KEY, pack_generation(reached))
            if not ground.is_whole:
                for key, mark in _marks(transaction):
                    transaction.put(key, unfilled(mark))
        environment.sync(True)
    finally:
        environment.close()
    _drop_tail(directory, reached)
    (directory / "lock.mdb").unlink(missing_ok=True)
    (work / "data.mdb").rename(directory / "data.mdb")
    sync_directory(directory)
    shutil.rmtree(work)
    return Rebuilt(damage, is_worn)


class _Ground(NamedTuple):
    """The base that a rebuild builds on."""

    generation: int
    is_whole: bool
    least: int
    """The commit that the journals reach at least."""
    damage: str
    """The damage of the newest base; empty: none."""


def _choose_ground(directory: Path, past_damage: bool) -> _Ground:
    """Chooses the base. Raises Corrupt if there is no whole one, and damage may not be passed."""
    *older, newest = generations(directory, "base")
    path = base_path(directory, newest)
    wrong = checkpoint_seal.find_damage(path)
    if wrong is None:
        return _Ground(newest, True, 0, "")
    damage = f"{path} is damaged: {wrong}"
    begin = read_start(journal_path(directory, newest))
    for generation in reversed(older):
        is_linked = {*range(generation, newest)} <= {*generations(directory, "journal")}
        if (
            begin
            and is_linked
            and checkpoint_seal.find_damage(base_path(directory, generation)) is None
        ):
            return _Ground(generation, True, begin.sequence, damage)
    if not past_damage:
        raise Corrupt(
            f"{damage}. Nothing was changed. `kvfs fsck --repair --store {directory.parent}` takes"
            f" what can be read of it; or restore {directory} from a backup"
        )
    return _Ground(newest, False, 0, damage)


def _lay(
    ground: _Ground,
    directory: Path,
    work: Path,
    open_environment: Callable[[Path], lmdb.Environment],
    damage: dict[str, str],
) -> tuple[Position, lmdb.Environment]:
    """Makes the file onto which the journals are replayed, and returns the position to replay from;
    `damage` gets the damage of the newest base. Raises Corrupt, OSError, lmdb.Error."""
    path, data = base_path(directory, ground.generation), work / "data.mdb"
    if ground.is_whole:
        shutil.copyfile(path, data)
        os.truncate(data, checkpoint_seal.pages_bytes(path))
        data.chmod(0o600)
    environment = open_environment(work)
    try:
        came_of_it = f"{path} and the journals since have all that it had"
        if not ground.is_whole:
            came_of_it = f"{salvage(path, environment)} of its pages and pairs cannot be read"
        if ground.damage:
            kept = _keep_base(base_path(directory, generations(directory, "base")[-1]))
            damage["damaged_base"] = f"{ground.damage}. It is kept as {kept}; {came_of_it}"
            _log.warning("%s", damage["damaged_base"])
        return _start_of(ground, environment, directory), environment
    except BaseException:
        environment.close()
        raise


def _start_of(ground: _Ground, environment: lmdb.Environment, directory: Path) -> Position:
    """Returns the position from which the journals are replayed: for a damaged base, the start of
    its own journal, which restores some of the unreadable data. Raises Corrupt."""
    begin = read_start(journal_path(directory, ground.generation))
    start = read_position(environment) if ground.is_whole or begin is None else begin
    if start.generation != ground.generation:
        raise Corrupt(
            f"{base_path(directory, ground.generation)} is damaged: restore {directory} from a"
            f" backup, or move it away and run `kvfs rebuild --store {directory.parent}`"
        )
    return start


def _keep_base(path: Path) -> Path:
    """Gives a damaged base a second name, since the next rotation takes its first."""
    kept = path.with_name(f"{path.name}.{_DAMAGED}")
    with contextlib.suppress(FileExistsError):
        kept.hardlink_to(path)
    sync_directory(path.parent)
    return kept


def damaged_metadata(directory: Path) -> list[str]:
    """Returns the paths of the bases and journals that were damaged and are kept, until an
    administrator removes them."""
    return sorted(map(os.fspath, directory.glob(f"*.*.{_DAMAGED}")))


def _require_leave(found: journal_damage.JournalDamage, directory: Path, past_damage: bool) -> None:
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
    found: journal_damage.JournalDamage,
    past_damage: bool,
) -> tuple[Position, str]:
    """Keeps the damaged journals, and replays the records behind the damage if that was asked for;
    returns how far it goes, and the losses. A replica gets the rest from its engine."""
    kept = _keep(directory, reached.generation)
    lost: list[int] = []
    behind = 0
    if past_damage and not _is_replica(environment):
        records = journal_damage.records_past_damage(directory, reached, lost)
        end = replay(environment, records, reached)
        behind, reached = end.sequence - reached.sequence - len(lost), end
    given_up = max(found.following - behind, 0)
    damage = f"{found}. {behind} of them were taken, {given_up} given up; it is kept as {kept}"
    _log.warning("%s", damage)
    return reached, damage


def _keep(directory: Path, first: int) -> str:
    """Copies the journals from generation `first` on, and returns the path of the first copy."""
    for generation in generations(directory, "journal"):
        if generation >= first:
            path = journal_path(directory, generation)
            copy = path.with_name(f"{path.name}.{_DAMAGED}")
            shutil.copyfile(path, copy)
            copy.chmod(0o600)
    sync_directory(directory)
    return f"{journal_path(directory, first)}.{_DAMAGED}"


def _marks(transaction: lmdb.Transaction) -> list[tuple[bytes, bytes]]:
    """Returns the marks of a metadata replica, of each shard's log one."""
    cursor = transaction.cursor()
    found = cursor.iternext() if cursor.set_range(REPLICA_KEY) else iter(())
    pairs = ((bytes(key), bytes(mark)) for key, mark in found)
    return list(takewhile(lambda pair: pair[0].startswith(REPLICA_KEY), pairs))


def _is_replica(environment: lmdb.Environment) -> bool:
    with environment.begin() as transaction:
        return transaction.get(REPLICA_KEY) is not None


def _drop_tail(directory: Path, reached: Position) -> None:
    """Drops the records behind the last commit, in every journal."""
    if journal_path(directory, reached.generation).exists():
        cut_journal(directory, reached)
    for generation in generations(directory, "journal"):
        if generation > reached.generation:
            journal_path(directory, generation).unlink()
