"""How doors beside the node come to a descriptor when the first look opens nothing: what the node
answers, and what others do meanwhile."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

import kvfs
from kvfs.base.errors import Busy, Corrupt, KvfsError, NotFound, OtherVersion, Unavailable
from kvfs.meta import keys
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.objects.object_errors import NoSuchKey
from kvfs.objects.object_store import ObjectStore
from kvfs.tree.copies import placements
from kvfs.vfs.node_client import NodeClient
from tests.contract import client_store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    root = client_store.make(tmp_path / "store")
    with kvfs.Client(root) as client:
        client.put("/cache/a", b"cached")
        client.put("/models/a", b"weights")
    return root


Read = Callable[[Path, str], bytes]


def lose_the_data(store: Path) -> None:
    for data in (store / "data").glob("[0-9a-f]*/*"):
        data.unlink()


def read_as_file(store: Path, path: str) -> bytes:
    with kvfs.Client(store) as client:
        return bytes(client.get(f"/{path}"))


def read_as_object(store: Path, path: str) -> bytes:
    bucket, _, key = path.encode().partition(b"/")
    objects = ObjectStore(store)
    try:
        opened = objects.open(bucket, key, "")
        with open(opened.fd, "rb") as file:
            return file.read()
    finally:
        objects.close()


doors = pytest.mark.parametrize("read", [read_as_file, read_as_object])


@doors
def test_what_took_its_place_meanwhile_is_opened(
    store: Path, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_the_data(store)

    def replaced(_node: NodeClient, _ino: int) -> bool:
        with kvfs.Client(store) as client:
            client.put("/models/a", b"newer")
        return False

    monkeypatch.setattr(NodeClient, "bring", replaced)
    assert read(store, "models/a") == b"newer"


@doors
def test_what_was_removed_meanwhile_is_a_miss(
    store: Path, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_the_data(store)

    def removed(_node: NodeClient, _ino: int) -> bool:
        with kvfs.Client(store) as client:
            client.remove("/models/a")
        return False

    monkeypatch.setattr(NodeClient, "bring", removed)
    with pytest.raises(NotFound):
        read(store, "models/a")


@doors
def test_data_that_come_and_go_are_unavailable_after_some_looks(
    store: Path, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_the_data(store)
    asked = []

    def here(_node: NodeClient, ino: int) -> bool:
        asked.append(ino)
        return True

    monkeypatch.setattr(NodeClient, "bring", here)
    with pytest.raises(Unavailable, match="try again"):
        read(store, "models/a")
    assert 1 < len(asked) < 20


@doors
def test_without_anybody_who_has_the_data_a_durable_file_is_corrupt_and_a_cached_one_a_miss(
    store: Path, read: Read
) -> None:
    lose_the_data(store)
    with pytest.raises(Corrupt, match="kvfs fsck"):
        read(store, "models/a")
    with pytest.raises(NotFound, match="its data have gone"):
        read(store, "cache/a")


@doors
def test_what_other_nodes_have_is_unavailable_while_no_node_runs_here(
    store: Path, read: Read
) -> None:
    lose_the_data(store)
    with kvfs.Client(store) as client:
        inos = [client.stat(path).ino for path in ("/models/a", "/cache/a")]
    with contextlib.closing(EmbeddedEngine(store / "meta")) as engine:
        for ino in inos:
            engine.transact_now(lambda t, ino=ino: placements.hold_at(t, ino, 0, keys.pack_node(2)))
    with pytest.raises(Unavailable, match="which are on: 2"):
        read(store, "models/a")
    with pytest.raises(NotFound):
        read(store, "cache/a")


@doors
@pytest.mark.parametrize("error", [OtherVersion, Busy, Unavailable])
def test_the_answer_of_the_node_is_that_of_the_door(
    store: Path,
    read: Read,
    error: type[KvfsError],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lose_the_data(store)

    def refused(_node: NodeClient, _ino: int) -> bool:
        raise error("it is written elsewhere")

    monkeypatch.setattr(NodeClient, "bring", refused)
    with pytest.raises(error, match="written elsewhere") as raised:
        read(store, "cache/a")
    if read is read_as_object and error is OtherVersion:
        assert isinstance(raised.value, NoSuchKey)
