"""A rename over a durable file: what replaces it is on disk first, whichever door renames."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfs
from kvfs.base.errors import Conflict, Stale
from kvfs.client.name_operations import NameOperations
from kvfs.meta.records import namespace_root
from kvfs.tree import tree
from kvfs.tree.lifecycle import Unsettled
from kvfs.tree.published_view import FoundInode
from kvfs.tree.tree import Removed
from kvfs.vfs.names.settled_move import settled_rename
from tests.contract import client_store
from tests.contract.small_node import SmallNode, small_node


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SmallNode]:
    with small_node(tmp_path / "store") as node:
        yield node


def renamed(node: SmallNode, space: int, settled: int = 0) -> Removed | Unsettled | None:
    root = namespace_root(space)
    return node.engine.transact_now(
        lambda t: settled_rename(
            *(t, (root, b"new"), (root, b"old")),
            flags=0,
            now=1,
            keep=lambda _: True,
            settled=settled,
        )
    )


def names(node: SmallNode, space: int) -> dict[bytes, int]:
    root = namespace_root(space)
    found = node.engine.read_now(lambda t: tree.list_children(t, root, b"", 10))
    return {each.name: each.ino for each in found}


def test_a_file_that_may_not_be_on_disk_is_named_and_nothing_changed(node: SmallNode) -> None:
    space = node.namespace("durable", "durable")
    old, new = (node.write(space, name, b"data") for name in ("old", "new"))
    found = renamed(node, space)
    assert isinstance(found, Unsettled)
    assert found.ino == new
    assert names(node, space) == {b"old": old, b"new": new}


def test_once_it_is_on_disk_it_is_moved(node: SmallNode) -> None:
    space = node.namespace("durable", "durable")
    old, new = (node.write(space, name, b"data") for name in ("old", "new"))
    found = renamed(node, space, settled=new)
    assert isinstance(found, Removed)
    assert found.ino == old
    assert names(node, space) == {b"old": new}


def test_another_file_that_took_the_name_meanwhile_is_not_moved(node: SmallNode) -> None:
    space = node.namespace("durable", "durable")
    old, new = (node.write(space, name, b"data") for name in ("old", "new"))
    with pytest.raises(Stale):
        renamed(node, space, settled=old)
    assert names(node, space) == {b"old": old, b"new": new}


def test_in_a_cache_nothing_is_waited_for(node: SmallNode) -> None:
    space = node.namespace("of-cache")
    old, _ = (node.write(space, name, b"data") for name in ("old", "new"))
    found = renamed(node, space)
    assert isinstance(found, Removed)
    assert found.ino == old


def test_a_client_puts_on_disk_what_it_moves_though_others_replace_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = client_store.make(tmp_path / "store")
    synced: list[int] = []
    sync = NameOperations._sync
    with kvfs.Client(root) as client:
        client.put("/models/old", b"old")
        client.put("/models/new", b"new")

        def sync_late(names: NameOperations, found: FoundInode) -> None:
            sync(names, found)
            synced.append(found.ino)
            if len(synced) == 1:
                client.put("/models/new", b"newest")

        monkeypatch.setattr(NameOperations, "_sync", sync_late)
        client.rename("/models/new", "/models/old")
        assert len(set(synced)) == 2
        assert client.stat("/models/old").ino == synced[1]
        assert bytes(client.get("/models/old")) == b"newest"


def test_a_client_does_not_wait_forever_for_a_name_that_others_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = client_store.make(tmp_path / "store")
    with kvfs.Client(root) as client:
        client.put("/models/old", b"old")
        client.put("/models/new", b"new")

        def replaced(_names: NameOperations, _found: FoundInode) -> None:
            client.put("/models/new", b"newest")

        monkeypatch.setattr(NameOperations, "_sync", replaced)
        with pytest.raises(Conflict, match="try again"):
            client.rename("/models/new", "/models/old")
        assert bytes(client.get("/models/old")) == b"old"
