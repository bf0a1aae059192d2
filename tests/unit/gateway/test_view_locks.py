"""Files that a view's locks open on the mount."""

import os
import select
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from gateway.fuse.views import view_locks
from gateway.fuse.views.view_locks import ViewLocks


def locks_of(openers: set[int]) -> ViewLocks:
    handle = SimpleNamespace(writable=True, file=SimpleNamespace(ino=1))
    files = SimpleNamespace(handle=lambda _fh: handle, number=lambda ino: ino)
    operations = SimpleNamespace(open_files=files, locks=None, lock_openers=openers)
    backing = SimpleNamespace(journal=None)
    views: Any = SimpleNamespace(mountpoint="/", operations=operations, backing=backing)
    return ViewLocks(views, 1, {})


def test_an_open_that_the_mount_does_not_answer_any_more_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A daemon that hands over stops serving its mount: it would wait for itself."""
    asked, answered = threading.Event(), threading.Event()
    openers: set[int] = set()
    reader, opened = os.pipe()

    def waits(_mountpoint: str, _ino: int, _access: int) -> int:
        assert openers == {threading.get_native_id()}
        asked.set()
        assert answered.wait(20)
        return opened

    async def hand_over() -> None:
        locks = locks_of(openers)
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(locks._descriptor, 7)
                await trio.to_thread.run_sync(asked.wait)
                nursery.cancel_scope.cancel()
        assert not locks.has_locked(7)

    monkeypatch.setattr(view_locks, "_open", waits)
    try:
        trio.run(hand_over)
        answered.set()
        assert select.select([reader], [], [], 20)[0], "what was opened is closed"
        assert os.read(reader, 1) == b""
    finally:
        os.close(reader)
    assert not openers
