"""The disk beneath a running node fails: every write is refused, and every look at a data file."""

import contextlib
import errno
import os
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import trio

from kvfs.base.config import Config
from kvfs.base.errors import Corrupt, KvfsError, NotFound
from kvfs.client import Client
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.records import ROOT_INODE, namespace_root
from kvfs.node import Node, open_node
from kvfs.node.status import status_of
from kvfs.node.tasks import orphan_gc
from kvfs.node.tasks.tier_mover import refusal_of
from kvfs.tree import namespaces, notices, tree
from kvfs.tree.changes import Change
from tests.cluster.waiting import wait_until
from tests.contract.small_node import new_inode
from tests.fault.disks import Disk, cut, disk
from tests.integration.harness import Node as Mounted
from tests.integration.harness import best_mode, kvfs, wait_for_exit, watchdog_of
from tests.jumping import jumping_clock


@contextlib.contextmanager
def with_tier(directory: Path) -> Iterator[tuple[Mounted, Disk]]:
    """A node on a small disk, whose new files lie on a larger one."""
    with disk(directory / "own", "ext4", 128 << 20) as own, disk(directory, "ext4") as tier:
        place = tier.mountpoint / "tier"
        place.mkdir(mode=0o700)
        node = Mounted(best_mode(), own.mountpoint / "home", ("--tier", f"ssd={place}:1GiB"))
        node.mount.mkdir(parents=True)
        try:
            yield node.up(), tier
        finally:
            print(node.log[-3000:])
            if node.pid is not None:
                node.down()


def test_a_tier_that_fails_is_named_and_costs_what_it_alone_has(tmp_path: Path) -> None:
    with with_tier(tmp_path) as (node, tier):
        place = tier.mountpoint / "tier"
        for namespace in ("cache", "models"):
            for name in ("read", "client"):
                with (node.mount / namespace / name).open("wb", buffering=0) as file:
                    file.write(b"kept")
                    os.fsync(file.fileno())
        assert len(list(place.glob("???/*"))) == 4
        subprocess.run(["mount", "-o", "remount,ro", tier.mountpoint], check=True)
        assert refusal_of(str(place)) == os.strerror(errno.EROFS)
        assert (node.mount / "models" / "read").read_bytes() == b"kept"
        subprocess.run(["mount", "-o", "remount,rw", tier.mountpoint], check=True)
        assert refusal_of(str(place)) is None
        cut(tier.mountpoint)
        with pytest.raises(FileNotFoundError):
            (node.mount / "cache" / "read").read_bytes()
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            (node.mount / "models" / "read").read_bytes()
        with Client(node.store) as client:
            with pytest.raises(NotFound):
                client.get("cache/client")
            with pytest.raises(Corrupt, match=r"models/client: .* look at its disk"):
                client.get("models/client")
        assert re.search(
            rf"the data file {place}/.* cannot be opened .*: look at its disk", node.log
        )
        for namespace in ("cache", "models"):
            (node.mount / namespace / "new").write_bytes(b"new")
            assert (node.mount / namespace / "new").read_bytes() == b"new"
        said = os.strerror(errno.EIO)
        wait_until(lambda: node.status()["tiers"][0]["refusal"] == said, "the tier is given up")
        shown = kvfs("status", "--store", str(node.store)).stdout
        assert f"{place}, " in shown
        assert f"TAKES NO FILES: {said}" in shown
        assert str(place) in kvfs("doctor", "--store", str(node.store)).stdout
        node.down()
        tier.power_cycle()
        node.up()
        assert (node.mount / "models" / "read").read_bytes() == b"kept"
        assert sorted(os.listdir(node.mount / "cache")) == ["new"]


async def unlinked(node: Node) -> int:
    """A file without a name."""
    engine = cast(EmbeddedEngine, node.engine)
    (number, _) = engine.read_now(lambda t: namespaces.by_name(t, b"cache"))
    ino = await node.volume.allocate(number)
    inode = new_inode()
    engine.transact_now(lambda t: tree.add_unlinked(t, namespace_root(number), ino, inode))
    os.close(node.files.create(ino, 0))
    return ino


def test_a_node_whose_disk_fails_goes_on_answering(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two minutes of its keepers' time: each has met the failure many times."""
    monkeypatch.setattr(orphan_gc, "_AGE_NS", 0)

    async def main(store: Path) -> None:
        async with open_node(Config(store=store)) as node:
            ino = await unlinked(node)
            lost = [Change(ROOT_INODE, b"lost", 0)]
            cast(EmbeddedEngine, node.engine).transact_now(lambda t: notices.post(t, lost, 1))
            cut(store.parent)
            node.volume.drop_later(ino, 0)
            for _ in range(120):
                node.volume.atimes[ino] = 1
                node.index.touch(ino)
                await trio.sleep(1)
            status = await status_of(node)
            assert [each["name"] for each in status["namespaces"]] == ["cache", "models"]

    with disk(tmp_path, "ext4") as made:
        with jumping_clock() as clock, contextlib.suppress(KvfsError):
            trio.run(main, made.mountpoint / "store", clock=clock)
        made.power_cycle()
    keepers = {"kvfs.vfs.volume", "kvfs.node.client_requests"}
    assert keepers <= {record.name for record in caplog.records}
    assert len(caplog.records) < 60


def fetch(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def kill_with_watchdog(node: Mounted) -> None:
    """The watchdog has the node's log open, on the disk that is to be unmounted."""
    assert node.pid is not None
    watchdog = os.pidfd_open(watchdog_of(node.pid))
    node.kill()
    wait_for_exit(watchdog)
    os.close(watchdog)


def test_a_disk_that_refused_a_sync_shows_at_every_place(tmp_path: Path) -> None:
    with disk(tmp_path, "ext4") as made:
        node = Mounted(best_mode(), made.mountpoint / "home", ("--admin", "127.0.0.1:0"))
        (made.mountpoint / "home").mkdir()
        node.mount.mkdir()
        try:
            node.up()
            admin = node.status()["admin"]["endpoint"]
            assert fetch(f"{admin}/health/ready") == (200, "ready\n")
            assert "kvfs_journal_failed 0.0" in fetch(f"{admin}/metrics")[1]
            (node.mount / "models" / "file").write_bytes(b"x")
            cut(made.mountpoint)
            models = os.open(node.mount / "models", os.O_RDONLY)
            with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                os.fsync(models)
            os.close(models)
            status, text = fetch(f"{admin}/health/ready")
            assert status == 503
            assert "the disk refused to sync" in text
            assert "kvfs_journal_failed 1.0" in fetch(f"{admin}/metrics")[1]
            assert "the disk refused to sync" in node.status()["engine"]["journal_failure"]
            shown = kvfs("status", "--store", str(node.store)).stdout
            assert "the disk refused to sync" in shown
        finally:
            if node.pid is not None:
                kill_with_watchdog(node)
            subprocess.run(["umount", "-l", node.mount], check=False)
