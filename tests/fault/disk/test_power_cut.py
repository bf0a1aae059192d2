"""The power goes at each step: what was acknowledged as synced is there, nothing is torn, the books
balance."""

import os
from pathlib import Path
from typing import Final

import pytest
import trio

from kvfs.datastore.checksum import checksum
from tests.contract.small_node import small_node
from tests.fault.disks import disk
from tests.fault.victim import OTHER_BOOT, assert_books_balance, run_victim, start_again

STEPS: Final = {
    "at rest": """
        die()
    """,
    "published": """
        write(durable, "young")
        die()
    """,
    "data on disk, directory perhaps, record not": """
        ino, fd = node.make(durable, "young")
        os.write(fd, b"x" * (1 << 20))
        os.sync()
        node.close(ino, fd)
        die()
    """,
    "record on disk, data not": """
        write(durable, "young")
        trio.run(node.engine.sync)
        die()
    """,
    "sealing: described, not synced": """
        write(durable, "young")
        import kvfs.vfs.seal as sealing
        sealing.file_sync.sync = die
        seal()
    """,
    "sealing: synced, record not sealed": """
        write(durable, "young")
        import kvfs.vfs.seal as sealing
        sealing.seal_all = die
        seal()
    """,
    "sealed and synced": """
        write(durable, "acknowledged")
        seal()
        write(durable, "young")
        die()
    """,
    "a start: what was removed is unlinked, the directories on disk": """
        write(durable, "removed")
        seal()
        from kvfs.meta.records import namespace_root
        from kvfs.tree import tree
        top = namespace_root(durable)
        node.engine.transact_now(lambda t: tree.unlink(t, top, b"removed", 1, lambda _: True))
        def fsync_then_die(*_):
            os.fsync(os.open(mountpoint, os.O_RDONLY))
            for each in os.scandir(node.files.root):
                os.fsync(os.open(each.path, os.O_RDONLY))
            die()
        node.index.remove = fsync_then_die
        from tests.fault.victim import start_again
        start_again(node)
    """,
    "evicting: names removed": """
        fill()
        seal()
        node.files.unlink = die
        evict()
    """,
    "evicting: data files unlinked, the directories on disk": """
        fill()
        seal()
        def fsync_then_die(*_):
            os.fsync(os.open(mountpoint, os.O_RDONLY))
            for each in os.scandir(node.files.root):
                os.fsync(os.open(each.path, os.O_RDONLY))
            die()
        node.index.remove = fsync_then_die
        evict()
    """,
}


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
@pytest.mark.parametrize("step", STEPS)
def test_a_power_cut_at_each_step(tmp_path: Path, kind: str, step: str) -> None:
    with disk(tmp_path, kind) as made:
        run_victim(made.mountpoint / "store", STEPS[step], disk=made.mountpoint)
        made.power_cycle()
        with small_node(made.mountpoint / "store", boot=OTHER_BOOT) as node:
            start_again(node, boot=OTHER_BOOT)
            assert_books_balance(node)
            spaces = {each.name: number for number, each in node.census().namespaces.items()}
            left = node.names(spaces[b"models"])
            assert "kept" in left
            assert "acknowledged" in left or "acknowledged" not in STEPS[step]
            trio.run(node.sealer.settle)
            assert_books_balance(node)
            for ino, version in node.files.scan():
                inode = node.record(ino)
                assert inode is not None
                fd = node.files.open(ino, version, os.O_RDONLY)
                found = checksum(fd, inode.size)
                content = set(os.pread(fd, inode.size, 0))
                os.close(fd)
                assert found is not None
                assert found.combined == inode.checksum
                xs = set(b"x")
                expected = {
                    b"kept": set(b"kept"),
                    b"young": xs,
                    b"acknowledged": xs,
                    b"removed": xs,
                }
                assert content == expected.get(inode.name, {0}), "whole, or not there"
