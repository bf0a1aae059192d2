"""A process is killed at each step; the next start puts the store in order and loses nothing that
was acknowledged."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import trio

from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag
from kvfs.tree import lifecycle, reserved_inodes
from kvfs.tree.inodes import read_inode, write_inode
from tests.contract.small_node import BOOT, SmallNode, small_node
from tests.fault.victim import (
    OTHER_BOOT,
    assert_books_balance,
    problems,
    run_victim,
    start_again,
)

STEPS: Final = {
    "record put off, no data file": """
        node.files.create = die
        node.make(cache, "young")
    """,
    "record committed by another change, no data file": """
        def commit_and_die(*_):
            node.namespace("other")
            die()
        node.files.create = commit_and_die
        node.make(cache, "young")
    """,
    "data file made, not published": """
        ino, fd = node.make(cache, "young")
        os.write(fd, b"x")
        die()
    """,
    "published, not sealed": """
        write(durable, "acknowledged")
        die()
    """,
    "written again after a publish": """
        ino, fd = node.make(durable, "acknowledged")
        os.write(fd, b"x")
        node.publish(ino, fd)
        os.write(fd, b"y")
        die()
    """,
    "sealing: read": """
        write(durable, "acknowledged")
        node.sealer._record = die
        seal()
    """,
    "sealing: described, not synced": """
        write(durable, "acknowledged")
        import kvfs.vfs.seal as sealing
        sealing.file_sync.sync = die
        seal()
    """,
    "sealing: synced, not in the index": """
        write(durable, "acknowledged")
        node.index.store = die
        seal()
    """,
    "sealing: in the index, record not sealed": """
        write(durable, "acknowledged")
        import kvfs.vfs.seal as sealing
        sealing.seal_all = die
        seal()
    """,
    "sealing: record sealed": """
        write(durable, "acknowledged")
        node.sealer._queue.tried = die
        seal()
    """,
    "evicting: names removed": """
        fill()
        node.files.unlink = die
        evict()
    """,
    "evicting: data files unlinked": """
        fill()
        node.index.remove = die
        evict()
    """,
    "evicting: index entries removed": """
        fill()
        import kvfs.node.tasks.eviction.evictor as evictor
        evictor.tree.reap = die
        evict()
    """,
}


@pytest.mark.parametrize("step", STEPS)
def test_a_kill_at_each_step(tmp_path: Path, step: str) -> None:
    run_victim(tmp_path / "store", STEPS[step])
    with small_node(tmp_path / "store") as node:
        start_again(node)
        assert_books_balance(node)
        spaces = {each.name: number for number, each in node.census().namespaces.items()}
        left = node.names(spaces[b"models"])
        assert "kept" in left
        if "acknowledged" in STEPS[step]:
            assert "acknowledged" in left
        assert "young" not in node.names(spaces[b"cache"])
        trio.run(node.sealer.settle)
        assert_books_balance(node)
        assert start_again(node) == {}, "the second start finds nothing"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SmallNode]:
    with small_node(tmp_path / "store") as made:
        yield made


@pytest.mark.parametrize("boot", [BOOT, OTHER_BOOT])
def test_a_new_file_of_an_nfs_client_outlives_a_kill_and_no_power_cut(
    node: SmallNode, boot: int
) -> None:
    """Its making was acknowledged, and the client sends again what it wrote since."""
    cache = node.namespace("cache")
    ino, fd = node.make(cache, "new")

    def reserve(t: Transaction) -> None:
        inode = read_inode(t, ino)
        inode.flags |= Flag.RESERVED
        write_inode(t, ino, inode)

    node.engine.transact_now(reserve)
    os.write(fd, b"x" * 5000)
    node.holders.not_writing(ino)
    node.holders.released(ino)
    start_again(node, boot=boot, restored=boot != BOOT)
    assert node.names(cache) == ({"new"} if boot == BOOT else set())
    assert_books_balance(node)
    assert start_again(node, boot=boot) == {}, "the second start finds nothing"


def test_after_a_clean_stop_there_is_nothing_to_do(node: SmallNode) -> None:
    space = node.namespace("cache")
    node.write(space, "block", b"x")
    trio.run(node.sealer.settle)
    node.store.mark_clean()
    assert start_again(node) == {}


def test_data_of_another_boot_that_were_not_synced_are_dropped(node: SmallNode) -> None:
    space = node.namespace("cache")
    node.write(space, "synced", b"x")
    trio.run(node.sealer.settle)
    node.write(space, "torn?", b"x")
    assert start_again(node, boot=OTHER_BOOT)["unsynced_dropped"] == 1
    assert node.names(space) == {"synced"}
    assert_books_balance(node)


def test_a_file_synced_once_is_kept_though_written_since(node: SmallNode) -> None:
    space = node.namespace("models", kind="durable")
    ino, fd = node.make(space, "database")
    os.write(fd, b"x")
    node.publish(ino, fd, boot=0)
    os.write(fd, b"y")
    start_again(node, boot=OTHER_BOOT)
    assert node.names(space) == {"database"}
    inode = node.record(ino)
    assert inode is not None
    assert inode.size == 2
    node.close(ino, fd)


def test_what_a_killed_sealer_did_to_a_data_file_changes_no_times(node: SmallNode) -> None:
    """It describes the file in it, which takes a block; that the record does not know yet."""
    space = node.namespace("models", kind="durable")
    ino = node.write(space, "whole", b"x" * 15_000)
    path, before = node.files.path(ino, 0), node.record(ino)
    assert before is not None
    while (stat := os.stat(path)).st_ctime_ns <= before.ctime_ns:
        os.chmod(path, 0o600)  # until the filesystem's clock has gone on
    node.engine.transact_now(
        lambda t: lifecycle.publish(
            t,
            ino,
            size=before.size,
            blocks=stat.st_blocks - 8,
            mtime_ns=before.mtime_ns,
            ctime_ns=before.ctime_ns,
            boot=before.boot,
        )
    )
    assert start_again(node)["sizes_refreshed"] == 1
    after = node.record(ino)
    assert after is not None
    assert (after.blocks, after.ctime_ns) == (stat.st_blocks, before.ctime_ns)


def write_unnamed(node: SmallNode, ino: int, content: bytes) -> None:
    """A data file whose record was lost."""
    fd = node.files.create(ino, 0)
    os.write(fd, content)
    os.close(fd)


def test_after_a_power_cut_disk_and_engine_are_compared(node: SmallNode) -> None:
    cache, models = node.namespace("cache"), node.namespace("models", kind="durable")
    lost, whole = node.write(cache, "lost", b"x"), node.write(cache, "whole", b"x")
    damaged = node.write(models, "damaged", b"x")
    trio.run(node.sealer.settle)
    node.index.flush()
    node.files.unlink(lost, 0)
    node.files.unlink(damaged, 0)
    os.close(node.files.create(whole + 100, 0))
    write_unnamed(node, damaged + 100, b"acknowledged")
    write_unnamed(node, whole + 101, b"a miss")
    found = start_again(node, restored=True)
    assert found["data_files_removed"] == 2
    assert found["data_files_quarantined"] == 1
    [kept] = node.files.quarantined()
    assert (kept.ino, Path(kept.path).read_bytes()) == (damaged + 100, b"acknowledged")
    assert found["records_without_data_dropped"] == 1
    assert found["durable_data_missing"] == 1
    assert node.names(cache) == {"whole"}
    assert node.names(models) == {"damaged"}, "acknowledged data are never forgotten in silence"
    assert [text.partition(":")[0] for text in problems(node)] == ["missing_data"]


def test_a_power_cut_is_noticed_by_the_boot_though_the_engine_was_whole(node: SmallNode) -> None:
    space = node.namespace("cache")
    ino = node.write(space, "block", b"x")
    trio.run(node.sealer.settle)
    start_again(node)
    os.close(node.files.create(ino + 100, 0))
    assert start_again(node) == {}, "in the same boot not everything is read"
    assert start_again(node, boot=OTHER_BOOT)["data_files_removed"] == 1


def test_a_seal_whose_sync_a_power_cut_forestalled_is_not_believed(node: SmallNode) -> None:
    """As an earlier version left it, of a file that was synced once, and so is kept: what is on the
    disk may be a mixture."""
    space = node.namespace("models", kind="durable")
    ino, fd = node.make(space, "database")
    node.publish(ino, fd, boot=0)
    os.write(fd, b"x")
    node.publish(ino, fd)
    node.close(ino, fd)
    written = node.record(ino)
    assert written is not None
    written.flags |= Flag.SEALED
    written.checksum = b"of what was in memory"
    node.engine.transact_now(lambda t: write_inode(t, ino, written))
    start_again(node, boot=OTHER_BOOT)
    inode = node.record(ino)
    assert inode is not None
    assert not inode.flags & Flag.SEALED
    trio.run(node.sealer.settle)
    assert problems(node) == []


def test_a_name_reserved_without_a_record_is_released(node: SmallNode) -> None:
    space = node.namespace("cache")
    ino = space << 48 | 500
    node.engine.transact_now(lambda t: t.put(keys.unpublished(ino), b""))
    os.close(node.files.create(ino, 0))
    start_again(node)
    assert list(node.files.scan()) == []
    assert_books_balance(node)


def test_only_a_data_file_makes_a_file_of_a_reserved_number(node: SmallNode) -> None:
    """A process that is killed leaves up to 255 numbers of which it never made a file."""
    space = node.namespace("cache")
    ino = node.engine.transact_now(lambda t: reserved_inodes.reserve(t, space, 200))
    os.close(node.files.create(ino + 3, 0))
    found = start_again(node)
    assert (found["unpublished_dropped"], found["orphans_dropped"]) == (1, 1)
    assert list(node.files.scan()) == []
    assert node.engine.read_now(lambda t: reserved_inodes.reserved(t, 0, 1)) == []
    assert_books_balance(node)
    assert start_again(node) == {}
