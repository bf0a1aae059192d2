"""The node is stopped although the disk beneath its store has failed, or it can open nothing."""

import os
import resource
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.disks import Disk, cut, disk
from tests.integration.harness import Node, best_mode, is_mounted, kvfs, watchdog_of

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


def test_a_path_below_a_dead_mount_is_refused_with_the_remedy(tmp_path: Path) -> None:
    node = Node.make(best_mode())
    try:
        node.up()
        assert node.pid is not None
        os.kill(watchdog_of(node.pid), signal.SIGKILL)  # which would remove what it is to find
        node.kill()
        remedy = f"`umount -l {node.mount}`"
        below = str(node.mount / "cache")
        for place in (
            ("--store", str(tmp_path / "store"), "--mount", below),
            ("--store", str(tmp_path / "store"), "--tier", f"ssd={below}:1GiB", "--no-mount"),
        ):
            done = kvfs("up", "--daemon", *place)
            assert done.returncode == 7, done.stderr
            assert remedy in done.stderr
        assert remedy in kvfs("status", "--store", below).stderr
        node.up()  # a dead mount of its own is removed
        assert os.listdir(node.mount)
    finally:
        node.remove()


def test_a_node_without_a_descriptor_for_its_caller_is_stopped() -> None:
    node = Node.make(best_mode())
    try:
        node.up()
        assert node.pid is not None
        _, hard = resource.prlimit(node.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (3, hard))
        done = kvfs("down", *node.place(), "--timeout", "60")
        assert done.returncode == 0, done.stderr
        assert f"stopped the node on {node.store}" in done.stdout
        assert not is_mounted(node.mount)
        node.pid = None
    finally:
        node.remove()
