"""A node with its mount, run as one service: start, readiness, control requests, signals, end.

One mount per node. It may be removed and made again while the node runs; when it is unmounted from
outside (umount, fusermount3), the node goes on without it and says so.
"""

import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import trio

from gateway import mountpoint
from gateway.fuse.channel import device
from kvfs.base import descriptors, priority
from kvfs.base.config import Config
from kvfs.base.errors import Busy, Invalid, NotFound, Unavailable
from kvfs.node import Node, open_node
from kvfs.node.status import status_of

if TYPE_CHECKING:
    from gateway.fuse.mount import MountInfo

MOUNT_DEADLINE_S: Final = 20.0
UNMOUNT_DEADLINE_S: Final = 20.0
log = logging.getLogger(__name__)


class MountKeeper:
    """The mount of a node, on request. Its nursery must end before the node does."""

    def __init__(self, node: Node, nursery: trio.Nursery) -> None:
        self._node = node
        self._nursery = nursery
        self._scope: trio.CancelScope | None = None
        self._gone = trio.Event()
        self.info: MountInfo | None = None

    async def mount(self, directory: Path) -> "MountInfo":
        """Mounts at `directory`; returns when the mount answers.

        Raises Busy if this node has a mount, Unavailable past the deadline, and what
        `mountpoint.prepare` and the mount itself raise. Cancelled: nothing stays mounted.
        """
        if self._scope is not None:
            at = self.info.mountpoint if self.info else directory
            raise Busy(f"this node has a mount already, at {at}: take it away with `kvfs umount`")
        self._scope = trio.CancelScope()
        self._gone = trio.Event()
        try:
            if mountpoint.prepare(directory, self._node.config.store):
                log.warning("a stale mount at %s was taken away", directory)
            with contextlib.closing(mountpoint.hold(directory)) as bare:
                if bare.hides:
                    log.warning("%s", mountpoint.hidden(directory, bare.hides))
                with trio.fail_after(MOUNT_DEADLINE_S):
                    self.info = await self._nursery.start(
                        self._serve, directory, bare.hides, self._scope
                    )
                bare.close_to_writers()
        except trio.TooSlowError:
            raise Unavailable(f"the mount at {directory} did not answer in time") from None
        finally:
            if self.info is None:
                self._scope = None
        return self.info

    async def unmount(self, *, lazy: bool) -> str:
        """Unmounts, waits until the mount has gone, and returns the mountpoint.

        `lazy`: even while it is in use; open files are closed then. Raises NotFound if there is no
        mount, Busy while it is in use.
        """
        scope = self._scope
        if scope is None or self.info is None:
            raise NotFound("this node has no mount")
        directory = self.info.mountpoint
        if not lazy:
            await trio.to_thread.run_sync(lambda: device.unmount(directory, lazy=False))
        scope.cancel()
        with trio.move_on_after(UNMOUNT_DEADLINE_S) as deadline:
            await self._gone.wait()
        if deadline.cancelled_caught:
            raise Unavailable(f"{directory} is not unmounted yet: something hangs in it")
        return str(directory)

    async def _serve(
        self,
        directory: Path,
        hides: list[str],
        scope: trio.CancelScope,
        *,
        task_status: "trio.TaskStatus[MountInfo]",
    ) -> None:
        # Imported here: a node without a mount needs no libfuse.
        from gateway.fuse import mount

        options = mount.options(self._node.config, directory, hides)
        try:
            with scope:
                await mount.serve(self._node, options, task_status=task_status)
            if not scope.cancel_called:
                log.warning(
                    "%s was unmounted from outside; the node goes on: `kvfs mount` mounts again",
                    directory,
                )
        finally:
            self.info = self._scope = None
            self._gone.set()


class Companion(Protocol):
    """A service beside a node and its mount, which knows them only by the node."""

    async def __call__(self, node: Node, *, task_status: trio.TaskStatus[None]) -> None:
        """Serves, and reports it by `task_status`. Cancelled: ends in order, in its own time."""


async def run(
    config: Config,
    *,
    mounted: bool,
    on_ready: Callable[[dict[str, Any]], None],
    companions: Sequence[Companion] = (),
) -> None:
    """Runs a node until SIGTERM, SIGINT or a `stop` request.

    Companions start while the mount is made, and end before it goes. `on_ready` gets the status
    when all of them serve and, if `mounted`, the mount answers too. Raises the obstacles to the
    start.
    """
    descriptors.allow_most()
    refused = priority.raise_to(config.priority)

    def ready(status: dict[str, Any]) -> None:
        on_ready(status)
        if refused:  # not before: the message of a start that fails stands alone
            log.info("the node has no raised priority: %s", refused)

    stopping, opening = trio.Event(), _Opening()
    # Outside the nursery: a start that fails at once ends the task that listens, not the receiver
    # under it.
    with trio.open_signal_receiver(*_ending_signals()) as signals:
        async with trio.open_nursery() as listening:
            listening.start_soon(_stop_on_signal, signals, stopping, opening)
            with opening.scope:
                async with open_node(config) as node:
                    opening.is_over = True
                    await _serve(node, stopping, mounted, ready, companions)
            listening.cancel_scope.cancel()


async def _serve(
    node: Node,
    stopping: trio.Event,
    mounted: bool,
    on_ready: Callable[[dict[str, Any]], None],
    companions: Sequence[Companion],
) -> None:
    """Serves an open node, until it is to stop."""
    async with trio.open_nursery() as nursery:
        keeper = MountKeeper(node, nursery)
        _answer_requests(node, keeper, stopping)
        async with trio.open_nursery() as beside:
            async with trio.open_nursery() as starting:
                for companion in companions:
                    starting.start_soon(beside.start, companion, node)
                if mounted:
                    starting.start_soon(keeper.mount, node.config.mount)
            node.ready()
            on_ready(await status_of(node))
            await stopping.wait()
            log.info("stopping")
            beside.cancel_scope.cancel()
        nursery.cancel_scope.cancel()


def _ending_signals() -> list[signal.Signals]:
    """Returns the signals that end the service in order. SIGHUP stays ignored if nohup ignores
    it."""
    ending = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        ending.append(signal.SIGHUP)
    return ending


class _Opening:
    """The start of a node, which may wait for its cluster's engine."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.is_over = False

    def end(self) -> None:
        """Gives up the start, unless the node is open: then it stops in order."""
        if not self.is_over:
            self.scope.cancel()


async def _stop_on_signal(
    signals: AsyncIterator[int], stopping: trio.Event, opening: _Opening
) -> None:
    async for _ in signals:
        stopping.set()
        opening.end()


def _answer_requests(node: Node, keeper: MountKeeper, stopping: trio.Event) -> None:
    async def mount(params: dict[str, Any]) -> dict[str, Any]:
        directory = params.get("mountpoint", str(node.config.mount))
        if not isinstance(directory, str) or not directory.startswith("/"):
            raise Invalid("a mount request names an absolute directory")
        return describe(await keeper.mount(Path(directory)))

    async def unmount(params: dict[str, Any]) -> dict[str, Any]:
        return {"mountpoint": await keeper.unmount(lazy=params.get("lazy") is True)}

    async def stop(_params: dict[str, Any]) -> dict[str, Any]:
        stopping.set()
        return {"pid": os.getpid()}

    node.control.handlers.update(mount=mount, unmount=unmount, stop=stop)


def describe(info: "MountInfo") -> dict[str, Any]:
    """Returns the facts about a mount for status and start-up summary."""
    return {
        "mountpoint": str(info.mountpoint),
        "mode": info.mode,
        "reason": info.reason,
        "hides": info.hides,
    }
