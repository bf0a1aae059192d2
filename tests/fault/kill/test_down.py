"""The node is stopped although the disk beneath its store has failed."""

import os
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.disks import Disk, cut, disk
from tests.integration.harness import Node, best_mode, is_mounted, kvfs

MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Disk]:
    with disk(tmp_path, "ext4", 128 * MIB) as made:
        yield made


def test_a_node_on_a_failed_disk_is_stopped(small_disk: Disk) -> None:
    node = Node.make(best_mode())
    (small_disk.mountpoint / "store").mkdir()
    node.store.symlink_to(small_disk.mountpoint / "store")
    try:
        node.up()
        assert node.pid is not None
        watch = os.pidfd_open(node.pid)
        cut(small_disk.mountpoint)
        done = kvfs("down", *node.place())
        assert done.returncode == 0, done.stderr
        assert f"stopped the node on {node.store}" in done.stdout
        assert select.select([watch], [], [], 0)[0]
        os.close(watch)
        assert not is_mounted(node.mount)
        done = kvfs("up", "--daemon", *node.place())
        assert done.returncode == 8, done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        assert f"the disk of the store {node.store} fails" in done.stderr
    finally:
        node.remove()
