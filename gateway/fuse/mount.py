"""One mount from its beginning to its end: choose the mode, mount, serve, unmount.

| mode | requests | payload |
|---|---|---|
| passthrough | fast path | kernel to data file |
| relay | fast path | loop and worker threads between /dev/fuse and data file, page cache kept |
| libfuse | pyfuse3 alone | through Python |
"""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec
import pyfuse3
import trio

from gateway.fuse.channel import device as dev
from gateway.fuse.channel import mode_probe
from gateway.fuse.channel.backing_registry import BackingRegistry
from gateway.fuse.channel.dispatch import FastPath, server_socket
from gateway.fuse.channel.journaled_registry import JournaledRegistry
from gateway.fuse.channel.libfuse import LibfuseOperations
from gateway.fuse.channel.resent_requests import Became, ResentRequests, done_requests
from gateway.fuse.codec.protocol import Init
from gateway.fuse.files.kernel_inodes import KernelInodes
from gateway.fuse.files.open_file import Handle, OpenFile
from gateway.fuse.files.open_files import OpenFiles
from gateway.fuse.files.restored_files import JournaledOpenFiles
from gateway.fuse.notify.invalidation import Invalidator, KernelNotifier
from gateway.fuse.notify.sibling_kernels import MountMemory, Neighbours
from gateway.fuse.operations import Operations
from gateway.fuse.views.gone_on import GoneOn
from gateway.fuse.views.kept_views import KeptItem, ViewKeeper
from gateway.fuse.views.view import MountViews
from gateway.holder.claim import KeptMount
from gateway.holder.holding import HandOver, Keeping, kept
from gateway.holder.mount_journal import VIEWED, MountJournal
from gateway.node_start import Successor
from gateway.watchdog import watched
from kvfs.base import fuse_device
from kvfs.base.config import Config
from kvfs.base.errors import KvfsError, Unavailable
from kvfs.base.version import VERSION
from kvfs.cluster.cluster_locks import Locks
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


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """The terms on which the kernel and a daemon agreed for a mount that outlives the daemon."""

    options: MountOptions
    version: str
    """The version of the daemon, for the log."""
    init: bytes
    """The kernel's INIT."""
    passthrough: bool
    stack_depth: int
    direct_writes: bool
    direct_reads: bool
    readahead_kib: int
    reason: str
    locks: bool = False
    """Whether the kernel leaves locks to the mount."""


class Outliving(NamedTuple):
    """How a mount outlives its daemon."""

    run: Path
    wait_s: int
    successor: Successor | None
    hand_over: HandOver
    taken: KeptMount | None
    """The mount that outlived the daemon before; None: it is made anew."""
    keeper: ViewKeeper | None = None
    """The process that kept the views of that mount; None: there is none."""
    kept: Mapping[str, KeptItem] = {}
    """The things that it kept."""

    def agreement(self) -> Agreement:
        """Returns what the daemon before agreed on."""
        assert self.taken is not None
        return msgspec.msgpack.decode(self.taken.journal.about(), type=Agreement)


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
    takeover_s: int = 0
    """Seconds for which the mount waits for another daemon when this one has died; 0: it ends."""


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
    outliving: Outliving | None = None,
    *,
    task_status: trio.TaskStatus[MountInfo] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Mounts and serves, or goes on with a mount that was taken over; started with a MountInfo when
    the mount answers. Returns when it is unmounted.

    Cancelled: unmounts (lazily if files are open), publishes what open files hold, and ends. Raises
    what the device raises, and NotSupported for a mode that this machine cannot do."""
    choice = mode_probe.choose(options.mode, node.files.root)
    if choice.mode == "libfuse":
        await _serve_libfuse(node, options, choice, task_status)
    elif outliving is not None:
        await _serve_outliving(node, options, choice, outliving, task_status)
    else:
        await _serve_fast(node, options, choice, task_status)


async def _serve_fast(
    node: Node,
    options: MountOptions,
    choice: mode_probe.Choice,
    task_status: trio.TaskStatus[MountInfo],
) -> None:
    device = await _mounted(options)
    async with watched(options.mountpoint) as begun:
        await _serve_device(node, options, choice, device, begun, task_status)


async def _mounted(options: MountOptions) -> int:
    dev.require_little_endian()
    where = options.mountpoint
    return await trio.to_thread.run_sync(
        lambda: dev.mount_device(
            where, allow_other=options.allow_other, nosuid=not options.suid, nodev=not options.dev
        )
    )


async def _serve_outliving(
    node: Node,
    options: MountOptions,
    choice: mode_probe.Choice,
    outliving: Outliving,
    task_status: trio.TaskStatus[MountInfo],
) -> None:
    taken = outliving.taken
    journal = MountJournal.made() if taken is None else taken.journal
    device = await _mounted(options) if taken is None else taken.device
    keeping = Keeping(
        mountpoint=options.mountpoint,
        run=outliving.run,
        device=device,
        journal=journal,
        wait_s=outliving.wait_s,
        successor=outliving.successor,
        hand_over=outliving.hand_over,
        former=-1 if taken is None else taken.holder,
    )
    try:
        async with kept(keeping) as begun:
            served = _serve_device
            await served(node, options, choice, device, begun, task_status, outliving, journal)
    finally:
        journal.close()


async def _serve_device(
    node: Node,
    options: MountOptions,
    choice: mode_probe.Choice,
    device: int,
    watched_from: trio.Event,
    task_status: trio.TaskStatus[MountInfo],
    outliving: Outliving | None = None,
    journal: MountJournal | None = None,
) -> None:
    where = options.mountpoint
    ours, theirs = server_socket()
    agreed = outliving.agreement() if outliving is not None and outliving.taken else None
    backing = _registry(device, choice, agreed, journal)
    locks = _locks(node, agreed, journal)
    if locks is not None:
        backing.lock_flags = Init.POSIX_LOCKS | Init.FLOCK_LOCKS
    inodes, neighbours = KernelInodes(backing.holds), Neighbours()
    drops = mode_probe.cache_drop().available
    notifier = KernelNotifier(device, drops=drops, numbers=inodes.numbers)
    memory = MountMemory(notifier, neighbours)
    if journal is None:
        open_files = OpenFiles(node, backing, memory, [inodes])
    else:
        assert isinstance(backing, JournaledRegistry), "a mount with a journal has this one"
        first = journal.first_handle()
        open_files = JournaledOpenFiles(node, backing, memory, [inodes], first)
    operations = Operations(node, open_files, locks, journal)
    fast = FastPath(device, ours, operations, backing)
    pyfuse3.init(LibfuseOperations(operations), f"/dev/fd/{theirs.fileno()}", {"fsname=kvfs"})
    invalidator = Invalidator(operations, notifier)
    beside = fast.handlers.beside = neighbours.join(
        lambda _: True, invalidator.changed_beside, notifier.every_name, notifier.attributes
    )
    node.holders.mounted(open_files)
    try:
        with node.mounts.mounted(invalidator.changed, open_files.replaced.add) as describe:
            handles: list[tuple[int, Handle]] = []
            became: dict[int, Became] = {}
            if journal is not None:
                handles, became = await _keep_journal(
                    node, fast, operations, backing, journal, agreed
                )
            async with trio.open_nursery() as nursery:
                nursery.start_soon(operations.run)
                nursery.start_soon(pyfuse3.main)
                nursery.start_soon(_until_gone, fast, nursery.cancel_scope)
                nursery.start_soon(beside.run)
                with trio.fail_after(_START_DEADLINE_S):
                    await fast.initialised.wait()
                    await watched_from.wait()
                    reason = _settle(backing, node, choice) if agreed is None else agreed.reason
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
                    takeover_s=outliving.wait_s if outliving is not None else 0,
                )
                if journal is not None:
                    journal.describe(_agreement(options, fast, backing, info))
                describe(info)
                views = MountViews(nursery, operations, backing, neighbours, where, info.takeover_s)
                if outliving is not None and outliving.keeper is not None and journal is not None:
                    await views.go_on(_gone_on(outliving.keeper, outliving.kept, handles, became))
                with node.mounts.viewed(views):
                    task_status.started(info)
                    await trio.sleep_forever()
    except trio.TooSlowError:
        raise Unavailable(f"the kernel did not answer the mount of {where} in time") from None
    finally:
        is_left = outliving is not None and outliving.hand_over.leaves
        with trio.CancelScope(shield=True):
            if is_left:
                await operations.leave()
            else:
                await trio.to_thread.run_sync(dev.detach, where)
                await operations.close()
            if node.cluster is not None:
                node.cluster.engine.changes.witness = None
            if node.locks is not None:
                node.locks.keep_journal(None)
            node.holders.unmounted()
            if backing.passthrough and not is_left:
                await _part_from_writers(node)
            told = await notifier.close()
            dev.retire(device, ended=told and fast.workers_ended)
            ours.close()
            pyfuse3.close(unmount=False)
            theirs.detach()


def _locks(node: Node, agreed: Agreement | None, journal: MountJournal | None) -> Locks | None:
    """Returns the locks that the kernel leaves to the mount; None: it keeps all of them."""
    if node.locks is None:
        return None
    node.locks.keep_journal(None if journal is None else journal.locks)
    keeps = node.locks.any_reaches_cluster() if agreed is None else agreed.locks
    return node.locks if keeps else None


def _registry(
    device: int,
    choice: mode_probe.Choice,
    agreed: Agreement | None,
    journal: MountJournal | None,
) -> BackingRegistry:
    """Returns the registry of a mount: of one that is made, or as it was agreed on."""
    if agreed is None:
        passthrough, depth = choice.mode == "passthrough", choice.stack_depth
        direct_writes = mode_probe.direct_writes().available
        direct_reads = mode_probe.direct_reads().available
    else:
        passthrough, depth = agreed.passthrough, agreed.stack_depth
        direct_writes, direct_reads = agreed.direct_writes, agreed.direct_reads
    if journal is None:
        backing = BackingRegistry(device, passthrough, depth, direct_writes)
    else:
        backing = JournaledRegistry(device, passthrough, depth, direct_writes, journal)
    backing.direct_reads = direct_reads
    return backing


async def _keep_journal(
    node: Node,
    fast: FastPath,
    operations: Operations,
    backing: BackingRegistry,
    journal: MountJournal,
    agreed: Agreement | None,
) -> tuple[list[tuple[int, Handle]], dict[int, Became]]:
    """Begins to keep the journal, and goes on with what it says of a mount that was taken over.
    Returns all open handles with the numbers of their requests, and what became of requests."""
    assert isinstance(backing, JournaledRegistry), "a mount with a journal has this one"
    survivors = node.survivors
    handles: list[tuple[int, Handle]] = []
    known: set[int] = set()
    became = await done_requests(node, journal.notes())
    if agreed is not None and survivors is not None:
        ids = backing.go_on(survivors.numbers())
        requests = survivors.requests()
        assert isinstance(operations.open_files, JournaledOpenFiles), "likewise"
        restored, lost = await operations.open_files.restore(survivors, ids)
        handles = [(requests[each.fh], each) for each in restored]
        for entry in lost:
            journal.released(entry)
        fast.handlers.relist()
        if node.cluster is not None:  # others may have changed them
            known = {*survivors.numbers(), *(each.ino for _, each in journal.directories())}
        if operations.locks is not None:
            await operations.locks.go_on()
    fast.keep_journal(journal)
    if agreed is not None:
        own = [each for each in handles if not each[0] & VIEWED]
        notes = {request: note for request, note in became.items() if not request & VIEWED}
        resent = ResentRequests(operations, fast.handlers, backing, own, notes)
        fast.go_on(agreed.init, resent, known)
    if node.cluster is not None:
        node.cluster.engine.changes.witness = journal
    return handles, became


def _gone_on(
    keeper: ViewKeeper,
    items: Mapping[str, KeptItem],
    handles: Sequence[tuple[int, Handle]],
    became: Mapping[int, Became],
) -> GoneOn:
    """Returns what an earlier daemon left of the views."""
    return GoneOn(
        keeper,
        items,
        [(request, handle) for request, handle in handles if request & VIEWED],
        {request: note for request, note in became.items() if request & VIEWED},
    )


def _agreement(
    options: MountOptions, fast: FastPath, backing: BackingRegistry, info: MountInfo
) -> Agreement:
    return Agreement(
        options=options,
        version=VERSION,
        init=fast.init,
        passthrough=backing.passthrough,
        stack_depth=backing.stack_depth,
        direct_writes=backing.direct_writes,
        direct_reads=backing.direct_reads,
        readahead_kib=info.readahead_kib,
        reason=info.reason,
        locks=bool(backing.lock_flags),
    )


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
    device = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    """The device's number, before there is one: libfuse's operations come before its device, which
    is put in its place. libfuse closes its own when it likes; a number must not lead elsewhere
    under a thread."""
    notifier = KernelNotifier(device, drops=mode_probe.cache_drop().available)
    operations = Operations(node, OpenFiles(node, _NeverPassed(), notifier))
    before = fuse_device.descriptors_of("self")
    try:
        pyfuse3.init(LibfuseOperations(operations), where, _libfuse_options(options))
    except RuntimeError as e:
        with trio.CancelScope(shield=True):
            dev.retire(device, ended=await notifier.close())
        raise Unavailable(f"libfuse could not mount {where}: {e}") from None
    (libfuses,) = fuse_device.descriptors_of("self") - before
    os.dup2(libfuses, device, inheritable=False)
    async with watched(where) as begun:
        await _serve_through_libfuse(
            node, options, choice, notifier, operations, begun, task_status
        )


async def _serve_through_libfuse(
    node: Node,
    options: MountOptions,
    choice: mode_probe.Choice,
    notifier: KernelNotifier,
    operations: Operations,
    watched_from: trio.Event,
    task_status: trio.TaskStatus[MountInfo],
) -> None:
    where, open_files = options.mountpoint, operations.open_files
    invalidator = Invalidator(operations, notifier)
    node.holders.mounted(open_files)
    try:
        with node.mounts.mounted(invalidator.changed, open_files.replaced.add) as describe:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(operations.run)
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
            dev.retire(notifier.device, ended=await notifier.close())
            pyfuse3.close(unmount=False)
            await operations.close()
            node.holders.unmounted()


class _NeverPassed:
    """Stands in where no kernel reads and writes data files itself."""

    def may_pass(self, _file: OpenFile) -> bool:
        return False

    def closed(self, _file: OpenFile) -> None:
        pass

    def renamed(self, _file: OpenFile) -> None:
        pass

    def cut(self, _file: OpenFile, _is_cut: bool) -> None:
        pass

    def handle_released(self, _handle: Handle) -> None:
        pass


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
