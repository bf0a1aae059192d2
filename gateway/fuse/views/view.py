"""Views: one namespace mounted alone, as a filesystem with a superblock of its own.

A server that exports files by their handles (NFS) needs that: a superblock decodes a handle, and
nothing of another namespace has an inode in this one. A view belongs to the node's mount, and
shares its operations and open files: there is one data file for an inode, and one truth about it,
however many kernels' inodes lead there (`sibling_kernels`).

| | the mount | a view |
|---|---|---|
| its root | all namespaces | one namespace |
| pages of relayed files | kept by the kernel | none: read and written past them |
| attributes of what is not sealed | believed for a second | for a tenth |
| offsets in listings | of one stream | of any (`stable_listing`) |
"""

import errno
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import trio

from gateway.fuse.channel import device as dev
from gateway.fuse.channel import mode_probe, relay_payload
from gateway.fuse.channel.backing_registry import BackingRegistry
from gateway.fuse.channel.dispatch import FastPath
from gateway.fuse.channel.handlers import Handlers, KernelRequest
from gateway.fuse.channel.resent_requests import ResentRequests
from gateway.fuse.codec import protocol
from gateway.fuse.codec.protocol import IN_HEADER, Op
from gateway.fuse.files.kernel_inodes import KernelInodes
from gateway.fuse.notify.invalidation import KernelNotifier, unlinked
from gateway.fuse.notify.sibling_kernels import Neighbours
from gateway.fuse.operations import Operations
from gateway.fuse.views.gone_on import GoneOn
from gateway.fuse.views.kept_views import KeptView, KeptViews, views_of
from gateway.fuse.views.stable_listing import StableListings
from gateway.fuse.views.view_backing import ViewBacking
from gateway.fuse.views.view_locks import ViewLocks
from gateway.holder.mount_journal import mark_of
from kvfs.base import detach
from kvfs.base.errors import Busy, KvfsError, NotFound, Stale, Unavailable
from kvfs.meta.records import ROOT_INODE, Flag, Inode, namespace_of, namespace_root
from kvfs.tree import tree
from kvfs.tree.changes import Change

_UNSEALED_S: Final = 0.1
_START_DEADLINE_S: Final = 20.0
log = logging.getLogger(__name__)


class Lookups:
    """The lookup counts of a view's kernel, among those of the node."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._counts: dict[int, int] = {}

    def looked_up(self, ino: int, count: int = 1) -> None:
        """Like `Holders.looked_up`."""
        self._counts[ino] = self._counts.get(ino, 0) + count
        self._operations.holders.looked_up(ino, count)

    def forget(self, ino: int, count: int) -> None:
        """Notes that the kernel gives back look-ups; never more than it was given."""
        held = self._counts.get(ino, 0)
        count = min(count, held)
        if count == held:
            self._counts.pop(ino, None)
        else:
            self._counts[ino] = held - count
        if count:
            self._operations.forget(ino, count)

    def forget_all(self) -> None:
        """Notes that the view has gone."""
        for ino, count in list(self._counts.items()):
            self.forget(ino, count)


class ViewHandlers(Handlers):
    """The handlers of one namespace."""

    keeps_new = True  # an NFS client writes on by the handle that it was given

    def __init__(
        self,
        operations: Operations,
        backing: ViewBacking,
        inodes: KernelInodes,
        notifier: KernelNotifier,
        root: int,
        locks: ViewLocks,
    ) -> None:
        super().__init__(operations, backing, root, inodes)
        self._notifier = notifier
        self._locks = locks
        self.waiting.update(locks.table())
        self._view_backing = backing
        self.lookups = Lookups(operations)
        self._holders = self.lookups
        self.listings = StableListings(operations.node)
        self._listings = self.listings

    def entry(self, ino: int, inode: Inode) -> bytes:
        if ino == self.root:  # the kernel holds its root without counting
            return self._shown(ino, inode)
        return super().entry(ino, inode)

    def _shown(self, ino: int, inode: Inode) -> bytes:
        coherence = self._coherence
        names_s = protocol.LONG_S if coherence is None else coherence.entry_s(ino)
        body = protocol.entry_for(ino, inode, names_s, self._attributes_s(inode))
        if ino == self.root:
            return ROOT_INODE.to_bytes(8, "little") + body[8:]
        return body if coherence is None else self._numbered(ino, inode, body)

    def _attributes(self, ino: int, inode: Inode) -> bytes:
        return protocol.attr_reply_for(ino, inode, self._attributes_s(inode))

    def _attributes_s(self, inode: Inode) -> float:
        seconds = super()._attributes_s(inode)
        is_fixed = inode.flags & Flag.SEALED or inode.mode & 0o170000 != 0o100000
        return seconds if is_fixed else min(seconds, _UNSEALED_S)

    def _told(self, parent: int, name: bytes, ino: int = 0) -> None:
        self.listings.changed(parent)
        super()._told(parent, name, ino)

    def _told_of_data(self, ino: int) -> None:
        # The mount's kernel may have pages of what it relays.
        self._told(ino, b"", ino)

    async def lookup(self, r: KernelRequest) -> bytes:
        if r.nodeid == self.root and bytes(r.body[:-1]) == b"..":
            raise Stale("above the root of an export there is nothing")
        return await super().lookup(r)

    async def opendir(self, _r: KernelRequest) -> bytes:
        return protocol.OPEN_OUT.pack(0, 0, 0)

    def _listed(self, r: KernelRequest, _fh: int) -> int:
        return r.nodeid

    async def readdir(self, r: KernelRequest) -> bytes:
        return self._unkept(r, await super().readdir(r))

    async def readdirplus(self, r: KernelRequest) -> bytes:
        return self._unkept(r, await super().readdirplus(r))

    def _unkept(self, r: KernelRequest, reply: bytes) -> bytes:
        """Makes the kernel forget a listing at its end. A kernel that opens directories without
        asking keeps each listing whose end it has seen, and uses the middle of it whatever has
        changed; it keeps none of it while it sees the end."""
        if not reply:
            self._notifier.listing(ROOT_INODE if r.nodeid == self.root else r.nodeid)
        return reply

    async def release(self, r: KernelRequest) -> bytes:
        fh = protocol.RELEASE_IN.unpack_from(r.body)[0]
        self._view_backing.released(fh)
        try:
            return await super().release(r)
        finally:
            if self._locks.has_locked(fh):
                await detach.aside()
                with trio.CancelScope(shield=True):  # nobody else gives them back
                    await self._locks.released(fh)


class ViewPath(FastPath):
    """Serves one view."""

    def __init__(
        self, device: int, operations: Operations, backing: ViewBacking, handlers: ViewHandlers
    ) -> None:
        super().__init__(device, None, operations, backing, handlers)
        self._lookups = handlers.lookups
        self._namespace = namespace_of(handlers.root)

    def _heed(self, init: bytes) -> None:
        super()._heed(init)
        if self.kernel_minor >= protocol.NO_OPENDIR_MINOR:
            del self._handlers.inline[Op.OPENDIR]  # told so, it opens directories without asking

    def _dispatch_journaled(self, n: int) -> None:
        if self._is_foreign():
            self._dispatch(n)
        else:
            super()._dispatch_journaled(n)

    def _is_foreign(self) -> bool:
        nodeid = IN_HEADER.unpack_from(self._buffer)[3]
        return nodeid > ROOT_INODE and namespace_of(nodeid) != self._namespace

    def _dispatch(self, n: int) -> None:
        """Refuses requests for inodes of another namespace, which a handle may name."""
        _, opcode, unique, _, _, _, _, _, _ = IN_HEADER.unpack_from(self._buffer)
        if not self._is_foreign():
            super()._dispatch(n)
        elif opcode != Op.FORGET:
            relay_payload.reply_error(self._device, unique, errno.ESTALE)

    def _forget_file(self, ino: int, lookups: int) -> None:
        self._lookups.forget(ino, lookups)


class _Forgetting:
    """Tells a view's kernel of changes."""

    def __init__(
        self, operations: Operations, notifier: KernelNotifier, handlers: ViewHandlers
    ) -> None:
        self._operations = operations
        self._notifier = notifier
        self._listings = handlers.listings
        self._root = handlers.root
        self._namespace = namespace_of(handlers.root)

    def shows(self, ino: int) -> bool:
        """Returns whether an inode is in this namespace."""
        return namespace_of(ino) == self._namespace

    async def changed(self, changes: Sequence[Change]) -> None:
        """Returns when the kernel has forgotten what these changes made untrue. Raises
        Unavailable."""
        ours = [each for each in changes if self.shows(each.parent or each.ino)]
        if not ours:
            return
        for each in ours:
            self._listings.changed(each.parent)
        gone = await unlinked(self._operations.engine, ours)
        await self._notifier.forget(
            [Change(self._number(parent), name, self._number(ino)) for parent, name, ino in ours],
            gone,
        )

    def attributes(self, ino: int) -> None:
        """Like `KernelNotifier.attributes`."""
        if self.shows(ino):
            self._notifier.attributes(self._number(ino))

    def replaced(self, ino: int) -> None:
        """Notes that others replaced the content of an inode; there are no pages of it here."""

    def _number(self, ino: int) -> int:
        return ROOT_INODE if ino == self._root else ino


class _View:
    """A view that is mounted, or about to be."""

    def __init__(self, directory: str, before: KeptView | None = None) -> None:
        """`before`: the view is an earlier daemon's."""
        self.directory = directory
        self.before = before
        self.scope = trio.CancelScope()
        self.gone = trio.Event()
        self.is_served = False
        self.is_read_only = before is not None and before.is_read_only
        self.init = b""
        self.device = -1


class MountViews:
    """The views of a node's mount."""

    def __init__(
        self,
        nursery: trio.Nursery,
        operations: Operations,
        backing: BackingRegistry,
        neighbours: Neighbours,
        mountpoint: str,
        outlives_s: int = 0,
    ) -> None:
        """`nursery`: the mount's, with which the views end. `outlives_s`: seconds for which the
        mount waits for another daemon when this one has died; 0: it ends."""
        self._nursery = nursery
        self.mountpoint = mountpoint
        self.outlives_s = outlives_s
        self.operations = operations
        self.backing = backing
        self.neighbours = neighbours
        self.kept: Final = KeptViews()
        self.gone_on: GoneOn | None = None
        """The remains of an earlier daemon; None: there are none."""
        self._views: dict[int, _View] = {}
        """The views by namespace."""

    def __contains__(self, namespace: int) -> bool:
        return namespace in self._views

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._views))

    def directories(self) -> dict[int, str]:
        """Returns where each is mounted."""
        return {namespace: view.directory for namespace, view in self._views.items()}

    async def go_on(self, gone_on: GoneOn) -> None:
        """Goes on with the views of an earlier daemon; returns when they are served."""
        self.gone_on = gone_on
        self.kept.went_on(gone_on.items, gone_on.keeper)
        for namespace, before in views_of(gone_on.items).items():
            try:
                await self._start(namespace, _View(before.directory, before))
            except (KvfsError, OSError) as error:
                log.error("the view at %s does not go on: %s", before.directory, error)

    async def add(self, namespace: int, directory: Path) -> None:
        """Mounts a namespace at an existing directory; returns when the view answers, and is kept.

        Raises Unavailable past a deadline, NotFound (no such namespace), Busy (it has a view
        already), and what mounting raises. Cancelled: nothing stays mounted."""
        if namespace in self._views:
            raise Busy("the namespace has a view already")
        await self._start(namespace, _View(str(directory)))

    async def _start(self, namespace: int, view: _View) -> None:
        directory = view.directory
        self._views[namespace] = view
        try:
            with trio.fail_after(_START_DEADLINE_S):
                await self._nursery.start(self._serve, namespace, view)
        except trio.TooSlowError:
            raise Unavailable(f"the view at {directory} did not answer in time") from None
        except RuntimeError as error:  # it was unmounted before it answered, or the mount has gone
            raise Unavailable(f"the view at {directory} has gone: {error}") from None
        view.is_served = True

    async def set_read_only(self, namespace: int, *, read_only: bool) -> None:
        """Makes a view refuse changes, or accept them again. A read-only view keeps no access
        times, so its kernel does not ask for them after each read by passthrough.

        Raises Busy (a file is open there for writing), NotFound (there is no such view),
        AccessDenied, Unavailable."""
        view = self._views.get(namespace)
        if view is None:
            raise NotFound("the namespace has no view")
        if view.is_read_only != read_only:
            await trio.to_thread.run_sync(
                lambda: dev.set_read_only(view.directory, read_only=read_only)
            )
            view.is_read_only = read_only
            await self.keep(namespace, view)

    async def keep(self, namespace: int, view: _View) -> None:
        """Has a view whose kernel has agreed be kept, as it is now."""
        put = partial(self.kept.put_view, is_read_only=view.is_read_only)
        about = view.directory, view.init, view.device
        await trio.to_thread.run_sync(put, namespace, *about)

    async def remove(self, namespace: int) -> None:
        """Unmounts a view and closes what is open there. Does nothing if there is none."""
        view = self._views.get(namespace)
        if view is not None:
            view.scope.cancel()
            await view.gone.wait()

    async def _serve(
        self,
        namespace: int,
        view: _View,
        *,
        task_status: trio.TaskStatus[None],
    ) -> None:
        try:
            with view.scope:
                await _serve(self, namespace, view, task_status)
        except* (KvfsError, OSError) as group:
            error = innermost(group)
            if not view.is_served:
                raise error from None
            log.error("the view at %s has ended: %s", view.directory, error)
        finally:
            del self._views[namespace]
            view.gone.set()


async def _serve(
    views: MountViews, namespace: int, view: _View, task_status: trio.TaskStatus[None]
) -> None:
    operations, root, directory = views.operations, namespace_root(namespace), view.directory
    before = view.before
    if before is None:
        await _require(operations, root)
        view.device = await trio.to_thread.run_sync(
            lambda: dev.mount_device(directory, allow_other=True, nosuid=True, nodev=True)
        )
    else:
        view.device = before.device
    device = view.device
    backing = ViewBacking(device, views.backing, operations.open_files.replaced)
    locks = ViewLocks(views, namespace, before.locks if before is not None else {})
    inodes = KernelInodes(backing.holds)
    drops = mode_probe.cache_drop().available
    notifier = KernelNotifier(device, drops=drops, numbers=inodes.numbers)
    handlers = ViewHandlers(operations, backing, inodes, notifier, root, locks)
    path = ViewPath(device, operations, backing, handlers)
    kernels = operations.open_files.kernels
    kernels.append(inodes)
    forgetting = _Forgetting(operations, notifier, handlers)
    neighbour = views.neighbours.join(
        forgetting.shows, forgetting.changed, notifier.every_name, forgetting.attributes
    )
    handlers.beside = neighbour
    mounts = operations.node.mounts
    if views.backing.journal is not None:
        path.keep_journal(views.backing.journal, mark_of(namespace))
    resent = _resent(views, namespace, backing, handlers) if before is not None else None
    try:
        if before is not None:
            await _require(operations, root)
            await locks.go_on(backing.left())
        handlers.lookups.looked_up(root)
        await operations.introductions.read(
            lambda t: operations.introductions.meet(root, tree.read_inode(t, root))
        )
        if before is not None and resent is not None:
            is_shared = operations.coherence is not None  # others may have changed what is open
            path.go_on(before.init, resent, backing.numbers() if is_shared else ())
        with mounts.listening(forgetting.changed, forgetting.replaced):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_until_gone, path, nursery.cancel_scope)
                nursery.start_soon(neighbour.run)
                await path.initialised.wait()
                view.init = path.init
                if before is None:
                    await views.keep(namespace, view)
                task_status.started()
    finally:
        neighbour.leave()
        kernels.remove(inodes)
        locks.close()
        with trio.CancelScope(shield=True):
            if not operations.node.is_handed_over:
                await trio.to_thread.run_sync(dev.detach, directory)
                await _release(operations, backing, locks)
                handlers.lookups.forget_all()
                await trio.to_thread.run_sync(views.kept.drop_view, namespace)
            told = await notifier.close()
            dev.retire(device, ended=told and path.workers_ended)


def _resent(
    views: MountViews, namespace: int, backing: ViewBacking, handlers: ViewHandlers
) -> ResentRequests:
    """Takes over what the view's kernel has of an earlier daemon; returns the requests that come
    again."""
    gone_on = views.gone_on
    assert gone_on is not None, "it left the view"
    handles = gone_on.handles_of(namespace)
    backing.go_on([each for _, each in handles], views.backing.backings_of_view(namespace))
    handlers.inodes.go_on({each.number: each.file for _, each in handles})
    notes = gone_on.notes_of(namespace)
    return ResentRequests(views.operations, handlers, backing, handles, notes)


async def _require(operations: Operations, root: int) -> None:
    """Raises NotFound if there is no such namespace."""
    try:
        await operations.engine.read(lambda t: tree.read_inode(t, root))
    except Stale:
        raise NotFound("there is no such namespace") from None


async def _until_gone(path: ViewPath, scope: trio.CancelScope) -> None:
    await path.run()
    scope.cancel()


async def _release(operations: Operations, backing: ViewBacking, locks: ViewLocks) -> None:
    """Closes what the kernel had open, publishing what was written."""
    for fh in backing.left():
        backing.released(fh)
        for release in (operations.release, locks.released):
            try:
                await release(fh)
            except (KvfsError, OSError) as error:
                log.error("what was written through a view is not recorded: %s", error)


def innermost(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the first error in the group that is no group."""
    first = group.exceptions[0]
    return innermost(first) if isinstance(first, BaseExceptionGroup) else first
