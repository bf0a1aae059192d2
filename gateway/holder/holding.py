"""The daemon's part of the holder: it is started with the mount, and replaced when it ends.

`holder_process` is the process itself; docs/design/mount.md has the table of what each process
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
from typing import Final, NamedTuple

import trio

from gateway.fuse.channel import device
from gateway.holder import claim, holder_process
from gateway.holder.mount_journal import MountJournal
from gateway.node_start import Successor
from gateway.side_process import beside

_PAUSE_S: Final = 1.0
"""Pause before one that ended is replaced."""
log = logging.getLogger(__name__)


class HandOver:
    """The decision whether this daemon leaves its mount to the next one when it ends."""

    def __init__(self) -> None:
        self.is_asked = False
        """Whether it was told to."""
        self.is_starting = False
        """Whether the mount is another daemon's, with which this one does not go on yet."""
        self.serves: Final = trio.Event()
        """Set once all of the node serves."""

    @property
    def leaves(self) -> bool:
        """Whether the mount goes on without this daemon if that ends now."""
        return self.is_asked or self.is_starting

    def started(self) -> None:
        """Ends the start: the mount is this daemon's."""
        self.is_starting = False
        self.serves.set()


class Keeping(NamedTuple):
    """The things that a holder keeps, and for how long."""

    mountpoint: str
    run: Path
    device: int
    journal: MountJournal
    wait_s: int
    successor: Successor | None
    """None: somebody else starts the next daemon."""
    hand_over: HandOver
    former: int = -1
    """A pidfd of the holder before, of a mount that was taken over: it watches until this daemon
    serves."""


@contextlib.asynccontextmanager
async def kept(keeping: Keeping) -> AsyncIterator[trio.Event]:
    """Has the mount outlive this process while the block lasts, from when the event is set.
    Entering it is no checkpoint: nobody else removes the mount just made. Cancelled, or at the end
    of the block: the holder ends, unless the mount is left to the next daemon."""
    try:
        async with beside(partial(_keep, keeping)) as begun:
            yield begun
    finally:
        if not keeping.hand_over.leaves:  # a holder before, whose place was not taken yet
            claim.give_up(keeping.run)


async def _keep(keeping: Keeping, scope: trio.CancelScope, begun: trio.Event) -> None:
    with scope:
        if keeping.former >= 0:
            begun.set()
            await _until_serving(keeping)
        while True:
            try:
                process = await _start(keeping)
            except OSError as error:
                log.warning("the holder of %s cannot be started: %s", keeping.mountpoint, error)
                process = None
            keeping = keeping._replace(former=-1)
            begun.set()
            if process is not None:
                if await _wait(process, keeping.hand_over) == holder_process.REPLACED:
                    log.error(
                        "the program was replaced beneath the running node: the mount %s ends with"
                        " it; restart the node",
                        keeping.mountpoint,
                    )
                    return
                log.warning("the holder of %s has ended: another is started", keeping.mountpoint)
            await trio.sleep(_PAUSE_S)


async def _until_serving(keeping: Keeping) -> None:
    """Returns when the node serves. Cancelled: closes the pidfd of the holder before."""
    try:
        await keeping.hand_over.serves.wait()
    except trio.Cancelled:
        os.close(keeping.former)
        raise


async def _start(keeping: Keeping) -> trio.Process:
    """Raises OSError."""
    with contextlib.ExitStack() as closing:
        pidfd = os.pidfd_open(os.getpid())
        closing.callback(os.close, pidfd)
        abort = device.open_abort(keeping.mountpoint)
        if abort is not None:
            closing.callback(os.close, abort)
        listener = closing.enter_context(claim.listening(keeping.run))
        fds = [pidfd, -1 if abort is None else abort, keeping.device, keeping.journal.fd]
        fds += [listener.fileno(), keeping.former]
        if keeping.former >= 0:
            closing.callback(os.close, keeping.former)
        successor = keeping.successor
        return await trio.lowlevel.open_process(
            [
                *(sys.executable, "-I", "-S", holder_process.__file__),
                *map(str, (holder_process.VERSION, os.getpid(), *fds)),
                *map(str, (keeping.journal.generation, keeping.wait_s)),
                *(str(keeping.run), successor.directory if successor else "/"),
                *(successor.command() if successor else ()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=2,  # whoever reads the daemon's output waits for the daemon's end alone
            pass_fds=[each for each in fds if each >= 0],
            cwd="/",
            start_new_session=True,  # who kills the daemon's process group does not kill it
        )


async def _wait(process: trio.Process, hand_over: HandOver) -> int:
    """Waits for the process and returns its exit code. Cancelled: it is killed, unless it is to
    wait for the next daemon."""
    try:
        return await process.wait()
    finally:
        if not hand_over.leaves:
            with trio.CancelScope(shield=True):
                process.kill()
                await process.wait()
