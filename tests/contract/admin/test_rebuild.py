"""Metadata made anew from data files that describe themselves."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from kvfs.admin import rebuild
from kvfs.admin.fsck import Fsck
from kvfs.datastore.files import DataFiles, describe, description
from kvfs.datastore.index import NAME, Index
from kvfs.meta import keys
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.records import Inode, namespace_root
from kvfs.node.tasks.scrubber import Scrubber
from kvfs.tree import namespaces, tree
from kvfs.tree.inodes import get_xattr, set_xattr
from kvfs.tree.rebuilt_records import DirectoryOwner
from tests.contract.small_node import SmallNode, small_node

OWNER = DirectoryOwner(0, 0, 1_700_000_000_000_000_000)


class Rebuilt:
    """A store whose metadata were lost and made again."""

    def __init__(self, root: Path) -> None:
        shutil.rmtree(root / "meta")
        (root / "meta").mkdir()
        self.engine = EmbeddedEngine(root / "meta")
        self.files = DataFiles(root / "data")
        self.index = Index(self.engine.database(NAME))
        self.counts: dict[str, int] = {}

    def run(self) -> None:
        self.engine.transact_now(lambda t: rebuild.begin(t, OWNER))
        again = rebuild.Rebuild(self.engine, self.files, self.index, OWNER)
        self.counts = again.run(lambda _: None)
        self.engine.transact_now(rebuild.finish)

    def problems(self) -> list[str]:
        return [str(each) for each in Fsck(self.engine, self.files, self.index).check()]

    def find(self, path: str) -> tuple[int, Inode]:
        return self.engine.read_now(lambda t: tree.resolve(t, path.encode()))

    def read(self, path: str) -> bytes:
        ino, inode = self.find(path)
        fd = self.files.open(ino, inode.version, os.O_RDONLY)
        with os.fdopen(fd, "rb") as file:
            return file.read()

    def names(self, path: str) -> list[str]:
        parent, _ = self.find(path)
        children = self.engine.read_now(lambda t: tree.list_children(t, parent, b"", 1000))
        return [each.name.decode() for each in children]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SmallNode]:
    with small_node(tmp_path / "store") as made:
        yield made


def settle(node: SmallNode) -> None:
    trio.run(node.sealer.settle)


def lose(node: SmallNode) -> Rebuilt:
    """The metadata have gone."""
    node.stop()
    return Rebuilt(node.store.root)


def lose_and_rebuild(node: SmallNode) -> Rebuilt:
    rebuilt = lose(node)
    rebuilt.run()
    return rebuilt


def directory(node: SmallNode, space: int, name: str) -> int:
    """A directory in a namespace; its inode number."""
    ino = node.engine.transact_now(lambda t: namespaces.allocate_inodes(t, space, 1))
    now = OWNER.now
    inode = Inode(
        mode=0o40750,
        uid=0,
        gid=0,
        nlink=0,
        atime_ns=now,
        mtime_ns=now,
        ctime_ns=now,
        parent=0,
        name=b"",
    )
    parent = namespace_root(space)
    node.engine.transact_now(lambda t: tree.add(t, parent, name.encode(), ino, inode))
    return ino


def test_names_content_and_attributes_come_back(node: SmallNode) -> None:
    kept, cache = node.namespace("kept", kind="durable"), node.namespace("fast")
    top = directory(node, kept, "d")
    ino = node.write(kept, "a", b"first" * 1000)
    node.write(cache, "b", b"second")
    now = OWNER.now
    node.engine.transact_now(lambda t: tree.link(t, ino, top, b"linked", now))
    node.engine.transact_now(lambda t: set_xattr(t, ino, b"user.s3.x", b"y", 0, now))
    settle(node)
    before = node.record(ino)
    rebuilt = lose_and_rebuild(node)
    assert rebuilt.read("/kept/a") == rebuilt.read("/kept/d/linked") == b"first" * 1000
    assert rebuilt.read("/fast/b") == b"second"
    again, inode = rebuilt.find("/kept/a")
    assert before is not None
    assert (again, inode.nlink, inode.checksum) == (ino, 2, before.checksum)
    assert (inode.mode, inode.mtime_ns, inode.size) == (before.mode, before.mtime_ns, 5000)
    assert rebuilt.engine.read_now(lambda t: get_xattr(t, ino, b"user.s3.x")) == b"y"
    listed = rebuilt.engine.read_now(namespaces.list_all)
    assert {each.namespace.name: each.namespace.kind for each in listed} == {
        b"kept": "durable",
        b"fast": "cache",
    }
    assert [each.id for each in listed] == [cache, kept]
    assert rebuilt.problems() == []


def test_numbers_that_were_used_are_not_given_out_again(node: SmallNode) -> None:
    space = node.namespace("kept", kind="durable")
    inos = [node.write(space, name, b"x") for name in "abc"]
    settle(node)
    rebuilt = lose_and_rebuild(node)
    assert rebuilt.engine.transact_now(lambda t: namespaces.allocate_inodes(t, space, 1)) > max(
        inos
    )
    other = rebuilt.engine.transact_now(
        lambda t: namespaces.create(t, b"new", uid=0, gid=0, now=OWNER.now)
    )
    assert other > space


def test_what_was_never_sealed_is_kept_where_it_is_durable(node: SmallNode) -> None:
    kept, cache = node.namespace("kept", kind="durable"), node.namespace("fast")
    node.write(kept, "sealed", b"s")
    node.write(cache, "sealed", b"s")
    settle(node)
    ino = node.write(kept, "not", b"not sealed")
    gone = node.write(cache, "neither", b"neither")
    empty, fd = node.make(kept, "made")
    os.close(fd)
    rebuilt = lose_and_rebuild(node)
    assert rebuilt.names("/kept") == [f"lost+found-{ino:x}", "sealed"]
    assert rebuilt.read(f"/kept/lost+found-{ino:x}") == b"not sealed"
    assert rebuilt.names("/fast") == ["sealed"]
    for each in (gone, empty):
        with pytest.raises(FileNotFoundError):
            rebuilt.files.stat(each, 0)
    assert rebuilt.problems() == []


def test_a_namespace_that_nothing_is_known_of_is_durable(node: SmallNode) -> None:
    space = node.namespace("fast")
    ino = node.write(space, "a", b"a")
    rebuilt = lose_and_rebuild(node)
    assert rebuilt.read(f"/lost-{space}/lost+found-{ino:x}") == b"a"


def test_of_two_that_had_one_name_the_one_described_last_has_it(node: SmallNode) -> None:
    space = node.namespace("kept", kind="durable")
    old, new = node.write(space, "a", b"old"), node.write(space, "b", b"new")
    settle(node)
    for ino, when in ((new, 2), (old, 1)):
        fd = node.files.open(ino, 0, os.O_RDWR)
        said = description(fd)
        assert said is not None
        changed = type(said)(**{**_fields(said), "path": b"/kept/a", "described_ns": when})
        describe(fd, changed)
        os.close(fd)
    rebuilt = lose_and_rebuild(node)
    assert rebuilt.read("/kept/a") == b"new"
    assert rebuilt.read(f"/kept/lost+found-{old:x}") == b"old"
    assert rebuilt.problems() == []


def _fields(said: object) -> dict[str, Any]:
    return {name: getattr(said, name) for name in said.__struct_fields__}  # type: ignore[attr-defined]


def test_the_scrubber_has_a_renamed_file_say_its_new_name(node: SmallNode) -> None:
    space = node.namespace("kept", kind="durable")
    node.write(space, "a", b"a")
    long = node.write(space, "b", b"b")
    settle(node)
    top, now = namespace_root(space), OWNER.now
    node.engine.transact_now(lambda t: set_xattr(t, long, b"user.big", bytes(8000), 0, now))
    node.engine.transact_now(
        lambda t: tree.rename(t, top, b"a", top, b"new", now=now, keep=lambda _: False)
    )

    async def nothing(ino: int, _inode: Inode) -> None:
        raise AssertionError(ino)

    scrubber = Scrubber(node.engine, node.files, node.index, nothing, 0)
    trio.run(scrubber.scrub)
    written = os.stat(node.files.path(long, 0)).st_ctime_ns
    trio.run(scrubber.scrub)
    assert os.stat(node.files.path(long, 0)).st_ctime_ns == written, "described once"
    rebuilt = lose_and_rebuild(node)
    assert rebuilt.names("/kept") == ["b", "new"]


def test_what_is_damaged_gets_no_name_and_what_was_written_since_counts_as_it_is(
    node: SmallNode,
) -> None:
    kept, cache = node.namespace("kept", kind="durable"), node.namespace("fast")
    bad, written = node.write(kept, "bad", b"12345"), node.write(kept, "written", b"12345")
    rotten = node.write(cache, "rotten", b"12345")
    node.write(cache, "whole", b"12345")
    settle(node)
    for ino in (bad, rotten):
        path = node.files.path(ino, 0)
        times = os.stat(path)
        with open(path, "r+b") as file:
            file.write(b"x")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with open(node.files.path(written, 0), "ab") as file:
        file.write(b"678")
    rebuilt = lose_and_rebuild(node)
    assert rebuilt.names("/kept") == ["written"]
    assert rebuilt.read("/kept/written") == b"12345678"
    assert rebuilt.names("/fast") == ["whole"]
    [left] = rebuilt.files.quarantined()
    assert Path(left.path).read_bytes() == b"x2345"
    assert rebuilt.counts["damaged"] == 2
    assert rebuilt.problems() == []


def test_cut_short_it_is_done_again_with_the_same_result(
    node: SmallNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = node.namespace("kept", kind="durable")
    for number in range(100):
        node.write(space, f"{number:03}", b"%d" % number)
    settle(node)
    rebuilt = lose(node)
    with monkeypatch.context() as cut:
        cut.setattr(rebuild, "_BATCH", 10)
        store, seen = rebuilt.index.store, []

        def failing(sealed: object) -> None:
            seen.append(1)
            if len(seen) == 4:
                raise OSError("the disk fails")
            store(sealed)  # type: ignore[arg-type]

        cut.setattr(rebuilt.index, "store", failing)
        with pytest.raises(OSError, match="the disk fails"):
            rebuilt.run()
    assert rebuilt.engine.read_now(lambda t: t.get(keys.VERSION)) is None
    rebuilt.run()
    assert rebuilt.names("/kept") == [f"{number:03}" for number in range(100)]
    assert rebuilt.problems() == []
    usage = rebuilt.engine.read_now(lambda t: namespaces.usage(t, space))
    assert usage.inodes == 100


def test_more_than_a_description_holds_is_left_out_and_the_rest_stays(node: SmallNode) -> None:
    space = node.namespace("kept", kind="durable")
    ino = node.write(space, "a", b"a")
    now = OWNER.now
    node.engine.transact_now(lambda t: set_xattr(t, ino, b"user.big", bytes(8000), 0, now))
    top = namespace_root(space)
    names = [b"%03d" % number + b"n" * 240 for number in range(20)]
    node.engine.transact_now(lambda t: [tree.link(t, ino, top, name, now) for name in names])
    settle(node)
    rebuilt = lose_and_rebuild(node)
    assert len(rebuilt.names("/kept")) == 1
    assert rebuilt.problems() == []


def test_a_link_in_place_of_a_data_file_is_left_out_and_the_rest_comes_back(
    node: SmallNode, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = node.namespace("kept", kind="durable")
    node.write(kept, "a", b"first")
    other = node.write(kept, "b", b"second")
    settle(node)
    data = Path(node.files.path(other, 0))
    rebuilt = lose(node)
    (tmp_path / "secret").write_bytes(b"root's alone")
    data.unlink()
    data.symlink_to(tmp_path / "secret")
    rebuilt.run()
    assert rebuilt.read("/kept/a") == b"first"
    assert rebuilt.names("/kept") == ["a"]
    assert f"{data} is left out" in caplog.text
