"""What killed clients leave in a running node's store: dropped when nobody uses it."""

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from kvfs.base.errors import Unavailable
from kvfs.datastore import file_lease
from kvfs.meta.engine import Transaction
from kvfs.meta.records import namespace_root
from kvfs.node.tasks.orphan_gc import Leftovers
from kvfs.tree import namespaces, reserved_inodes, tree
from tests.contract.small_node import SmallNode, new_inode, small_node
from tests.jumping import run_jumping


class Dropped:
    """A node's leftovers, and what they were dropped as."""

    def __init__(self, node: SmallNode) -> None:
        self.node = node
        self.dropped: list[int] = []
        self._leftovers = Leftovers(node.engine, node.files, node.holders, self._drop)
        self.run = self._leftovers.run

    def _drop(self, ino: int, version: int) -> None:
        assert version == 0
        self.dropped.append(ino)

    def sweep(self, age_ns: int = -60_000_000_000) -> list[int]:
        """Those of at least this age; by default also those that a clock set back makes young."""
        self.dropped.clear()
        trio.run(self.sweep_now, age_ns)
        return self.dropped

    async def sweep_now(self, age_ns: int = -60_000_000_000) -> None:
        await self._leftovers.sweep(time.time_ns() - age_ns)


@pytest.fixture
def leftovers(tmp_path: Path) -> Iterator[Dropped]:
    with small_node(tmp_path / "store") as node:
        if not file_lease.supported(node.files.root):
            pytest.skip("the filesystem of the temporary directory grants no leases")
        node.namespace("cache")
        yield Dropped(node)


def orphan(node: SmallNode) -> int:
    """A record without a name, as a client makes it first."""
    (number, _) = node.engine.read_now(lambda t: namespaces.by_name(t, b"cache"))
    ino = node.engine.transact_now(lambda t: namespaces.allocate_inodes(t, number, 1))
    inode = new_inode()
    node.engine.transact_now(lambda t: tree.add_unlinked(t, namespace_root(number), ino, inode))
    return ino


def test_a_record_without_a_data_file_goes(leftovers: Dropped) -> None:
    ino = orphan(leftovers.node)
    assert leftovers.sweep() == [ino]


def test_a_young_one_stays(leftovers: Dropped) -> None:
    orphan(leftovers.node)
    assert leftovers.sweep(age_ns=60_000_000_000) == []


def test_a_data_file_that_somebody_has_open_stays(leftovers: Dropped) -> None:
    ino = orphan(leftovers.node)
    fd = leftovers.node.files.create(ino, 0)
    assert leftovers.sweep() == []
    os.close(fd)
    assert leftovers.sweep() == [ino]


def test_what_the_mount_holds_stays(leftovers: Dropped) -> None:
    ino = orphan(leftovers.node)
    leftovers.node.holders.looked_up(ino)
    assert leftovers.sweep() == []
    leftovers.node.holders.forgotten(ino, 1)
    assert leftovers.sweep() == [ino]


def test_what_has_a_name_stays(leftovers: Dropped) -> None:
    node = leftovers.node
    (number, _) = node.engine.read_now(lambda t: namespaces.by_name(t, b"cache"))
    node.write(number, "a", b"1")
    assert leftovers.sweep() == []


def test_an_engine_that_fails_for_a_while_ends_nothing(
    leftovers: Dropped, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = leftovers.node
    ino = orphan(node)
    failures = [OSError(errno.EIO, "Input/output error"), Unavailable("not now")]
    read = node.engine.read
    later_ns = time.time_ns() + 120_000_000_000

    async def failing(fn: Callable[[Transaction], object]) -> object:
        if failures:
            raise failures.pop()
        return await read(fn)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leftovers.run)
            with trio.fail_after(1000):
                while not leftovers.dropped:
                    await trio.sleep(1)
            nursery.cancel_scope.cancel()

    monkeypatch.setattr(node.engine, "read", failing)
    monkeypatch.setattr(time, "time_ns", lambda: later_ns)
    run_jumping(main)
    assert set(leftovers.dropped) == {ino}


def test_all_of_many_are_found(leftovers: Dropped) -> None:
    inos = [orphan(leftovers.node) for _ in range(600)]
    assert sorted(leftovers.sweep()) == inos


def test_numbers_that_a_process_left_reserved_are_released_after_an_hour(
    leftovers: Dropped,
) -> None:
    node = leftovers.node
    (number, _) = node.engine.read_now(lambda t: namespaces.by_name(t, b"cache"))
    first = node.engine.transact_now(lambda t: reserved_inodes.reserve(t, number, 600))
    fd = node.files.create(first + 300, 0)  # somebody has it open

    def reserved() -> list[int]:
        return node.engine.read_now(lambda t: reserved_inodes.reserved(t, 0, 1000))

    async def main() -> None:
        await leftovers.sweep_now()
        await trio.sleep(3000)
        await leftovers.sweep_now()
        assert len(reserved()) == 600, "their process may yet make files of them"
        await trio.sleep(600)
        await leftovers.sweep_now()

    run_jumping(main)
    assert reserved() == [first + 300]
    os.close(fd)
