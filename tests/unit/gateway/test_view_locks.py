"""Files that a view's locks open on the mount."""

import os
import select
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from gateway.fuse.views.lock_opener import LockOpener
from gateway.fuse.views.view_locks import ViewLocks


def locks_of() -> ViewLocks:
    handle = SimpleNamespace(writable=True, file=SimpleNamespace(ino=1))
    files = SimpleNamespace(handle=lambda _fh: handle, number=lambda ino: ino)
    operations = SimpleNamespace(open_files=files, locks=None, lock_openers=set())
    backing = SimpleNamespace(journal=None)
    views: Any = SimpleNamespace(mountpoint="/", operations=operations, backing=backing)
    return ViewLocks(views, 1, {})


def test_an_open_that_the_mount_does_not_answer_any_more_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A daemon that hands over stops serving its mount: it would wait for itself."""
    asked, answered = threading.Event(), threading.Event()
    reader, opened = os.pipe()

    def waits(_opener: LockOpener, _number: int, _access: int) -> int:
        asked.set()
        assert answered.wait(20)
        return opened

    async def hand_over() -> None:
        locks = locks_of()
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(locks._descriptor, 7)
                await trio.to_thread.run_sync(asked.wait)
                nursery.cancel_scope.cancel()
        assert not locks.has_locked(7)

    monkeypatch.setattr(LockOpener, "open", waits)
    try:
        trio.run(hand_over)
        answered.set()
        assert select.select([reader], [], [], 20)[0], "what was opened is closed"
        assert os.read(reader, 1) == b""
    finally:
        os.close(reader)
