"""Planted damage of every kind is found, named, and mended."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from kvfs.admin.fsck import Fsck
from kvfs.datastore import index as index_module
from kvfs.datastore.index import Sealed
from kvfs.datastore.quarantine_directory import Reason
from kvfs.meta import inode_ranges, keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag, Inode, Usage, namespace_root, pack, unpack_inode
from kvfs.meta.replica.local_namespaces import LocalNamespaces
from kvfs.tree import lifecycle, namespaces, tree
from kvfs.tree.copies import placements
from tests.contract.small_node import SmallNode, small_node


class Planted:
    """A healthy store with something of everything, to damage."""

    def __init__(self, node: SmallNode) -> None:
        self.node = node
        self.cache = node.namespace("cache")
        self.models = node.namespace("models", kind="durable")
        self.block = node.write(self.cache, "block", os.urandom(5 << 20))
        self.weights = node.write(self.models, "weights", os.urandom(10_000))
        self.directory = self._directory("directory")
        self.linked = node.write(self.models, "linked", b"linked")
        self.change(lambda t: tree.link(t, self.linked, self.directory, b"again", time.time_ns()))
        deep = self._number()
        self.change(lambda t: tree.add(t, self.directory, b"deep", deep, _directory()))
        trio.run(node.sealer.settle)
        node.index.flush()

    def change(self, fn: Callable[[Transaction], object]) -> None:
        self.node.engine.transact_now(fn)

    def edit(self, ino: int, **fields: object) -> None:
        inode = self.node.record(ino)
        assert inode is not None
        for name, value in fields.items():
            setattr(inode, name, value)
        self.change(lambda t: t.put(keys.inode(ino), pack(inode)))

    def check(self, *, checksums: bool = False) -> list[str]:
        fsck = Fsck(self.node.engine, self.node.files, self.node.index, checksums=checksums)
        return [problem.kind for problem in fsck.check()]

    def repair(self, *, checksums: bool = False) -> None:
        fsck = Fsck(self.node.engine, self.node.files, self.node.index, checksums=checksums)
        assert list(fsck.repair())

    def _number(self) -> int:
        return self.node.engine.transact_now(
            lambda t: namespaces.allocate_inodes(t, self.models, 1)
        )

    def _directory(self, name: str) -> int:
        ino = self._number()
        root = namespace_root(self.models)
        self.change(lambda t: tree.add(t, root, name.encode(), ino, _directory()))
        return ino


def _directory() -> Inode:
    return Inode(
        mode=0o40755,
        uid=0,
        gid=0,
        nlink=2,
        atime_ns=1,
        mtime_ns=1,
        ctime_ns=1,
        parent=0,
        name=b"",
    )


@pytest.fixture
def planted(tmp_path: Path) -> Iterator[Planted]:
    with small_node(tmp_path / "store") as node:
        yield Planted(node)


def test_a_healthy_store_has_no_problem(planted: Planted) -> None:
    assert planted.check(checksums=True) == []


def test_a_new_store_has_no_problem(tmp_path: Path) -> None:
    with small_node(tmp_path / "store") as node:
        assert list(Fsck(node.engine, node.files, node.index).check()) == []


def leaked_data(p: Planted) -> None:
    os.close(p.node.files.create(p.block + 500, 0))


def old_version(p: Planted) -> None:
    os.close(p.node.files.create(p.block, 7))


def missing_data(p: Planted) -> None:
    p.node.files.unlink(p.weights, 0)


def wrong_size(p: Planted) -> None:
    os.truncate(p.node.files.path(p.block, 0), 3)


def dangling_entry(p: Planted) -> None:
    key = keys.file_entry(p.directory, b"ghost")
    p.change(lambda t: t.put(key, keys.pack_u64(p.block + 500)))


def entry_of_a_missing_directory(p: Planted) -> None:
    key = keys.file_entry(p.directory + 900, b"lost")
    p.change(lambda t: t.put(key, keys.pack_u64(p.block)))


def entry_its_inode_does_not_know(p: Planted) -> None:
    key = keys.file_entry(p.directory, b"alias")
    p.change(lambda t: t.put(key, keys.pack_u64(p.block)))


def unreachable_inode(p: Planted) -> None:
    p.change(lambda t: t.delete(keys.file_entry(namespace_root(p.models), b"weights")))


def unreachable_with_another_name(p: Planted) -> None:
    p.change(lambda t: t.delete(keys.file_entry(p.directory, b"again")))
    p.edit(p.linked, parent=p.directory, name=b"again")


def unreachable_with_its_name_taken(p: Planted) -> None:
    key = keys.file_entry(namespace_root(p.models), b"weights")
    p.change(lambda t: t.put(key, keys.pack_u64(p.linked)))


def wrong_link_count(p: Planted) -> None:
    p.edit(p.linked, nlink=5)


def wrong_directory_count(p: Planted) -> None:
    p.edit(p.directory, nlink=9)


def wrong_unsealed_list(p: Planted) -> None:
    p.change(lambda t: t.put(keys.unsealed(p.directory), b""))


def unsealed_but_not_listed(p: Planted) -> None:
    p.edit(p.block, flags=int(Flag.PUBLISHED))


def wrong_orphan_list(p: Planted) -> None:
    p.change(lambda t: t.put(keys.orphan(p.weights), b""))


def wrong_unpublished_list(p: Planted) -> None:
    p.change(lambda t: t.put(keys.unpublished(p.weights), b""))


def stray_attribute(p: Planted) -> None:
    p.change(lambda t: t.put(keys.xattr(p.block + 500, b"user.x"), b"value"))


def stray_backlink(p: Planted) -> None:
    p.change(lambda t: t.put(keys.backlink(p.block, p.directory, b"x"), b""))


def wrong_usage(p: Planted) -> None:
    p.change(lambda t: t.put(keys.usage(p.cache), pack(Usage(bytes=1, inodes=2))))


def stray_index_entry(p: Planted) -> None:
    p.node.index.store([Sealed(p.block + 500, 0, b"", 0)])


def missing_index_entry(p: Planted) -> None:
    p.node.index.remove([p.block])


def wrong_index_order(p: Planted) -> None:
    table = p.node.engine.database(index_module.NAME)
    table.transact_now(lambda t: t.put(index_module._order_key(p.block, 5), b""))


def no_index_order(p: Planted) -> None:
    table = p.node.engine.database(index_module.NAME)
    entry = p.node.index.get(p.block)
    assert entry is not None
    table.transact_now(lambda t: t.delete(index_module._order_key(p.block, entry.clock)))


@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        (leaked_data, "leaked_data"),
        (old_version, "leaked_data"),
        (missing_data, "missing_data"),
        (wrong_size, "wrong_size"),
        (dangling_entry, "dangling_entry"),
        (entry_of_a_missing_directory, "dangling_entry"),
        (entry_its_inode_does_not_know, "dangling_entry"),
        (unreachable_inode, "unreachable_inode"),
        (unreachable_with_another_name, "unreachable_inode"),
        (unreachable_with_its_name_taken, "unreachable_inode"),
        (wrong_link_count, "wrong_link_count"),
        (wrong_directory_count, "wrong_link_count"),
        (wrong_unsealed_list, "wrong_list"),
        (unsealed_but_not_listed, "wrong_list"),
        (wrong_orphan_list, "wrong_list"),
        (wrong_unpublished_list, "wrong_list"),
        (stray_attribute, "wrong_list"),
        (stray_backlink, "wrong_list"),
        (wrong_usage, "wrong_usage"),
        (stray_index_entry, "stray_index_entry"),
        (missing_index_entry, "missing_index_entry"),
        (wrong_index_order, "wrong_index_order"),
        (no_index_order, "wrong_index_order"),
    ],
)
def test_damage_is_found_and_mended(
    planted: Planted, plant: Callable[[Planted], None], kind: str
) -> None:
    plant(planted)
    assert kind in planted.check()
    planted.repair()
    assert planted.check() == []


def test_a_durable_data_file_without_a_record_is_kept(planted: Planted) -> None:
    """Described or not; one of a cache goes, and so does one that is a second name."""
    p = planted
    named, unsealed = p.models << 48 | 900, p.models << 48 | 901
    os.close(p.node.files.create(named, 0))
    shutil.copyfile(p.node.files.path(p.weights, 0), p.node.files.path(named, 0))
    for ino in (unsealed, p.block + 500):
        fd = p.node.files.create(ino, 0)
        os.write(fd, b"not closed yet")
        os.close(fd)
    p.node.files.add_version(p.weights, 0, 7)
    p.repair()
    assert p.check() == []
    kept = {each.ino: each for each in p.node.files.quarantined()}
    assert set(kept) == {named, unsealed}
    assert {each.reason for each in kept.values()} == {Reason.UNNAMED}
    assert Path(kept[unsealed].path).read_bytes() == b"not closed yet"


def test_every_problem_says_what_and_where(planted: Planted) -> None:
    wrong_usage(planted)
    missing_data(planted)
    fsck = Fsck(planted.node.engine, planted.node.files, planted.node.index)
    texts = sorted(str(problem) for problem in fsck.check())
    assert texts[0].startswith(f"missing_data: /models/weights (inode {planted.weights:#x}): ")
    assert texts[1].startswith("wrong_usage: namespace cache: ")


def test_a_foreign_file_is_reported_and_left(planted: Planted) -> None:
    path = Path(planted.node.files.root, "notes.txt")
    path.write_text("not of KVFS")
    assert planted.check() == ["foreign_file"]
    assert list(Fsck(planted.node.engine, planted.node.files, planted.node.index).repair()) == []
    assert path.exists()


def corrupt(path: str, offset: int) -> None:
    stat = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_rot_is_found_by_reading_and_located(planted: Planted) -> None:
    corrupt(planted.node.files.path(planted.block, 0), (4 << 20) + 17)
    assert planted.check() == []
    fsck = Fsck(planted.node.engine, planted.node.files, planted.node.index, checksums=True)
    problems = list(fsck.check())
    assert [problem.kind for problem in problems] == ["wrong_checksum"]
    assert "number 1" in problems[0].detail


def test_a_rotten_cache_file_goes_and_a_durable_one_is_kept_apart(planted: Planted) -> None:
    node = planted.node
    corrupt(node.files.path(planted.block, 0), 0)
    corrupt(node.files.path(planted.weights, 0), 0)
    os.truncate(node.files.path(planted.linked, 0), 3)
    planted.repair(checksums=True)
    assert planted.check(checksums=True) == ["quarantined_data"] * 2
    assert node.names(planted.cache) == set()
    assert {"weights", "linked"} <= node.names(planted.models)
    kept = list(node.files.quarantined())
    assert {each.ino for each in kept} == {planted.weights, planted.linked}
    assert {each.reason for each in kept} == {Reason.DAMAGED}
    for ino in (planted.weights, planted.linked):
        with pytest.raises(FileNotFoundError):
            node.files.stat(ino, 0)


def test_a_lost_name_comes_back_under_its_namespace(planted: Planted) -> None:
    unreachable_with_its_name_taken(planted)
    planted.repair()
    assert f"lost+found-{planted.weights:x}" in planted.node.names(planted.models)


def test_what_a_kill_leaves_for_the_next_start_is_no_problem(planted: Planted) -> None:
    young, fd = planted.node.make(planted.cache, "young")
    os.close(fd)
    planted.node.holders.not_writing(young)
    value = planted.node.engine.read_now(lambda t: t.get(keys.inode(young)))
    assert value is not None
    assert not unpack_inode(value).flags & Flag.PUBLISHED
    planted.change(lambda t: lifecycle.evict(t, planted.block, 1))
    assert planted.check() == []


def test_what_is_wrong_is_named_by_its_path(planted: Planted) -> None:
    inner = planted.node.write(planted.cache, "n\xf6\nt", b"x")
    trio.run(planted.node.sealer.settle)
    planted.node.files.unlink(inner, 0)
    planted.edit(planted.directory, nlink=7)
    lost = keys.file_entry(planted.directory, b"lost\xff")
    planted.change(lambda t: t.put(lost, keys.pack_u64(99)))
    fsck = Fsck(planted.node.engine, planted.node.files, planted.node.index)
    assert {(problem.kind, problem.subject) for problem in fsck.check()} == {
        ("wrong_link_count", f"/models/directory (inode {planted.directory:#x})"),
        ("dangling_entry", "/models/directory/lost\\xff"),
        ("missing_data", f"/cache/n\xf6\\nt (inode {inner:#x})"),
    }


def test_a_path_that_cannot_be_followed_is_told_as_far_as_it_goes(planted: Planted) -> None:
    planted.change(lambda t: t.delete(keys.inode(planted.directory)))
    fsck = Fsck(planted.node.engine, planted.node.files, planted.node.index)
    subjects = {problem.subject for problem in fsck.check()}
    assert {"/models/directory", ".../deep", ".../again"} <= subjects


def test_of_a_member_of_a_cluster_its_own_data_files_are_checked(planted: Planted) -> None:
    p = planted
    p.node.engine.node = keys.pack_node(1)
    elsewhere = p.node.write(p.models, "elsewhere", b"on another node")
    held = p.node.write(p.models, "held", b"here")
    p.node.files.unlink(elsewhere, 0)
    p.change(lambda t: placements.let_go(t, elsewhere, t.node))
    assert p.check() == []
    p.node.files.unlink(held, 0)
    os.close(p.node.files.create(held + 100, 0))
    assert sorted(p.check()) == ["leaked_data", "missing_data"]
    p.repair()
    assert p.check() == ["missing_data"]


def test_of_a_member_the_records_that_no_engine_has_are_checked_and_mended(
    planted: Planted,
) -> None:
    p = planted
    p.node.engine.node = keys.pack_node(1)
    peer = p.node.engine.transact_now(
        lambda t: namespaces.create(t, b"peer", kind="cache", coherence="peer", uid=0, gid=0, now=1)
    )
    own = LocalNamespaces(p.node.engine)
    p.change(own.note_all)
    p.change(lambda t: inode_ranges.add(t, peer, namespace_root(peer) + 1))
    names = {name: p.node.write(peer, name, b"here") for name in ("kept", "nameless", "listed")}
    shared = p.node.write(p.models, "shared", b"here")
    trio.run(p.node.sealer.settle)
    p.node.index.flush()
    assert p.check() == []
    root = namespace_root(peer)
    p.change(lambda t: t.delete(keys.file_entry(root, b"nameless")))
    p.change(lambda t: t.put(keys.file_entry(root, b"nothing"), keys.pack_u64(names["kept"] + 99)))
    p.change(lambda t: t.put(keys.unpublished(names["listed"]), b""))
    p.change(lambda t: t.put(keys.usage(peer), pack(Usage(bytes=1, inodes=1))))
    p.change(lambda t: t.delete(keys.file_entry(namespace_root(p.models), b"shared")))
    wrong = ["dangling_entry", "unreachable_inode", "wrong_list", "wrong_usage"]
    assert sorted(p.check()) == wrong, "what the engine has is left to it"
    p.repair()
    assert p.check() == []
    for name, ino in names.items():
        entry = keys.file_entry(root, name.encode())
        assert p.node.engine.read_now(lambda t, entry=entry: t.get(entry)) == keys.pack_u64(ino)
    assert p.node.record(shared) is not None
