"""The verification of the backups of a place: all that a restore would read is read, and compared
as a restore compares it.

| damaged or missing | the effect on a restore |
|---|---|
| a manifest, a page of the metadata or of the table of contents | there is none of that backup |
| a pack, or a large content | its files are left out (`--skip-damaged`) |

What backups share is read once. Nothing is written, and nothing taken: backups may be made, and
older ones deleted, meanwhile.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import xxhash

from kvfs.admin.backup import contents, manifest
from kvfs.admin.backup.contents import SHOWN, StoredContent
from kvfs.admin.backup.manifest import Manifest, SortedTable
from kvfs.admin.backup.pages import digest, rows
from kvfs.admin.backup.repository import Repository
from kvfs.admin.backup.restored_records import BATCH
from kvfs.admin.backup.selection import WantedContent, belongs, shown_path
from kvfs.base.errors import Corrupt, NotFound, NotSupported
from kvfs.datastore.checksum import CHUNK_BYTES, combine
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine

Progress = Callable[[int], None]
_PIECE: Final = 4 * CHUNK_BYTES


class VerifiedBackup(msgspec.Struct):
    """The state of one backup."""

    name: str
    restorable: bool = True
    """Whether a restore can be made of it, if only without the damaged files."""
    files: int = 0
    damaged: list[str] = []
    """Its objects in the place that are damaged or missing, each with the reason."""
    damaged_files: int = 0
    """Files whose content is in these."""
    paths: list[str] = []
    """The first of these files."""

    @property
    def is_whole(self) -> bool:
        return not self.damaged


def verify(repository: Repository, at: str, progress: Progress) -> list[VerifiedBackup]:
    """Verifies the backup that `at` names (`manifest.chosen`), or without it all, the newest first.
    `progress` is told the bytes that were read. Raises NotFound, Invalid, NotSupported (a later
    version made it), Unavailable, AccessDenied."""
    names = [manifest.chosen_name(repository, at)] if at else manifest.names(repository)
    if not names:
        raise NotFound(f"there are no backups in {repository.shown}")
    turn = _Verifier(repository, progress)
    found = (turn.look(each) for each in reversed(names))
    return [each for each in found if each is not None]


class _PageState(NamedTuple):
    """The contents that a page of the table of contents names."""

    damaged: dict[str, str]
    """Objects that are damaged or missing, and the reasons."""
    inos: list[int]
    """The files that have their contents there."""


class _Verifier:
    """One verification, which remembers the objects that it has read."""

    def __init__(self, repository: Repository, progress: Progress) -> None:
        self._repository = repository
        self._progress = progress
        self._read_bytes = 0
        self._pages: dict[str, str] = {}
        """The reason why a page of metadata is damaged, by its name; empty: it is whole."""
        self._contents: dict[str, _PageState] = {}
        self._packs: dict[str, int] = {}
        """The size of each pack; negative: it is damaged or missing."""
        self._large: dict[str, str] = {}
        self._damaged_pack = "", b""
        """The last damaged pack, and what is left of it."""

    def look(self, name: str) -> VerifiedBackup | None:
        """Returns the state of a backup; None: it has been deleted."""
        state = VerifiedBackup(name)
        try:
            found = manifest.read(self._repository, name)
        except NotFound:
            return None
        except Corrupt as error:
            state.restorable = False
            state.damaged.append(str(error))
            return state
        state.files = found.files
        self._look_at_metadata(found, state)
        inos = self._look_at_contents(found, state)
        state.damaged_files = len(inos)
        if state.damaged and not self._is_there(name):
            return None
        state.paths = self._paths(found, inos[:SHOWN])
        return state

    def _look_at_metadata(self, found: Manifest, state: VerifiedBackup) -> None:
        for page in found.records.pages:
            if page not in self._pages:
                self._pages[page] = self._page_damage(page)
            if self._pages[page]:
                state.damaged.append(self._pages[page])
                state.restorable = False

    def _page_damage(self, page: str) -> str:
        try:
            for key, value in rows(self._repository, SortedTable(pages=[page])):
                self._count(len(key) + len(value))
                if not belongs(key):
                    return f"{self._repository.shown}: page {page} has the key {key[:64].hex()}"
        except Corrupt as error:
            return str(error)
        return ""

    def _look_at_contents(self, found: Manifest, state: VerifiedBackup) -> list[int]:
        """Returns the files whose contents are damaged."""
        damaged: dict[str, str] = {}
        inos: list[int] = []
        for page in found.contents.pages:
            if page not in self._contents:
                try:
                    self._contents[page] = self._page_state(page)
                except Corrupt as error:
                    state.restorable = False
                    damaged[page] = str(error)
                    continue
            damaged |= self._contents[page].damaged
            inos += self._contents[page].inos
        state.damaged += damaged.values()
        return inos

    def _page_state(self, page: str) -> _PageState:
        """Reads all contents that a page names. Raises Corrupt: it is damaged itself."""
        found = _PageState({}, [])
        for key, stored in contents.stored(rows(self._repository, SortedTable(pages=[page]))):
            each = contents.content_at(key, stored)
            if stored.pack:
                self._look_in_pack(each, stored, found)
            elif damage := self._large_damage(each):
                found.damaged[contents.large_object(each)] = damage
                found.inos.append(each.ino)
        return found

    def _look_in_pack(self, each: WantedContent, stored: StoredContent, found: _PageState) -> None:
        name = stored.pack
        if name not in self._packs:
            self._packs[name] = self._pack_size(name)
        size = self._packs[name]
        if 0 <= stored.offset + stored.size <= size:
            return
        where = f"{self._repository.shown}/{contents.pack_object(name)}"
        found.damaged[name] = f"{where} is missing or not what it was"
        part = self._rest_of(name)[stored.offset : stored.offset + stored.size]
        if not _is_content(part, each):
            found.inos.append(each.ino)

    def _pack_size(self, pack: str) -> int:
        """Returns the size of a pack that is whole, else a negative number."""
        data = self._get(contents.pack_object(pack))
        return len(data) if digest(data) == pack else -1

    def _rest_of(self, pack: str) -> bytes:
        """Returns what there is of a damaged pack, read again where another one was in between."""
        if self._damaged_pack[0] != pack:
            self._damaged_pack = pack, self._get(contents.pack_object(pack))
        return self._damaged_pack[1]

    def _get(self, name: str) -> bytes:
        """Returns an object; nothing where it is missing, or cannot be read."""
        try:
            data = self._repository.get(name)
        except (NotFound, Corrupt):
            return b""
        self._count(len(data))
        return data

    def _large_damage(self, each: WantedContent) -> str:
        name = contents.large_object(each)
        if name not in self._large:
            self._large[name] = "" if self._is_large_whole(name, each) else self._not_what(name)
        return self._large[name]

    def _not_what(self, name: str) -> str:
        return f"{self._repository.shown}/{name} is missing or not what it was"

    def _is_large_whole(self, name: str, each: WantedContent) -> bool:
        try:
            if self._repository.size_of(name) != each.size:
                return False
            sums = bytearray()
            for data in self._pieces(name, each.size):
                for at in range(0, len(data), CHUNK_BYTES):
                    sums += xxhash.xxh3_128_digest(data[at : at + CHUNK_BYTES])
        except (NotFound, Corrupt):
            return False
        return combine(bytes(sums)) == each.checksum

    def _pieces(self, name: str, size: int) -> Iterator[memoryview]:
        for at in range(0, size, _PIECE):
            data = self._repository.get(name, at, min(_PIECE, size - at))
            self._count(len(data))
            yield memoryview(data)

    def _is_there(self, name: str) -> bool:
        return name in manifest.names(self._repository)

    def _paths(self, found: Manifest, inos: list[int]) -> list[str]:
        """Returns the names of files in a backup, of which all metadata are read again."""
        if not inos:
            return []
        try:
            with (
                tempfile.TemporaryDirectory(prefix="kvfs-verify-") as directory,
                closing(EmbeddedEngine(Path(directory))) as engine,
            ):
                for batch in contents.batches(rows(self._repository, found.records), BATCH):
                    engine.transact_now(lambda t, batch=batch: t.put_all(batch))  # type: ignore[misc]
                return [engine.read_now(lambda t, ino=ino: shown_path(t, ino)) for ino in inos]  # type: ignore[misc]
        except (Corrupt, NotSupported):
            return [f"inode {ino}" for ino in inos]

    def _count(self, size: int) -> None:
        self._read_bytes += size
        self._progress(self._read_bytes)


def _is_content(data: bytes, each: WantedContent) -> bool:
    sums = xxhash.xxh3_128_digest(data) if data else b""
    return len(data) == each.size and combine(sums) == each.checksum
