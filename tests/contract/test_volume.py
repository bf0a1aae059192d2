"""The end of files that nobody holds, where the disk does not obey at once."""

import errno
import os
import time
from pathlib import Path

import pytest
import trio

from kvfs.meta.records import Inode, namespace_of, namespace_root
from kvfs.namespace import lifecycle, tree
from kvfs.volume import Volume
from tests.contract.small_node import SmallNode, small_node


def orphan(node: SmallNode, namespace_id: int, ino: int) -> None:
    now = time.time_ns()
    inode = Inode(
        mode=0o100644,
        uid=0,
        gid=0,
        nlink=0,
        atime_ns=now,
        mtime_ns=now,
        ctime_ns=now,
        parent=0,
        name=b"",
    )
    parent = namespace_root(namespace_id)
    node.engine.transact_now(lambda t: tree.add_unlinked(t, parent, ino, inode))
    os.close(node.files.create(ino, 0))


def test_an_error_of_the_disk_does_not_end_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = iter([OSError(errno.EIO, "Input/output error")])
    with small_node(tmp_path / "store") as node:
        volume = Volume(node.engine, node.files, node.index, node.holders)
        unlink = node.files.unlink

        def failing(ino: int, version: int) -> bool:
            for failure in failures:
                raise failure
            return unlink(ino, version)

        async def dropped() -> None:
            ino = await volume.allocate(node.namespace("cache"))
            orphan(node, namespace_of(ino), ino)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(volume.run)
                volume.drop_later(ino, 0)
                with trio.fail_after(10):
                    while node.engine.read_now(lambda t: lifecycle.orphans(t, 0, 1)):
                        await trio.sleep(0.01)
                nursery.cancel_scope.cancel()

        monkeypatch.setattr(node.files, "unlink", failing)
        trio.run(dropped)
        assert not list(node.files.scan())
    assert "it will be tried again" in caplog.text
