"""A process that makes a backup, or restores one, is killed at each of its steps."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from kvfs.admin.backup import create, manifest, repository, restore
from kvfs.session import session
from tests.contract import client_store
from tests.contract.small_node import small_node
from tests.integration.harness import kvfs

_PROGRAM: Final = """
import sys
from tests.fault.kill import test_backup_kill
test_backup_kill.main(*sys.argv[1:])
"""
_STEPS: Final = ("write", "rename", "copy_file_range", "unlink", "pwrite")
"""Calls of the system of which one is the last."""
LARGE: Final = os.urandom(5 << 20)


def main(step: str, store: str, place: str, number: str) -> None:
    """In the process that dies: before call `number` of those above."""
    counted = 0

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted_call(*given: Any, **named: Any) -> Any:
            nonlocal counted
            counted += 1
            if counted == int(number):
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*given, **named)

        return counted_call

    for name in _STEPS:
        setattr(os, name, counting(getattr(os, name)))
    (make if step == "create" else bring_back)(Path(store), place)
    Path(place, ".done").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def make(store: Path, place: str) -> None:
    opened = session.acquire(store)
    try:
        with repository.opened(place, None, make=True) as where:
            create.create(opened, where, None, lambda _: None, keep=1)
    finally:
        session.release(opened)


def bring_back(store: Path, place: str) -> None:
    with repository.opened(place, None) as where:
        restore.restore(where, "", store, "", lambda _: None)


@contextlib.contextmanager
def killed_at_each_step(step: str, store: Path, place: Path) -> Iterator[Iterator[int]]:
    """Yields after each kill; the last one was after all steps."""

    def kills() -> Iterator[int]:
        for number in range(1, 200):
            client_store.run_killed(_PROGRAM, step, str(store), str(place), str(number))
            if (place / ".done").exists():
                return
            yield number
        pytest.fail("there are more steps than that")

    yield kills()
    (place / ".done").unlink(missing_ok=True)


def names(place: Path) -> list[str]:
    with repository.opened(str(place), None) as where:
        return manifest.names(where)


def test_a_half_backup_is_none_and_a_half_restore_no_store(tmp_path: Path) -> None:
    store, place = tmp_path / "store", tmp_path / "backups"
    with small_node(store) as node:
        space = node.namespace("models", kind="durable")
        for number in range(5):
            node.write(space, f"small-{number}", b"%d" % number * 1000)
        node.write(space, "large", LARGE)
        trio.run(node.sealer.settle)
    make(store, str(place))
    before = names(place)
    with small_node(store) as node:
        node.write(space, "more", b"more")
        node.write(space, "large-too", LARGE[1:])
        trio.run(node.sealer.settle)
    with killed_at_each_step("create", store, place) as kills:
        killed = 0
        for number in kills:
            killed = number
            for name in names(place):
                with repository.opened(str(place), None) as where:
                    manifest.read(where, name)
        assert killed > 8
    assert len(names(place)) == 1
    assert names(place) != before

    new = tmp_path / "new"
    with killed_at_each_step("restore", new, place) as kills:
        for number in kills:
            copied = kvfs("engine", "copy", str(new), str(tmp_path / f"copy-{number}"))
            if copied.returncode == 0:  # all was there, and on its way to the disk
                break
    found = kvfs("fsck", "--checksums", "--store", str(new))
    assert (found.returncode, found.stdout) == (0, "the store is whole\n")
    listed = kvfs("ls", "/models", "--store", str(new)).stdout.split()
    assert sorted(listed) == ["large", "large-too", "more", *(f"small-{n}" for n in range(5))]
