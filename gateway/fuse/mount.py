"""One mount from its beginning to its end: choose the mode, mount, serve, unmount.

| mode | requests | payload |
|---|---|---|
| passthrough | fast path | kernel to data file |
| relay | fast path | loop and worker threads between /dev/fuse and data file, page cache kept |
| libfuse | pyfuse3 alone | through Python |
"""

import logging
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final, Literal

import msgspec
import pyfuse3
import trio

from gateway.fuse.channel import device as dev
from gateway.fuse.channel import mode_probe
from gateway.fuse.channel.dispatch import BackingRegistry, FastPath, server_socket
from gateway.fuse.channel.libfuse import LibfuseOperations
from gateway.fuse.codec.protocol import Init
from gateway.fuse.files.open_file import OpenFile
from gateway.fuse.files.open_files import OpenFiles
from gateway.fuse.notify.invalidation import Invalidator, KernelNotifier
from gateway.fuse.notify.sibling_kernels import Neighbours
from gateway.fuse.operations import Operations
from gateway.fuse.views.view import MountViews
from gateway.watchdog import watched
from kvfs.base import fuse_device
from kvfs.base.config import Config
from kvfs.base.errors import KvfsError, Unavailable
from kvfs.node import Node

Mode = Literal["auto", "passthrough", "relay", "libfuse"]
_READAHEAD_KIB: Final = 8192
_START_DEADLINE_S: Final = 20.0
log = logging.getLogger(__name__)


class MountOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that a user may choose."""

    mountpoint: str
    mode: Mode = "auto"
    allow_other: bool = True
    suid: bool = False
    dev: bool = False
    hides: list[str] = []
    """Names in the directory that is mounted on."""


class MountInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a mount as it came to be."""

    mountpoint: str
    mode: str
    reason: str
    """The reason why it has this mode and not a faster one; empty for the fastest."""
    readahead_kib: int
    """0: the kernel's default stayed."""
    direct_writes: bool
    """Whether relayed writes of new files go past the mount's page cache."""
    direct_reads: bool
    """Whether reads of files that are still being fetched go past it too."""
    hides: list[str]
    """The first names in the directory beneath."""


def options(config: Config, mountpoint: Path, hides: list[str]) -> MountOptions:
    """Returns the node's settings for its mount."""
    return MountOptions(
        mountpoint=str(mountpoint),
        mode=config.mode,
        allow_other=config.allow_other,
        suid=config.suid,
        dev=config.dev,
        hides=hides,
    )


async def serve(
    node: Node,
    options: MountOptions,
    *,
    task_status: trio.TaskStatus[MountInfo] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Mounts and serves; started with a MountInfo when the mount answers. Returns when it is
    unmounted.

    Cancelled: unmounts (lazily if files are open), publishes what open files hold, and ends. Raises
    what the device raises, and NotSupported for a mode that this machine cannot do."""
    choice = mode_probe.choose(options.mode, node.files.root)
    if choice.mode == "libfuse":
        await _serve_libfuse(node, options, choice, task_status)
    else:
        await _serve_fast(node, options, choice, task_status)


async def _serve_fast(
    node: Node,
    options: MountOptions,
    choice: mode_probe.Choice,
    task_status: trio.TaskStatus[MountInfo],
) -> None:
    dev.require_little_endian()
    where = options.mountpoint
    device = await trio.to_thread.run_sync(
        lambda: dev.mount_device(
            where, allow_other=options.allow_other, nosuid=not options.suid, nodev=not options.dev
        )
    )
    async with watched(where) as begun:
        await _serve_device(node, options, choice, device, begun, task_status)


async def _serve_device(
    node: Node,
    options: MountOptions,
    choice: mode_probe.Choice,
    device: int,
    watched_from: trio.Event,
    task_status: trio.TaskStatus[MountInfo],
) -> None:
    where = options.mountpoint
    ours, theirs = server_socket()
    direct_writes = mode_probe.direct_writes().available
    backing = BackingRegistry(
        device, choice.mode == "passthrough", choice.stack_depth, direct_writes
    )
    backing.direct_reads = mode_probe.direct_reads().available
    open_files = _open_files(node, backing.closed)
    operations = Operations(node, open_files)
    open_files.may_pass = backing.may_pass
    if node.locks is not None and node.locks.any_reaches_cluster():
        operations.locks = node.locks
        backing.lock_flags = Init.POSIX_LOCKS | Init.FLOCK_LOCKS
    fast = FastPath(device, ours, operations, backing)
    pyfuse3.init(LibfuseOperations(operations), f"/dev/fd/{theirs.fileno()}", {"fsname=kvfs"})
    inodes = fast.handlers.inodes
    open_files.kernels.append(inodes)
    notifier = _notifier(device)
    notifier.numbers = inodes.numbers
    invalidator = Invalidator(operations, notifier)
    neighbours = Neighbours()
    beside = fast.handlers.beside = neighbours.join(
        lambda _: True, invalidator.changed_beside, notifier.every_name, notifier.attributes
    )
    open_files.renewing.forget_content = _forgetting_content(notifier, neighbours)
    open_files.forget_attributes = neighbours.forget_attributes
    open_files.forget_content = partial(notifier.inode, pages=True)
    try:
        with node.mounts.mounted(invalidator.changed, open_files.replaced.add) as describe:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(open_files.unrecorded.run)
                nursery.start_soon(pyfuse3.main)
                nursery.start_soon(_until_gone, fast, nursery.cancel_scope)
                nursery.start_soon(beside.run)
                with trio.fail_after(_START_DEADLINE_S):
                    await fast.initialised.wait()
                    await watched_from.wait()
                    reason = _settle(backing, node, choice)
                    readahead = await trio.to_thread.run_sync(
                        dev.set_readahead, where, _READAHEAD_KIB
                    )
                info = MountInfo(
                    mountpoint=where,
                    mode="passthrough" if backing.passthrough else "relay",
                    reason=reason,
                    readahead_kib=_READAHEAD_KIB if readahead else 0,
                    direct_writes=backing.direct_writes,
                    direct_reads=backing.direct_reads,
                    hides=options.hides,
                )
                describe(info)
                with node.mounts.viewed(
                    MountViews(nursery, operations, backing, neighbours, where)
                ):
                    task_status.started(info)
                    await trio.sleep_forever()
    except trio.TooSlowError:
        raise Unavailable(f"the kernel did not answer the mount of {where} in time") from None
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(dev.detach, where)
            await operations.close()
            if backing.passthrough:
                await _part_from_writers(node)
            told = await notifier.close()
            dev.retire(device, ended=told and fast.workers_ended)
            ours.close()
            pyfuse3.close(unmount=False)
            theirs.detach()


def _forgetting_content(
    notifier: KernelNotifier, neighbours: Neighbours
) -> Callable[[int], Awaitable[None]]:
    """Returns a function that makes the kernels forget a file's content: the mount alone has pages,
    all have sizes."""

    async def forget(ino: int) -> None:
        neighbours.forget_attributes(ino)
        await notifier.content(ino)

    return forget


async def _part_from_writers(node: Node) -> None:
    """Prepares for a mount that was unmounted in use: programs may go on writing past it."""
    try:
        await node.former_writers.part(at_once=True)
    except KvfsError as error:
        log.error("files that programs still write may be changed by them later: %s", error)


async def _until_gone(fast: FastPath, scope: trio.CancelScope) -> None:
    await fast.run()
    scope.cancel()


def _settle(backing: BackingRegistry, node: Node, choice: mode_probe.Choice) -> str:
    """Tries one registration of a backing file; if it fails, the mount is relayed. Returns the
    reason, if any."""
    if choice.mode != "passthrough":
        return choice.reason
    if not backing.passthrough:
        return "the kernel was built without FUSE passthrough (CONFIG_FUSE_PASSTHROUGH)"
    fd = node.files.tmpfile()
    try:
        dev.backing_close(backing.device, dev.backing_open(backing.device, fd))
    except OSError as e:
        backing.passthrough = False
        return f"the kernel refuses a backing file of this store: {e.strerror}"
    finally:
        os.close(fd)
    return ""


async def _serve_libfuse(
    node: Node,
    options: MountOptions,
    choice: mode_probe.Choice,
    task_status: trio.TaskStatus[MountInfo],
) -> None:
    where = options.mountpoint
    open_files = _open_files(node, lambda _: None)
    operations = Operations(node, open_files)
    before = fuse_device.descriptors_of("self")
    try:
        pyfuse3.init(LibfuseOperations(operations), where, _libfuse_options(options))
    except RuntimeError as e:
        raise Unavailable(f"libfuse could not mount {where}: {e}") from None
    (libfuses,) = fuse_device.descriptors_of("self") - before
    device = os.dup(libfuses)
    """libfuse closes its own when it likes; a number must not lead elsewhere under a thread."""
    async with watched(where) as begun:
        await _serve_through_libfuse(node, options, choice, device, operations, begun, task_status)


async def _serve_through_libfuse(
    node: Node,
    options: MountOptions,
    choice: mode_probe.Choice,
    device: int,
    operations: Operations,
    watched_from: trio.Event,
    task_status: trio.TaskStatus[MountInfo],
) -> None:
    where, open_files = options.mountpoint, operations.open_files
    notifier = _notifier(device)
    open_files.renewing.forget_content = notifier.content
    open_files.forget_attributes = notifier.attributes
    open_files.forget_content = partial(notifier.inode, pages=True)
    invalidator = Invalidator(operations, notifier)
    try:
        with node.mounts.mounted(invalidator.changed, open_files.replaced.add) as describe:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(open_files.unrecorded.run)
                nursery.start_soon(_libfuse_main, nursery.cancel_scope)
                with trio.fail_after(_START_DEADLINE_S):
                    await watched_from.wait()
                    readahead = await trio.to_thread.run_sync(
                        dev.set_readahead, where, _READAHEAD_KIB
                    )
                info = MountInfo(
                    mountpoint=where,
                    mode="libfuse",
                    reason=choice.reason,
                    readahead_kib=_READAHEAD_KIB if readahead else 0,
                    direct_writes=False,
                    direct_reads=False,
                    hides=options.hides,
                )
                describe(info)
                task_status.started(info)
                await trio.sleep_forever()
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(dev.detach, where)
            dev.retire(device, ended=await notifier.close())
            pyfuse3.close(unmount=False)
            await operations.close()


def _open_files(node: Node, on_closed: Callable[[OpenFile], None]) -> OpenFiles:
    return OpenFiles(
        node.volume, node.transfers, node.missing, node.boot, node.open_file_shares, on_closed
    )


def _notifier(device: int) -> KernelNotifier:
    return KernelNotifier(device, drops=mode_probe.cache_drop().available)


async def _libfuse_main(scope: trio.CancelScope) -> None:
    await pyfuse3.main()
    scope.cancel()


def _libfuse_options(options: MountOptions) -> set[str]:
    chosen = {"fsname=kvfs", "subtype=kvfs", "default_permissions"}
    if options.allow_other:
        chosen.add("allow_other")
    if os.geteuid() == 0:
        chosen |= {"suid" if options.suid else "nosuid", "dev" if options.dev else "nodev"}
    return chosen
