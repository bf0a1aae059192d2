"""Files that somebody still has open for writing by a mount that is gone: what a kill, a full disk
and files that nobody writes leave of them."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from kvfs import former_writers
from tests.contract.small_node import SmallNode, small_node
from tests.fault.victim import assert_books_balance, problems, run_victim, start_again

CONTENT = b"x" * (1 << 20)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SmallNode]:
    with small_node(tmp_path) as made:
        yield made


def part(node: SmallNode) -> int:
    return trio.run(former_writers.part, node.engine, node.files)


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
        from kvfs import former_writers
        ino = node.write(durable, "written", b"x" * (1 << 20))
        writer = node.files.open(ino, 0, os.O_RDWR)
        {STEPS[step]}
        trio.run(former_writers.part, node.engine, node.files)
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
