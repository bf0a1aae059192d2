"""The data files of a store that lie in several places (`places`), as if they were in one.

A data file lies in one place; for a moment, while it is moved, in two, with the same content. The
store's own directory is searched first, and files found there cost nothing more. Files of
namespaces without a target are made there, and all files whenever a target cannot take one.

Arriving files, spares and files without a name are in the store's own directory alone.
"""

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from kvfs.base.errors import UNDECODABLE
from kvfs.base.media import Place
from kvfs.datastore import places
from kvfs.datastore.files import DataFiles
from kvfs.datastore.kernel.file_sequence import FileSequence
from kvfs.datastore.layout import Store
from kvfs.datastore.quarantine_directory import Quarantined, Reason
from kvfs.meta.records import NAMESPACE_SHIFT

T = TypeVar("T")
_LOOK_S: Final = 0.25
_BELIEVED_S: Final = 5.0


class TieredFiles(DataFiles):
    """The data files of one store in several places; places and targets are the last that its node
    told, or `use` set. Any thread may use it."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.data)
        try:
            self.own = DataFiles(store.data)
        except BaseException:
            super().close()
            raise
        """The store's own directory alone."""
        self._store = store
        self._others: dict[str, DataFiles] = {}
        self._known: list[Place] = []
        self._seen: tuple[int, int] | None = None
        self._targets: dict[int, str] = {}
        self._is_told = False
        self._look_again = 0.0
        self._reload()

    def close(self) -> None:
        super().close()
        self.own.close()
        for each in self._others.values():
            each.close()
        self._others = {}

    @property
    def places(self) -> list[Place]:
        """The places beside the store's own directory, the fastest first."""
        return self._known

    def at(self, place: Place) -> DataFiles:
        """Returns the data files of one place."""
        return self._others[place.root]

    def use(self, targets: dict[int, str]) -> None:
        """Sends new files of these namespaces to these places from now on: for the node, which
        decides it."""
        self._is_told = True
        self._targets = targets

    def path(self, ino: int, version: int) -> str:
        own = super().path(ino, version)
        if self._others and not os.path.lexists(own):
            for each in self._others.values():
                if os.path.lexists(found := each.path(ino, version)):
                    return found
        return own

    def create(self, ino: int, version: int) -> int:
        target = self._target(ino >> NAMESPACE_SHIFT)
        if target is not None:
            try:
                return target.create(ino, version)
            except FileExistsError:
                raise
            except OSError:  # full, or away: the store's own directory takes it
                pass
        return super().create(ino, version)

    def open(self, ino: int, version: int, flags: int) -> int:
        try:
            return super().open(ino, version, flags)
        except FileNotFoundError:
            return self._elsewhere(lambda files: files.open(ino, version, flags))

    def sequences(self) -> list[FileSequence]:
        found = super().sequences()
        for each in list(self._others.values()):
            found += each.sequences()
        return found

    def renew(self, ino: int, version: int, copy: Callable[[int, int], object]) -> None:
        try:
            self.own.renew(ino, version, copy)
        except FileNotFoundError:
            self._elsewhere(lambda files: files.renew(ino, version, copy))

    def stat(self, ino: int, version: int) -> os.stat_result:
        try:
            return super().stat(ino, version)
        except FileNotFoundError:
            return self._elsewhere(lambda files: files.stat(ino, version))

    def is_ours(self, found: os.stat_result) -> bool:
        return super().is_ours(found) or any(each.is_ours(found) for each in self._others.values())

    def medium(self, ino: int, version: int) -> str:
        found = self.own.medium(ino, version)
        for place in self._known:
            if not found and self.at(place).medium(ino, version):
                found = place.medium
        return found

    def unlink(self, ino: int, version: int) -> bool:
        found = super().unlink(ino, version)
        if not found:
            self._reload()
        for each in self._others.values():
            found |= each.unlink(ino, version)
        return found

    def add_version(self, ino: int, version: int, new: int) -> None:
        try:
            super().add_version(ino, version, new)
        except FileNotFoundError:
            self._elsewhere(lambda files: files.add_version(ino, version, new))

    def sync_name(self, ino: int, version: int) -> None:
        try:
            self.own.sync_name(ino, version)
        except FileNotFoundError:
            self._elsewhere(lambda files: files.sync_name(ino, version))

    def clear_arriving(self, is_kept: Callable[[int], bool]) -> None:
        super().clear_arriving(is_kept)
        for each in self._others.values():
            each.clear_arriving(is_kept)

    def quarantine(self, ino: int, version: int, reason: Reason) -> str | None:
        found = self.own.quarantine(ino, version, reason)
        for each in self._others.values():
            found = each.quarantine(ino, version, reason) or found
        return found

    def quarantined(self) -> Iterator[Quarantined]:
        yield from super().quarantined()
        for each in self._others.values():
            yield from each.quarantined()

    def quarantine_stamp(self) -> int:
        return hash(tuple(each.quarantine_stamp() for each in (self.own, *self._others.values())))

    def restore(self, entry: Quarantined) -> None:
        for each in (self.own, *self._others.values()):
            if each.root == entry.root:
                each.restore(entry)

    def scan(self) -> Iterator[tuple[int, int]]:
        yield from super().scan()
        for place in self._known:
            if not place.is_shared:
                yield from self.at(place).scan()

    def strangers(self) -> Iterator[str]:
        yield from super().strangers()
        for place in self._known:
            mark = f"{place.root}/{places.MARK}"
            yield from (path for path in self.at(place).strangers() if path != mark)

    def after_fork(self) -> None:
        super().after_fork()
        for each in self._others.values():
            each.after_fork()

    def _elsewhere(self, step: Callable[[DataFiles], T]) -> T:
        """Returns the result of `step` at the first place that has the file. FileNotFoundError when
        none has."""
        for _ in range(2):
            for each in self._others.values():
                try:
                    return step(each)
                except FileNotFoundError:
                    continue
            if not self._reload():
                break
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    def _reload(self) -> bool:
        """Reads the places again if the node was given others; returns whether it was."""
        try:
            found = os.stat(self._store.root / "places")
        except FileNotFoundError:
            return False
        seen = (found.st_ino, found.st_mtime_ns)
        if seen == self._seen:
            return False
        self._seen, self._known = seen, places.known(self._store)
        for place in self._known:
            if place.root not in self._others:
                places.require(place)  # a tmpfs is empty after a boot, and anybody may make one
                self._others[place.root] = DataFiles(Path(place.root), places.owners_of(place))
        return True

    def _target(self, namespace_id: int) -> DataFiles | None:
        if not self._is_told and time.monotonic() >= self._look_again:
            self._look()
        root = self._targets.get(namespace_id)
        return None if root is None else self._others.get(root)

    def _look(self) -> None:
        """Reads the node's targets; none if it has not told them lately."""
        self._look_again = time.monotonic() + _LOOK_S
        path = self._store.run / "targets"
        self._targets = {}
        try:
            if time.time() - path.stat().st_mtime < _BELIEVED_S:
                self._reload()
                self._targets = places.decode_targets(path.read_bytes())
        except (OSError, *UNDECODABLE):
            pass


def data_files(store: Store) -> DataFiles:
    """Returns the data files of a store whose places are known by now: tiered only if there are
    several places."""
    return TieredFiles(store) if places.known(store) else DataFiles(store.data)
