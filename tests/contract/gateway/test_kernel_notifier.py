"""What is still to be said to the kernel of a mount that goes."""

import os

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from gateway.fuse.notify import invalidation
from gateway.fuse.notify.invalidation import KernelNotifier
from kvfs.tree.changes import Change


def test_nobody_waits_for_a_mount_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who did would drop its caches later, through a descriptor that is somebody else's by then."""
    monkeypatch.setattr(invalidation, "_DEADLINE_S", 120.0)
    out, device = os.pipe()
    os.set_blocking(device, False)
    filled = 0
    while True:
        try:
            filled += os.write(device, bytes(4096))
        except BlockingIOError:
            break
    os.set_blocking(device, True)  # as the kernel: the next message waits for a lock

    async def main() -> None:
        notifier = KernelNotifier(device, drops=True)
        settled, closed = trio.Event(), trio.Event()

        async def change() -> None:
            notifier.entry(1, b"name")
            await notifier.settled()
            settled.set()

        async def close() -> None:
            assert await notifier.close()
            closed.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(change)
            await wait_all_tasks_blocked()
            nursery.start_soon(close)
            with trio.fail_after(60):
                await settled.wait()
            os.read(out, filled)
            with trio.fail_after(60):
                await closed.wait()

    trio.run(main)
    os.close(device)
    os.close(out)


def test_a_mount_that_has_gone_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looked something up meanwhile comes too late; the number may be a data file's by then."""
    monkeypatch.setattr(invalidation, "_DEADLINE_S", 0.05)
    out, device = os.pipe()
    os.set_blocking(out, False)

    async def main() -> None:
        notifier = KernelNotifier(device, drops=True)
        assert await notifier.close()
        await notifier.forget([Change(1, b"name", 2)], {2})
        await notifier.content(2)
        notifier.attributes(2)
        notifier.listing(2)
        notifier.every_name()

    trio.run(main)
    with pytest.raises(BlockingIOError):
        os.read(out, 1)
    os.close(device)
    os.close(out)
