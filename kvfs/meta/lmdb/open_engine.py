"""Opens the embedded engine's LMDB file: makes it, trusts it, or rebuilds it.

| `state` says | and the file | action |
|---|---|---|
| nothing, and there is no base | any | never finished, so nothing was acknowledged: made anew |
| anything, and another process has it open | looks whole | used as it is, as that one does |
| this boot, or closed cleanly | looks whole, its journal goes on no further | used as it is |
| this boot, or closed cleanly | is damaged, or older than its journal | rebuilt |
| another boot, not clean; or torn | any | rebuilt; unsynced commits may be lost, never torn |

A boot is one of the machine and of the filesystem (`boot.boot_of`): unsynced pages may be torn
anywhere, though the newest commit looks whole, so only the kernel that has had them in its cache
all the time makes them trustworthy. The journal decides all the same: if it holds more than the one
commit that a kill may have cut off, `data.mdb` is not what its last writer left.
"""

import itertools
import os
from pathlib import Path
from typing import Final, NamedTuple

import lmdb

from kvfs.base.errors import Corrupt, Unavailable
from kvfs.meta.lmdb.boot import boot_of
from kvfs.meta.lmdb.checkpoints import read_position, rotate
from kvfs.meta.lmdb.deferred_commits import end_of_other_boots
from kvfs.meta.lmdb.journal import chained_records, cut_journal, generations
from kvfs.meta.lmdb.lmdb_errors import translated
from kvfs.meta.lmdb.lmdb_file import find_damage, read_metas
from kvfs.meta.lmdb.reconstruction import rebuild
from kvfs.meta.lmdb.trust_state import StateFile, TrustState, read_state

_MIN_MAP_SIZE: Final = 1 << 30
_MAX_READERS: Final = 512
_MAX_DATABASES: Final = 8
_LOCK_BYTES: Final = 40_960
"""More than LMDB needs for _MAX_READERS (64 bytes each, and a header); it takes what it finds."""
_CUT_OFF_COMMITS: Final = 1
"""Commits that a kill may leave in the journal alone: the next commit, of any process, is written
over it."""
_CHECKED_PAGES: Final = 4_096
"""Pages checked when it is opened: all of a file up to 16 MiB, the upper levels of a larger one; 10
us a page, most of it for the read."""


class OpenedEngine(NamedTuple):
    """A file open for writing."""

    environment: lmdb.Environment
    state: StateFile
    rebuilt: str | None
    """The reason why it had to be rebuilt, if it had to."""
    damage: dict[str, str]
    """The damage then, and its treatment, by its kind in `fsck`'s words."""


class EngineOpener:
    """The opening of one engine. Every method raises Corrupt, Unavailable, OSError, lmdb.Error."""

    def __init__(
        self, path: Path, map_size: int, boot: int | None, *, past_damage: bool = False
    ) -> None:
        self.path = path
        self._map_size = map_size
        self._past_damage = past_damage
        self._damage: dict[str, str] = {}
        self._given_boot = boot
        self.boot = 0
        """The running boot, as the filesystem sees it; known once it is open."""

    def open_to_write(self) -> OpenedEngine:
        """Opens it in whatever state it is; waits while another process opens or closes it."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._find_boot()
        state = StateFile(self.path)
        try:
            with state.locked():
                environment, rebuilt = self._open_locked(state)
                try:
                    state.write(TrustState(self.boot, clean=False))
                    state.share()
                except BaseException:
                    environment.close()
                    raise
        except BaseException:
            state.close()
            raise
        return OpenedEngine(environment, state, rebuilt, self._damage)

    def open_to_read(self) -> lmdb.Environment:
        """Opens it if it can be trusted as it is."""
        state = read_state(self.path / "state")
        if state is None or not (self.path / "data.mdb").exists():
            raise Unavailable(
                f"there are no metadata in {self.path}: start the node once to make them"
            )
        self._find_boot()
        if state.boot != self.boot and not state.clean:
            raise Unavailable(
                f"the metadata in {self.path} were open when the machine went down, or its disk was"
                " taken away: start the node once, with the right to write them"
            )
        return self._environment(self.path, readonly=True)

    def _find_boot(self) -> None:
        self.boot = boot_of(self.path) if self._given_boot is None else self._given_boot

    def _open_locked(self, state: StateFile) -> tuple[lmdb.Environment, str | None]:
        recorded = state.read()
        if not generations(self.path, "base"):
            return self._make(recorded), None
        if not state.try_alone():
            return self._open_shared(), None
        end_of_other_boots(self.path, self.boot)
        if recorded is None or (recorded.boot != self.boot and not recorded.clean):
            why = "the machine went down, or its disk was taken away, while it was open"
        else:
            try:
                return self._open_alone(), None
            except Corrupt as error:
                why = str(error)
        rebuilt = rebuild(self.path, self._environment, past_damage=self._past_damage)
        self._damage = rebuilt.damage
        environment = self._open_checked()
        if rebuilt.is_worn:
            rotate(environment, self.path)
        return environment, why

    def _open_shared(self) -> lmdb.Environment:
        """Opens it as another process has it: the data that one trusted have been in the kernel's
        cache since."""
        try:
            return self._open_checked()
        except Corrupt as error:
            raise Unavailable(
                f"{error}, and another process uses it: stop all of them and start again"
            ) from None

    def _open_alone(self) -> lmdb.Environment:
        """Opens it as the only process. Raises Corrupt for visible damage, and if the journal goes
        on behind it."""
        environment = self._open_checked()
        position = read_position(environment)
        records = chained_records(self.path, position)
        ahead = len(list(itertools.islice(records, _CUT_OFF_COMMITS + 1)))
        if ahead > _CUT_OFF_COMMITS:
            environment.close()
            raise Corrupt(
                f"{self.path / 'data.mdb'} is older than its journal: it ends at commit"
                f" {position.sequence}"
            )
        if not cut_journal(self.path, position):
            rotate(environment, self.path)  # a journal cut short can take nothing more
        return environment

    def _make(self, recorded: TrustState | None) -> lmdb.Environment:
        if recorded is not None:
            raise Corrupt(
                f"the base in {self.path} is missing: restore the directory from a backup"
            )
        for name in ("data.mdb", "lock.mdb"):
            (self.path / name).unlink(missing_ok=True)
        environment = self._environment(self.path)
        rotate(environment, self.path)
        return environment

    def _open_checked(self) -> lmdb.Environment:
        """Raises Corrupt for visible damage."""
        data = self.path / "data.mdb"
        if not data.exists():
            raise Corrupt(f"{data} is missing")
        try:
            environment = self._environment(self.path)
        except lmdb.Error as error:
            raise translated(error, self.path) from error
        damage = look_for_damage(environment, self.path, _CHECKED_PAGES)
        if damage is None and not self._has_its_journal(environment):
            damage = "it is another file than its journal belongs to"
        if damage is not None:
            environment.close()
            raise Corrupt(f"{data} is damaged: {damage}")
        return environment

    def _has_its_journal(self, environment: lmdb.Environment) -> bool:
        return read_position(environment).generation in generations(self.path, "journal")

    def _environment(self, path: Path, *, readonly: bool = False) -> lmdb.Environment:
        if not readonly:
            _reserve_lock_file(path / "lock.mdb")
        map_size = self._map_size
        while True:
            try:
                return lmdb.Environment(
                    str(path),
                    map_size=map_size,
                    readonly=readonly,
                    metasync=False,
                    sync=False,
                    mode=0o600,
                    create=not readonly,
                    max_readers=_MAX_READERS,
                    max_dbs=_MAX_DATABASES,
                    max_spare_txns=4,
                )
            except lmdb.MemoryError:
                if map_size <= _MIN_MAP_SIZE:
                    raise
                map_size //= 4


def _reserve_lock_file(file: Path) -> None:
    """Allocates the blocks of a new lock file before LMDB maps it: on a full disk a page of a
    sparse one is a SIGBUS, not an error. Raises OSError with ENOSPC instead."""
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(fd).st_size == 0:
            os.posix_fallocate(fd, 0, _LOCK_BYTES)
    except BaseException:
        file.unlink()
        raise
    finally:
        os.close(fd)


def look_for_damage(
    environment: lmdb.Environment, directory: Path, limit_pages: int | None = None
) -> str | None:
    """Checks pages of the newest snapshot (None: all); returns the damage, or None."""
    fd = os.open(directory / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with environment.begin() as held:
            # Others may have committed twice since: then its meta record is gone, and the file is
            # fine.
            meta = next((meta for meta in read_metas(fd) if meta.txnid == held.id()), None)
            return None if meta is None else find_damage(fd, meta, limit_pages or meta.last_page)
    finally:
        os.close(fd)
