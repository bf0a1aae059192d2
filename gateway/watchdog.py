"""The daemon's part of the watchdog: it is started with the mount, and replaced when it ends.

`watchdog_process` is the process itself; docs/design/mount.md has the table of what each process
holds, and of the effects of a kill of each.
"""

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Final

import trio

from gateway import watchdog_process
from gateway.fuse.channel import device
from gateway.side_process import beside

_PAUSE_S: Final = 1.0
"""Pause before one that ended is replaced."""
_PACKAGES: Final = Path(__file__).resolve().parent.parent
log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def watched(mountpoint: str) -> AsyncIterator[trio.Event]:
    """Ends the filesystem mounted there within seconds of this process's death, while the block
    lasts, from when the event is set until the block has ended, even if that is cancelled. Entering
    it is no checkpoint: nobody else removes the mount just made."""
    async with beside(partial(_keep, mountpoint)) as begun:
        yield begun


async def _keep(mountpoint: str, scope: trio.CancelScope, begun: trio.Event) -> None:
    with scope:
        while True:
            try:
                process = await _start(mountpoint)
            except OSError as error:
                log.warning("the watchdog of %s cannot be started: %s", mountpoint, error)
                process = None
            begun.set()
            if process is not None:
                if await _wait(process) == watchdog_process.REPLACED:
                    log.error(
                        "the program was replaced beneath the running node: nobody ends the mount"
                        " %s should the node die; restart the node",
                        mountpoint,
                    )
                    return
                log.warning("the watchdog of %s has ended: another is started", mountpoint)
            await trio.sleep(_PAUSE_S)


async def _start(mountpoint: str) -> trio.Process:
    """Raises OSError."""
    with contextlib.ExitStack() as closing:
        fds = [os.pidfd_open(os.getpid())]
        closing.callback(os.close, fds[0])
        abort = device.open_abort(mountpoint)
        if abort is not None:
            fds.append(abort)
            closing.callback(os.close, abort)
        found = device.mounted(mountpoint)
        numbers = (watchdog_process.VERSION, os.getpid(), fds[0], -1 if abort is None else abort)
        return await trio.lowlevel.open_process(
            [
                *(sys.executable, "-I", "-S", watchdog_process.__file__),
                *map(str, numbers),
                *(str(_PACKAGES), found.device if found else "", mountpoint),
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
            cwd="/",
            start_new_session=True,  # who kills the daemon's process group does not kill it
        )


async def _wait(process: trio.Process) -> int:
    """Waits for the process and returns its exit code. Cancelled: it is killed."""
    try:
        return await process.wait()
    finally:
        with trio.CancelScope(shield=True):
            process.kill()
            await process.wait()
