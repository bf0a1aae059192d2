"""The end of files that nobody holds, where the disk does not obey at once."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from kvfs.base.errors import NoSpace
from kvfs.meta.engine import Transaction
from kvfs.meta.records import namespace_root
from kvfs.tree import lifecycle, tree
from kvfs.vfs.volume import Volume
from tests.contract.small_node import SmallNode, new_inode, small_node
from tests.jumping import jumping_clock


def orphan(node: SmallNode, namespace_id: int, ino: int) -> None:
    inode = new_inode()
    parent = namespace_root(namespace_id)
    node.engine.transact_now(lambda t: tree.add_unlinked(t, parent, ino, inode))
    os.close(node.files.create(ino, 0))


class Stubborn:
    """A disk that does not unlink some of a node's data files."""

    def __init__(self, node: SmallNode, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inos: set[int] = set()
        self.attempts = 0
        self._unlink = node.files.unlink
        monkeypatch.setattr(node.files, "unlink", self._failing)

    def _failing(self, ino: int, version: int) -> bool:
        if ino in self.inos:
            self.attempts += 1
            raise OSError(errno.EIO, "Input/output error")
        return self._unlink(ino, version)


def test_a_file_that_the_disk_does_not_give_up_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with small_node(tmp_path / "store") as node:
        stubborn = Stubborn(node, monkeypatch)
        volume = Volume(node.engine, node.files, node.index, node.holders, lambda _lost: None)

        async def left(inos: list[int]) -> None:
            with trio.fail_after(600):
                while node.engine.read_now(lambda t: lifecycle.orphans(t, 0, 1000)) != inos:
                    await trio.sleep(0.1)

        async def main() -> None:
            namespace_id = node.namespace("cache")
            inos = [await volume.allocate(namespace_id) for _ in range(300)]
            stubborn.inos = set(inos[:260])
            for ino in inos:
                orphan(node, namespace_id, ino)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(volume.run)
                for ino in inos:
                    volume.drop_later(ino, 0)
                await left(inos[:260])
                before = stubborn.attempts
                for _ in range(60):
                    await trio.sleep(10)
                    volume.drop_later(inos[0], 0)
                assert 260 * 9 < stubborn.attempts - before < 260 * 20
                stubborn.inos.clear()
                await left([])
                nursery.cancel_scope.cancel()

        with jumping_clock() as clock:
            trio.run(main, clock=clock)
        assert not list(node.files.scan())
    said = [line for line in caplog.messages if "it will be tried again" in line]
    assert 0 < len(said) < 10


def test_an_engine_that_fails_for_a_while_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_node(tmp_path / "store") as node:
        volume = Volume(node.engine, node.files, node.index, node.holders, lambda _lost: None)
        namespace_id = node.namespace("cache")
        kept = node.write(namespace_id, "kept", b"x")
        failures = [OSError(errno.EIO, "Input/output error"), NoSpace("full")] * 4
        transact = node.engine.transact

        async def failing(fn: Callable[[Transaction], object]) -> object:
            if failures:
                raise failures.pop()
            return await transact(fn)

        def done() -> bool:
            inode = node.record(kept)
            orphans = node.engine.read_now(lambda t: lifecycle.orphans(t, 0, 1))
            return inode is not None and inode.atime_ns == 17 and not orphans

        async def main() -> None:
            ino = await volume.allocate(namespace_id)
            orphan(node, namespace_id, ino)
            monkeypatch.setattr(node.engine, "transact", failing)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(volume.run)
                volume.drop_later(ino, 0)
                with trio.fail_after(600):
                    while not done():
                        volume.atimes[kept] = 17
                        await trio.sleep(0.1)
                nursery.cancel_scope.cancel()

        with jumping_clock() as clock:
            trio.run(main, clock=clock)
        assert not failures


def test_what_got_a_name_again_is_not_dropped(tmp_path: Path) -> None:
    with small_node(tmp_path / "store") as node:
        volume = Volume(node.engine, node.files, node.index, node.holders, lambda _lost: None)
        namespace_id = node.namespace("cache")
        parent = namespace_root(namespace_id)

        async def main() -> None:
            named, left = [await volume.allocate(namespace_id) for _ in range(2)]
            orphan(node, namespace_id, named)
            orphan(node, namespace_id, left)
            await node.engine.transact(lambda t: tree.link(t, named, parent, b"name", 1))
            await volume.drop([(named, 0), (left, 0)])
            assert list(node.files.scan()) == [(named, 0)]
            assert node.record(named) is not None
            assert node.record(left) is None

        trio.run(main)


def test_an_orphan_goes_with_the_data_that_it_has_by_then(tmp_path: Path) -> None:
    """In a cluster who writes to an open file without a name gives its data file another one."""
    with small_node(tmp_path / "store") as node:
        volume = Volume(node.engine, node.files, node.index, node.holders, lambda _lost: None)
        namespace_id = node.namespace("cache")

        async def main() -> None:
            ino = await volume.allocate(namespace_id)
            orphan(node, namespace_id, ino)
            os.close(node.files.create(ino, 7))

            def written(t: Transaction) -> None:
                inode = tree.read_inode(t, ino)
                inode.version = 7
                tree.write_inode(t, ino, inode)

            await node.engine.transact(written)
            await volume.drop([(ino, 0)])
            assert not list(node.files.scan())

        trio.run(main)


def test_numbers_of_new_files_are_there_before_they_are_needed(tmp_path: Path) -> None:
    """An engine that does not answer for a while stops no create."""
    with small_node(tmp_path / "store") as node:
        volume = Volume(node.engine, node.files, node.index, node.holders, lambda _lost: None)

        async def main() -> None:
            namespace_id = node.namespace("cache")
            taken = [await volume.allocate(namespace_id)]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(volume.run)
                for _ in range(20_000):
                    number = volume.allocate_now(namespace_id)
                    assert number
                    taken.append(number)
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            assert len(set(taken)) == len(taken)

        trio.run(main)
