"""Keys that no POSIX name can be, as every mode of the mount shows them, beside their objects."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs.objects.object_store import ObjectStore
from tests.integration.harness import Node
from tests.integration.posix import refused

B = b"odd"


@pytest.fixture
def node(new_node: Callable[..., Node]) -> Node:
    return new_node()


@pytest.fixture
def store(node: Node) -> Iterator[ObjectStore]:
    opened = ObjectStore(node.store)
    opened.buckets.create(B)
    yield opened
    opened.close()


@pytest.fixture
def top(node: Node) -> Path:
    return node.mount / "odd"


def put(store: ObjectStore, key: bytes, data: bytes, versioning: str = "") -> None:
    draft = store.begin(B, key, len(data))
    os.pwrite(draft.fd, data, 0)
    store.commit(draft, "tag", {"content-type": "text/plain", "meta.a": "b"}, versioning=versioning)


def keys(store: ObjectStore) -> list[bytes]:
    return [each.key for each in store.list_objects(B).objects]


def test_an_object_is_on_the_mount_when_it_is_put(store: ObjectStore, top: Path) -> None:
    path = top / "d" / "k"
    assert not path.exists()
    put(store, b"d/k", b"one")
    assert path.read_bytes() == b"one"
    put(store, b"d/k", b"three")
    assert path.read_bytes() == b"three"
    assert path.stat().st_mode & 0o777 == 0o644
    assert os.getxattr(path, "user.s3.content-type") == b"text/plain"
    assert os.getxattr(path, "user.s3.meta.a") == b"b"
    store.delete(B, b"d/k")
    assert not path.exists()
    assert not (top / "d").exists()


def test_a_file_of_the_mount_is_an_object(store: ObjectStore, top: Path) -> None:
    (top / "made").mkdir()
    assert keys(store) == []
    assert store.list_objects(B, delimiter=b"/").prefixes == []
    (top / "made" / "f").write_bytes(b"1")
    assert keys(store) == [b"made/f"]
    assert store.list_objects(B, delimiter=b"/").prefixes == [b"made/"]
    (top / "made" / "f").rename(top / "g")
    assert keys(store) == [b"g"]
    store.delete(B, b"g")
    assert sorted(os.listdir(top)) == ["made"]


def test_segments_that_are_no_names(store: ObjectStore, top: Path) -> None:
    long = b"n" * 300
    longest = b"m" * 600
    every = [b"a//b", b"./x", b"../y", b"a/../z", long, longest, longest[:500] + b"/c"]
    for key in every:
        put(store, key, key)
    assert sorted(os.listdir(top))[:3] == ["%2E", "%2E%2E", "a"]
    assert (top / "a" / "%" / "b").read_bytes() == b"a//b"
    assert (top / "%2E" / "x").read_bytes() == b"./x"
    assert (top / "%2E%2E" / "y").read_bytes() == b"../y"
    assert (top / "a" / "%2E%2E" / "z").read_bytes() == b"a/../z"
    (shown,) = [name for name in os.listdir(top) if name.startswith("n")]
    assert len(shown) == 217
    assert (top / shown).read_bytes() == long
    (above,) = [name for name in os.listdir(top) if name.startswith("m")]
    inside = sorted(os.listdir(top / above))
    assert inside == ["m" * 20, "m" * 120]
    assert (top / above / inside[0] / "c").read_bytes() == longest[:500] + b"/c"
    (top / "a" / "%" / "b").unlink()
    (top / shown).unlink()
    assert b"a//b" not in keys(store)
    assert long not in keys(store)
    (top / "a" / "%").rmdir()
    assert sorted(os.listdir(top / "a")) == ["%2E%2E"]


def test_a_file_and_a_directory_of_one_name(store: ObjectStore, top: Path) -> None:
    put(store, b"a/b", b"below")
    assert os.listdir(top) == ["a"]
    put(store, b"a", b"beside")
    assert sorted(os.listdir(top)) == ["a", "a%"]
    assert (top / "a").read_bytes() == b"beside"
    assert (top / "a%" / "b").read_bytes() == b"below"
    (top / "a").unlink()
    assert os.listdir(top) == ["a"]
    assert (top / "a" / "b").read_bytes() == b"below"
    put(store, b"a", b"again")
    assert (top / "a").read_bytes() == b"again"
    store.delete(B, b"a")
    assert (top / "a" / "b").read_bytes() == b"below"
    put(store, b"a", b"again")
    (top / "a%" / "b").unlink()
    (top / "a%").rmdir()
    assert keys(store) == [b"a"]


def test_an_ordinary_name_of_that_spelling_wins(store: ObjectStore, top: Path) -> None:
    put(store, b"a", b"file")
    put(store, b"a/b", b"below")
    assert (top / "a%").is_dir()
    put(store, b"a%", b"ordinary")
    assert sorted(os.listdir(top)) == ["a", "a%"]
    assert (top / "a%").read_bytes() == b"ordinary"
    store.delete(B, b"a%")
    assert (top / "a%" / "b").read_bytes() == b"below"


def test_the_marker_of_a_directory(store: ObjectStore, top: Path) -> None:
    put(store, b"d/", b"")
    assert os.listdir(top / "d") == []
    assert keys(store) == [b"d/"]
    (top / "d").rmdir()
    assert keys(store) == []
    put(store, b"d/", b"content")
    assert os.listdir(top / "d") == ["%"]
    assert (top / "d" / "%").read_bytes() == b"content"
    put(store, b"d//x", b"")
    assert sorted(os.listdir(top / "d")) == ["%", "%%"]
    assert (top / "d" / "%%").read_bytes() == b"content"
    assert (top / "d" / "%" / "x").exists()


def test_versions_and_uploads_are_hidden(store: ObjectStore, top: Path) -> None:
    put(store, b"d/k", b"1", "Enabled")
    put(store, b"d/k", b"2", "Enabled")
    upload = store.uploads.create(B, b"d/u", {})
    assert os.listdir(top) == ["d"]
    assert os.listdir(top / "d") == ["k"]
    (top / "d" / "k").unlink()
    assert os.listdir(top / "d") == []
    with refused(errno.ENOTEMPTY):
        (top / "d").rmdir()
    store.uploads.abort(B, b"d/u", upload.id)


def test_a_directory_that_is_listed_in_small_steps(store: ObjectStore, top: Path) -> None:
    for number in range(600):
        put(store, b"d/%04d" % number, b"")
    put(store, b"d/", b"content")
    put(store, b"d//x", b"")
    names = os.listdir(top / "d")
    assert len(names) == len(set(names)) == 602
