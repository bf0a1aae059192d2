"""The disk beneath a running node fails: every write is refused, and every look at a data file."""

import contextlib
import os
from pathlib import Path

import pytest
import trio

from kvfs.background import leftovers
from kvfs.changes import Change
from kvfs.config import Config
from kvfs.errors import KvfsError
from kvfs.meta.records import ROOT_INODE, namespace_root
from kvfs.namespace import notices, spaces, tree
from kvfs.node import Node, open_node
from kvfs.node.status import status_of
from tests.contract.small_node import new_inode
from tests.fault.disks import cut, disk
from tests.jumping import jumping_clock


async def unlinked(node: Node) -> int:
    """A file without a name."""
    (number, _) = node.engine.read_now(lambda t: spaces.by_name(t, b"cache"))
    ino = await node.volume.allocate(number)
    inode = new_inode()
    node.engine.transact_now(lambda t: tree.add_unlinked(t, namespace_root(number), ino, inode))
    os.close(node.files.create(ino, 0))
    return ino


def test_a_node_whose_disk_fails_goes_on_answering(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two minutes of its keepers' time: each has met the failure many times."""
    monkeypatch.setattr(leftovers, "_AGE_NS", 0)

    async def main(store: Path) -> None:
        async with open_node(Config(store=store)) as node:
            ino = await unlinked(node)
            lost = [Change(ROOT_INODE, b"lost", 0)]
            node.engine.transact_now(lambda t: notices.post(t, lost, 1))
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
    keepers = {"kvfs.volume", "kvfs.requests"}
    assert keepers <= {record.name for record in caplog.records}
    assert len(caplog.records) < 60
