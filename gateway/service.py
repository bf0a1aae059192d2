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

from gateway import mountpoint, privileges
from gateway.fuse.channel import device
from gateway.holder import claim
from gateway.node_start import Start
from gateway.service_manager import ServiceManager
from kvfs.base import descriptors, priority
from kvfs.base.config import Config
from kvfs.base.errors import Busy, Invalid, NotFound, Unavailable
from kvfs.node import Node, open_node
from kvfs.node.status import status_of

if TYPE_CHECKING:
    from gateway.fuse.mount import MountInfo, Outliving
    from gateway.takeover import Takeover

MOUNT_DEADLINE_S: Final = 20.0
UNMOUNT_DEADLINE_S: Final = 20.0
log = logging.getLogger(__name__)


class MountKeeper:
    """The mount of a node, on request. Its nursery must end before the node does."""

    def __init__(self, node: Node, nursery: trio.Nursery, takeover: "Takeover | None") -> None:
        """`takeover`: None where the node has no mount that outlives it."""
        self._takeover = takeover
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
        outliving = self._outliving()
        try:
            if outliving is not None and outliving.taken is not None:
                return await self._go_on(directory, outliving, self._scope)
            if mountpoint.prepare(directory, self._node.config.store):
                log.warning("a stale mount at %s was taken away", directory)
            with contextlib.closing(mountpoint.hold(directory)) as bare:
                if bare.hides:
                    log.warning("%s", mountpoint.hidden(directory, bare.hides))
                with trio.fail_after(MOUNT_DEADLINE_S):
                    self.info = await self._nursery.start(
                        self._serve, directory, bare.hides, self._scope, outliving
                    )
                bare.close_to_writers()
        except trio.TooSlowError:
            raise Unavailable(f"the mount at {directory} did not answer in time") from None
        finally:
            if self.info is None:
                self._scope = None
        self._node.tell_return(returns=self.info.takeover_s > 0)
        return self.info

    def _outliving(self) -> "Outliving | None":
        """Returns how this mount outlives its daemon; None: it ends with it."""
        outliving = self._takeover.outliving() if self._takeover is not None else None
        if outliving is None or outliving.taken is not None:
            return outliving
        if self._node.former_writers.left:  # the next daemon would not part them from the files
            log.warning(
                "the mount ends with this daemon, in spite of takeover_s: files that programs write"
                " by an earlier mount are still copied"
            )
            return None
        return outliving

    async def _go_on(
        self, directory: Path, outliving: "Outliving", scope: trio.CancelScope
    ) -> "MountInfo":
        """Goes on with the mount of the daemon before. Raises TooSlowError."""
        hides = outliving.agreement().options.hides
        with trio.fail_after(MOUNT_DEADLINE_S):
            info: MountInfo = await self._nursery.start(
                self._serve, directory, hides, scope, outliving
            )
        log.info("the mount at %s goes on: its daemon before is no more", directory)
        self.info = info
        return info

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

    def require_takeover(self) -> "Takeover":
        """Returns what hands the mount on. Raises Invalid if the mount ends with this daemon."""
        if self._takeover is None or self.info is None or not self.info.takeover_s:
            raise Invalid(
                "no mount of this node outlives it (the setting takeover_s): stop it by `kvfs down`"
                " and start it by `kvfs up`"
            )
        return self._takeover

    def started(self) -> None:
        """Makes the mount this daemon's for good, if it was another's: the node serves."""
        self._node.ready()
        if self._takeover is not None:
            self._takeover.hand_over.started()

    async def leave(self) -> None:
        """Leaves the mount to the next daemon when the node stops, once its start is over. Raises
        Invalid if the mount ends with this one."""
        takeover = self.require_takeover()
        await takeover.hand_over.serves.wait()
        claim.expect(self._node.store.run)
        takeover.hand_over.is_asked = True
        self._node.hand_over()

    async def _serve(
        self,
        directory: Path,
        hides: list[str],
        scope: trio.CancelScope,
        outliving: "Outliving | None",
        *,
        task_status: "trio.TaskStatus[MountInfo]",
    ) -> None:
        # Imported here: a node without a mount needs no libfuse.
        from gateway.fuse import mount

        options = mount.options(self._node.config, directory, hides)
        try:
            with scope:
                await mount.serve(self._node, options, outliving, task_status=task_status)
            if not scope.cancel_called:
                log.warning(
                    "%s was unmounted from outside; the node goes on: `kvfs mount` mounts again",
                    directory,
                )
        finally:
            self.info = self._scope = None
            if outliving is None or not outliving.hand_over.leaves:
                self._node.tell_return(returns=False)
            self._gone.set()


class Companion(Protocol):
    """A service beside a node and its mount, which knows them only by the node."""

    async def __call__(self, node: Node, *, task_status: trio.TaskStatus[None]) -> None:
        """Serves, and reports it by `task_status`. Cancelled: ends in order, in its own time."""


async def run(
    config: Config,
    start: Start,
    *,
    on_ready: Callable[[dict[str, Any]], None],
    companions: Sequence[Companion] = (),
) -> bool:
    """Runs a node until SIGTERM, SIGINT or a `stop` or `hand-over` request; returns whether it
    leaves its mount to the next daemon.

    Companions start while the mount is made, and end before it goes. `on_ready` gets the status
    when all of them serve and, if `start` says so, the mount answers too. The service manager is
    told so and, while the event loop runs, that it does. Raises the obstacles to the start.
    """
    descriptors.allow_most()
    refused = priority.raise_to(config.priority)
    privileges.give_up()
    manager = ServiceManager(os.environ)

    def ready(status: dict[str, Any]) -> None:
        on_ready(status)
        manager.ready(f"serves {config.store}" + (f" at {config.mount}" if start.mounted else ""))
        if refused:  # not before: the message of a start that fails stands alone
            log.info("the node has no raised priority: %s", refused)

    stopping, opening, takeover = trio.Event(), _Opening(), None
    # Outside the nursery: a start that fails at once ends the task that listens, not the receiver
    # under it.
    with (
        contextlib.closing(manager),
        trio.open_signal_receiver(*_ending_signals()) as signals,
    ):
        async with trio.open_nursery() as beside:
            beside.start_soon(_stop_on_signal, signals, stopping, opening)
            beside.start_soon(_tell_end, stopping, manager)
            beside.start_soon(manager.keep_alive)
            with opening.scope:
                takeover = _takeover(config, start)
                inherit = takeover.inherit if takeover is not None else None
                async with open_node(config, inherit) as node:
                    opening.is_over = True
                    await _serve(node, stopping, start, ready, companions, takeover)
            beside.cancel_scope.cancel()
    return takeover is not None and takeover.hand_over.is_asked


def _takeover(config: Config, start: Start) -> "Takeover | None":
    """Returns None where no mount outlives its daemon, nor can have outlived the one before."""
    if (
        not start.takes_over
        and not config.takeover_s
        and not (config.store / "run" / claim.NAME).exists()
    ):
        return None
    # Imported here: a node without a mount needs no libfuse.
    from gateway.takeover import Takeover

    return Takeover(config, start)


async def _serve(
    node: Node,
    stopping: trio.Event,
    start: Start,
    on_ready: Callable[[dict[str, Any]], None],
    companions: Sequence[Companion],
    takeover: "Takeover | None",
) -> None:
    """Serves an open node, until it is to stop."""
    node.reports["confinement"] = privileges.report
    async with trio.open_nursery() as nursery:
        keeper = MountKeeper(node, nursery, takeover)
        _answer_requests(node, keeper, stopping, start)
        async with trio.open_nursery() as beside:
            async with trio.open_nursery() as starting:
                for companion in companions:
                    starting.start_soon(beside.start, companion, node)
                if start.mounted:
                    starting.start_soon(keeper.mount, node.config.mount)
            keeper.started()
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


async def _tell_end(stopping: trio.Event, manager: ServiceManager) -> None:
    await stopping.wait()
    manager.stopping()


def _answer_requests(node: Node, keeper: MountKeeper, stopping: trio.Event, start: Start) -> None:
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

    async def hand_over(_params: dict[str, Any]) -> dict[str, Any]:
        await keeper.leave()
        stopping.set()
        return {"pid": os.getpid()}

    async def successor(_params: dict[str, Any]) -> dict[str, Any]:
        if start.successor is None and not start.is_service:
            raise Invalid("the node was not started by `kvfs up --daemon`: whoever did restarts it")
        keeper.require_takeover()
        if start.successor is None:
            return {}
        return {
            "arguments": list(start.successor.arguments),
            "directory": start.successor.directory,
        }

    methods = {"mount": mount, "unmount": unmount, "stop": stop}
    methods |= {"hand-over": hand_over, "successor": successor}
    node.control.handlers.update(methods)


def describe(info: "MountInfo") -> dict[str, Any]:
    """Returns the facts about a mount for status and start-up summary."""
    return {
        "mountpoint": str(info.mountpoint),
        "mode": info.mode,
        "reason": info.reason,
        "hides": info.hides,
    }
