"""What a later version of KVFS wrote is refused with the remedy, and left as it is: it is not
damaged, though nothing here can read it."""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvfs.base.errors import Corrupt, KvfsError, NotSupported
from kvfs.base.media import Place
from kvfs.client import Client
from kvfs.datastore import places
from kvfs.datastore.layout import Store, create_store
from kvfs.meta import keys
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.tree import namespaces
from tests.integration.harness import kvfs


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Left in order, with the records of an empty tree."""
    made = create_store(tmp_path / "store")
    engine = EmbeddedEngine(made.meta)
    engine.transact_now(lambda t: namespaces.format(t, 1, 0, 0))
    engine.close()
    return made


def test_metadata_of_a_later_schema(store: Store) -> None:
    """By every door: who reads, who writes, and who would mend."""
    engine = EmbeddedEngine(store.meta)
    engine.transact_now(lambda t: t.put(keys.VERSION, b"%d" % (keys.SCHEMA + 1)))
    engine.close()
    refusal = rf"schema {keys.SCHEMA + 1}, this KVFS reads {keys.SCHEMA - 1} and {keys.SCHEMA}: use"
    with Client(store.root) as client:
        with pytest.raises(NotSupported, match=refusal):
            list(client.list("/"))
        with pytest.raises(NotSupported, match=refusal):
            client.put("/cache/a", b"x")
    done = kvfs("fsck", "--repair", "--store", str(store.root))
    assert done.returncode == 2, done.stdout
    assert f"schema {keys.SCHEMA + 1}" in done.stderr


def test_an_engine_that_a_later_version_used_last(store: Store) -> None:
    path = store.meta / "state"
    before = as_later(path)
    with pytest.raises(NotSupported, match=r"state is of a later version.*use the version that"):
        EmbeddedEngine(store.meta)
    with pytest.raises(NotSupported, match="state is of a later version"):
        EmbeddedEngine(store.meta, readonly=True)
    assert path.read_bytes() == before


@pytest.mark.parametrize("what", ["format", "schema", "state", "base", "journal"])
def test_an_upgrade_to_this_program_is_hindered(store: Store, what: str) -> None:
    """By whichever of the store's files, and nothing of them changes."""
    if what == "format":
        mark = store.root / "format"
        mark.write_bytes(mark.read_bytes().replace(b'"format":1', b'"format":2'))
    elif what == "schema":
        with contextlib.closing(EmbeddedEngine(store.meta)) as engine:
            engine.transact_now(lambda t: t.put(keys.VERSION, b"%d" % (keys.SCHEMA + 1)))
    else:
        (path,) = store.meta.glob("state" if what == "state" else f"{what}.*")
        as_later(path, at=-32 if what == "base" else 0)
    before = contents_of(store)
    done = kvfs("upgrade", "--check", "--json", "--store", str(store.root))
    assert done.returncode == 1, done
    found = json.loads(done.stdout)
    assert not found["ready"]
    told = {each["name"]: each for each in found["findings"]}
    refused = told["store" if what == "format" else "metadata"]
    assert refused["state"] == "stop"
    assert "use the version that made" in refused["reason"]
    assert contents_of(store) == before


def contents_of(store: Store) -> dict[str, bytes]:
    """Of all files, but for the slots of LMDB's readers."""
    found = (path for path in store.root.rglob("*") if path.is_file() and path.name != "lock.mdb")
    return {str(path): path.read_bytes() for path in found}


def damaged(meta: Path) -> None:
    """So that it has to be rebuilt from base and journal."""
    os.truncate(meta / "data.mdb", 4096)


@pytest.mark.parametrize("name", ["base", "journal"])
@pytest.mark.parametrize("past_damage", [False, True])
def test_a_rebuild_from_files_of_a_later_version(
    store: Store, name: str, past_damage: bool
) -> None:
    (path,) = store.meta.glob(f"{name}.*")
    before = as_later(path, at=-32 if name == "base" else 0)
    damaged(store.meta)
    with pytest.raises(NotSupported, match=rf"{path.name} is of a later version"):
        EmbeddedEngine(store.meta, past_damage=past_damage)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda mark: mark.replace(b'"format":1', b'"format":2'), NotSupported, "has format 2"),
        (lambda mark: mark[:-1], Corrupt, "is damaged"),
    ],
)
def test_a_place_of_another_version(
    store: Store,
    tmp_path: Path,
    change: Callable[[bytes], bytes],
    error: type[KvfsError],
    message: str,
) -> None:
    place = Place("ssd", str(tmp_path / "flash"), 1 << 30)
    places.prepare(store, [place], "")
    mark = tmp_path / "flash" / places.MARK
    mark.write_bytes(change(mark.read_bytes()))
    with pytest.raises(error, match=message):
        places.prepare(store, [place], "")


def as_later(path: Path, at: int = 0) -> bytes:
    """Give a file the next version's number, in the eighth byte; what is in it then."""
    content = bytearray(path.read_bytes())
    at += 7 if at >= 0 else len(content) + 7
    content[at : at + 1] = b"%d" % (int(content[at : at + 1]) + 1)
    path.write_bytes(content)
    return bytes(content)
