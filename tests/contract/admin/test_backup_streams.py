"""Backups of many small files: what is read, and put, is so once."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from kvfs.admin.backup import contents, create, repository, restore
from kvfs.admin.backup.manifest import Manifest
from kvfs.admin.backup.repository import Repository
from kvfs.base.errors import NoSpace
from kvfs.session import session
from tests.contract.small_node import small_node

_FILES: Final = 60
_SIZE: Final = 1000
_A_PACK: Final = 10


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with files of which ten make a pack, and four a batch of a restore."""
    monkeypatch.setattr(contents, "_PACK_BYTES", _A_PACK * _SIZE)
    monkeypatch.setattr(restore, "_SMALL_AT_ONCE", 4)
    made = tmp_path / "store"
    with small_node(made) as node:
        space = node.namespace("models", kind="durable")
        for number in range(_FILES):
            node.write(space, f"{number:02}", b"%04d" % number * (_SIZE // 4))
        trio.run(node.sealer.settle)
    return made


class Place:
    """A repository that counts what is done there, and has room for so many packs."""

    def __init__(self, where: Repository, room: int = _FILES) -> None:
        self._where = where
        self._room = room
        self.got: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._where, name)

    def put(self, name: str, data: bytes) -> None:
        if name.startswith("packs/"):
            if not self._room:
                raise NoSpace("full")
            self._room -= 1
        self._where.put(name, data)

    def get(self, name: str, offset: int = 0, size: int = -1) -> bytes:
        self.got[name.partition("/")[0]] += 1
        return self._where.get(name, offset, size)


@pytest.fixture
def where(tmp_path: Path) -> Iterator[Repository]:
    with repository.opened(str(tmp_path / "backups"), None, make=True) as opened:
        yield opened


def make(store: Path, place: Place) -> Manifest:
    opened = session.acquire(store)
    try:
        return create.create(opened, place, None, lambda _: None).manifest
    finally:
        session.release(opened)


def test_a_restore_reads_each_pack_once(store: Path, where: Repository, tmp_path: Path) -> None:
    assert make(store, Place(where)).files == _FILES
    place = Place(where)
    found = restore.restore(place, "", tmp_path / "new", "", lambda _: None)
    assert found.files == _FILES
    assert place.got["packs"] == _FILES // _A_PACK


def test_a_backup_goes_on_where_those_before_it_were_cut_short(
    store: Path, where: Repository
) -> None:
    with pytest.raises(NoSpace):
        make(store, Place(where, room=2))
    with pytest.raises(NoSpace):
        make(store, Place(where, room=3))
    made = make(store, Place(where))
    assert (made.files, made.left_out) == (_FILES, 0)
    assert made.added_bytes == (_FILES - 5 * _A_PACK) * _SIZE
