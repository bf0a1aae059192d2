"""Files that somebody still has open for writing by a mount that is gone: what a kill, a full disk
and files that nobody writes leave of them."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from kvfs.base.errors import Busy
from kvfs.meta.records import namespace_root
from kvfs.node import former_writers
from kvfs.node.former_writers import FormerWriters
from kvfs.session.byte_transfer import copy
from kvfs.tree import tree
from tests.contract.small_node import SmallNode, small_node
from tests.fault.victim import assert_books_balance, problems, run_victim, start_again

CONTENT = b"x" * (1 << 20)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SmallNode]:
    with small_node(tmp_path) as made:
        yield made


def part(node: SmallNode) -> int:
    async def main() -> int:
        return await FormerWriters(node.engine, node.files).part(at_once=True)

    return trio.run(main)


def read(node: SmallNode, ino: int) -> bytes:
    return Path(node.files.path(ino, 0)).read_bytes()


def test_what_nobody_writes_stays_as_it_is(node: SmallNode) -> None:
    space = node.namespace("models", kind="durable")
    ino = node.write(space, "quiet", CONTENT)
    before = node.files.stat(ino, 0)
    with open(node.files.path(ino, 0), "rb"):
        assert part(node) == 0
    assert os.path.samestat(node.files.stat(ino, 0), before)


def test_the_last_writes_before_are_in_it_and_no_later_ones(node: SmallNode) -> None:
    space = node.namespace("models", kind="durable")
    ino = node.write(space, "written", CONTENT)
    with open(node.files.path(ino, 0), "r+b", buffering=0) as writer:
        os.pwrite(writer.fileno(), b"early", 0)
        assert part(node) == 1
        os.pwrite(writer.fileno(), b"LATE!", 0)
        assert part(node) == 0
    assert read(node, ino) == b"early" + CONTENT[5:]
    start_again(node)
    trio.run(node.sealer.settle)
    record = node.record(ino)
    assert record is not None
    assert record.checksum
    assert_books_balance(node)


STEPS = {
    "before the copy has the name": "os.rename = die",
    "after it": "former_writers.log.warning = die",
}


@pytest.mark.parametrize("step", STEPS)
def test_a_kill_leaves_the_old_one_or_the_new_one(tmp_path: Path, step: str) -> None:
    run_victim(
        tmp_path,
        f"""
        from functools import partial
        from kvfs.node import former_writers
        from kvfs.node.former_writers import FormerWriters
        ino = node.write(durable, "written", b"x" * (1 << 20))
        writer = node.files.open(ino, 0, os.O_RDWR)
        {STEPS[step]}
        former = FormerWriters(node.engine, node.files)
        trio.run(partial(former.part, at_once=True))
        """,
    )
    with small_node(tmp_path) as node:
        start_again(node)
        (ino,) = (ino for ino, _ in node.files.scan() if read(node, ino) == CONTENT)
        with open(node.files.path(ino, 0), "r+b"):
            assert part(node) == 1
        assert read(node, ino) == CONTENT
        trio.run(node.sealer.settle)
        assert_books_balance(node)


def test_what_cannot_be_copied_is_named_and_not_sealed(
    node: SmallNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    space = node.namespace("models", kind="durable")
    ino = node.write(space, "written", CONTENT)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(former_writers, "copy", full)
    with open(node.files.path(ino, 0), "r+b"):
        assert part(node) == 0
        assert f"{node.files.path(ino, 0)} is still written" in caplog.text
        assert "No space left" in caplog.text
        trio.run(node.sealer.settle)
        record = node.record(ino)
        assert record is not None
        assert not record.checksum
    assert read(node, ino) == CONTENT
    assert problems(node) == []


# ---- large files


def test_a_start_copies_no_more_than_the_data_of_a_large_file_with_holes(node: SmallNode) -> None:
    space = node.namespace("models", kind="durable")
    ino = node.write(space, "holes", CONTENT)
    path = node.files.path(ino, 0)
    os.truncate(path, 1 << 40)
    with open(path, "r+b", buffering=0) as writer:
        assert left_by_a_start(node) == {"files": 0, "bytes": 0}
        os.pwrite(writer.fileno(), b"LATE!", 0)
    with open(path, "rb") as file:
        assert file.read(5) == CONTENT[:5]
        assert os.fstat(file.fileno()).st_size == 1 << 40


def left_by_a_start(node: SmallNode) -> dict[str, int]:
    async def main() -> dict[str, int]:
        former = FormerWriters(node.engine, node.files)
        await former.part(at_once=False)
        return former.describe()

    return trio.run(main)


def test_a_start_waits_for_no_copy_of_a_large_file(
    node: SmallNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(former_writers, "AT_ONCE_BYTES", 1 << 16)
    monkeypatch.setattr(former_writers, "_PATIENCE_S", 0.05)
    may_copy = threading.Event()

    def slow(source: int, target: int, step: Callable[[int], None]) -> int:
        step(1)
        may_copy.wait()
        return copy(source, target, step)

    monkeypatch.setattr(former_writers, "copy", slow)
    space = node.namespace("models", kind="durable")
    ino, gone = (node.write(space, name, CONTENT) for name in ("large", "gone"))
    former = FormerWriters(node.engine, node.files)

    async def main() -> None:
        assert await former.part(at_once=False) == 0
        assert former.describe()["files"] == 2
        async with trio.open_nursery() as nursery:
            nursery.start_soon(former.run)
            with pytest.raises(Busy):
                await former.parted(ino)
            parent = namespace_root(space)
            node.engine.transact_now(lambda t: tree.unlink(t, parent, b"gone", 1, lambda _: False))
            monkeypatch.setattr(former_writers, "_PATIENCE_S", 60)
            may_copy.set()
            await former.parted(ino)
            await former.parted(gone)

    with (
        open(node.files.path(ino, 0), "r+b", buffering=0) as writer,
        open(node.files.path(gone, 0), "r+b", buffering=0),
    ):
        trio.run(main)
        os.pwrite(writer.fileno(), b"LATE!", 0)
    assert read(node, ino) == CONTENT
    assert not os.path.exists(node.files.path(gone, 0))


def test_a_stop_ends_a_copy_that_is_under_way(
    node: SmallNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(former_writers, "AT_ONCE_BYTES", 1 << 16)
    space = node.namespace("models", kind="durable")
    ino = node.write(space, "large", CONTENT)
    former = FormerWriters(node.engine, node.files)
    scope = trio.CancelScope()

    def stopping(_: int, __: int, step: Callable[[int], None]) -> int:
        step(1)
        trio.from_thread.run_sync(scope.cancel)
        step(2)
        raise AssertionError("it goes on")

    monkeypatch.setattr(former_writers, "copy", stopping)

    async def main() -> None:
        await former.part(at_once=False)
        with scope:
            await former.run()
        assert scope.cancelled_caught

    with open(node.files.path(ino, 0), "r+b", buffering=0) as writer:
        trio.run(main)
        assert os.path.samestat(os.fstat(writer.fileno()), node.files.stat(ino, 0))
