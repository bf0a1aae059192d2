"""Byte ranges locked through a view are locked on the mount too, and vice versa.

The mount's locks stay in its kernel, which knows nothing of a view's. So a view's kernel asks the
node for each lock, and the node takes it on the mount, by a descriptor of its own for each open
file of the view (locks of open files, fcntl(2)), where it conflicts with those of programs, and
theirs with it. If the mount itself leaves locks to the node (`kvfs.cluster.cluster_locks`), so does
the view.

Locks belong to open files of the view, not to its processes, as an NFS server's do. They end with
the open files.
"""

import errno
import fcntl
import os
import struct
import threading
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING, Final, NoReturn

import trio

from gateway.fuse.channel.handlers import Handler, KernelRequest
from gateway.fuse.channel.lock_requests import LockHandlers
from gateway.fuse.codec import protocol
from gateway.fuse.codec.protocol import Op
from gateway.fuse.views.lock_opener import LockOpener
from kvfs.base.errors import Conflict
from kvfs.cluster.cluster_locks import Locks, LockTarget
from kvfs.policy.lock_journal import JournaledLock

if TYPE_CHECKING:
    from gateway.fuse.views.view import MountViews

_OFD_GETLK, _OFD_SETLK = 36, 37
_FLOCK: Final = struct.Struct("hhqqi4x")
"""type, whence, start, length (0: to the end of any file), pid."""
_LAST: Final = (1 << 63) - 1
_PAUSES_S: Final = (0.01, 0.25)


class ViewLocks:
    """The lock handlers of one view."""

    def __init__(self, views: "MountViews", namespace: int, held: dict[int, int]) -> None:
        """`held`: descriptors that an earlier daemon had on the mount, by the view's handles."""
        self._open_files = views.operations.open_files
        self._node_locks: Locks | None = views.operations.locks
        """The node's locks, if the mount leaves locks to the node."""
        journal = views.backing.journal
        self._keeps = views.kept if journal is not None else None
        self._journal = journal.locks if journal is not None else None
        self._namespace = namespace
        self._opener = LockOpener(views.mountpoint, views.operations.lock_openers)
        self._opening = trio.Lock()
        self._held = held
        """Descriptors on the mount, by the view's handles."""
        self._owners: dict[int, set[tuple[LockTarget, int]]] = {}
        """The owners that have asked the node for locks, by the view's handles."""
        self._denied: dict[int, tuple[int, ...]] = {}
        """The last denied lock, by the view's handles: what is in its way has not been told."""

    def table(self) -> dict[int, Handler]:
        return {Op.GETLK: self.getlk, Op.SETLK: self.setlk, Op.SETLKW: self.setlkw}

    async def getlk(self, r: KernelRequest) -> bytes:
        """Raises BlockingIOError if a lock is in the way that no denial before this request has
        announced: NFS-Ganesha 4.3 takes any answer for "no lock is in the way", but asks after a
        denial which lock it was."""
        fh, *wish = _asked(r)
        if self._node_locks is not None:
            told = await self._by_node(r).getlk(r)
        else:
            told = _in_the_way(await self._descriptor(fh), r)
        denied = self._denied.pop(fh, ())
        if protocol.LOCK.unpack(told)[2] != fcntl.F_UNLCK and denied != tuple(wish):
            self._deny(r)
        return told

    def _deny(self, r: KernelRequest) -> NoReturn:
        fh, *wish = _asked(r)
        self._denied[fh] = tuple(wish)
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    async def setlk(self, r: KernelRequest) -> bytes:
        try:
            return await self._set(r, LockHandlers.setlk)
        except (BlockingIOError, Conflict):
            self._deny(r)

    async def setlkw(self, r: KernelRequest) -> bytes:
        pause_s, most_s = _PAUSES_S
        while True:
            try:
                return await self._set(r, LockHandlers.setlkw)
            except BlockingIOError:
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, most_s)

    async def _set(
        self, r: KernelRequest, by_node: Callable[[LockHandlers, KernelRequest], Awaitable[bytes]]
    ) -> bytes:
        if self._node_locks is not None:
            return await by_node(self._by_node(r), r)
        fcntl.fcntl(await self._descriptor(_asked(r)[0]), _OFD_SETLK, _wish(r))
        return b""

    async def released(self, fh: int) -> None:
        """Drops the locks of a handle that is released. Raises NoLocks."""
        self._denied.pop(fh, None)
        fd = self._held.pop(fh, None)
        if fd is not None:
            await self._let_go(fh, fd)
        await self._close_owners(fh)

    async def _close_owners(self, fh: int) -> None:
        for place, owner in self._owners.pop(fh, ()):
            assert self._node_locks is not None
            await self._node_locks.closed(place, self._node_locks.owner(owner))
            if self._journal is not None:
                self._journal.remove(self._row(fh, place, owner))

    def _row(self, fh: int, place: LockTarget, owner: int) -> JournaledLock:
        return JournaledLock(*place, owner, start=self._namespace, fh=fh)

    def has_locked(self, fh: int) -> bool:
        """Returns whether the handle may have locks."""
        return fh in self._held or fh in self._owners

    def _by_node(self, r: KernelRequest) -> LockHandlers:
        """Returns the handlers of the node's locks; an owner gives back its locks with its
        handle. Raises NoLocks."""
        assert self._node_locks is not None
        fh, owner = protocol.LK_IN.unpack_from(r.body)[:2]
        place, owners = LockTarget(r.nodeid, False), self._owners.setdefault(fh, set())
        if self._journal is not None and (place, owner) not in owners:
            self._journal.enter(self._row(fh, place, owner))
        owners.add((place, owner))
        return LockHandlers(self._node_locks)

    async def _descriptor(self, fh: int) -> int:
        """Returns a descriptor on the mount for the file that the view has open."""
        async with self._opening:
            held = self._held.get(fh)
            if held is not None:
                return held
            handle = self._open_files.handle(fh)
            access = os.O_RDWR if handle.writable else os.O_RDONLY
            number = self._open_files.number(handle.file.ino)
            fd = await self._open(number, access)
            self._held[fh] = fd
            if self._keeps is not None:
                await trio.to_thread.run_sync(self._keeps.put_lock, self._namespace, fh, fd)
            return fd

    async def _open(self, number: int, access: int) -> int:
        """Opens a file that is never written by this descriptor, whose close so asks nothing of the
        mount: one that waited for a daemon would keep this process from ending, as would the open
        itself, which another process does. Raises OSError. Cancelled: nobody waits for the mount,
        which may not be served any more."""
        left = threading.Event()

        def opened() -> int:
            fd = self._opener.open(number, access)
            if left.is_set():
                os.close(fd)
            return fd

        try:
            return await trio.to_thread.run_sync(opened, abandon_on_cancel=True)
        except trio.Cancelled:
            left.set()
            raise

    def close(self) -> None:
        """Ends what opens files: the view ends."""
        self._opener.close()

    async def go_on(self, handles: Collection[int]) -> None:
        """Goes on with the locks of these handles, and drops those of handles that the view's
        kernel has no more."""
        rows = self._journal.all() if self._journal is not None else []
        for each in rows:
            if each.fh and each.start == self._namespace:
                place = LockTarget(each.ino, each.whole)
                self._owners.setdefault(each.fh, set()).add((place, each.owner))
        for fh in self._owners.keys() - set(handles):
            await self._close_owners(fh)
        for fh, fd in list(self._held.items()):
            if fh not in handles:
                del self._held[fh]
                await self._let_go(fh, fd)

    async def _let_go(self, fh: int, fd: int) -> None:
        _unlock(fd)
        if self._keeps is not None:
            await trio.to_thread.run_sync(self._keeps.drop_lock, self._namespace, fh)
        _close(fd)


def _unlock(fd: int) -> None:
    fcntl.fcntl(fd, _OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))


def _close(fd: int) -> None:
    """Closes in a thread that nobody waits for: a close asks the mount, which may have ended."""
    threading.Thread(target=os.close, args=(fd,), name="kvfs-unlock", daemon=True).start()


def _in_the_way(fd: int, r: KernelRequest) -> bytes:
    """Returns the answer to GETLK: another descriptor's lock, if there is one in the way."""
    _, start, end, _ = _asked(r)
    kind, _, at, length, pid = _FLOCK.unpack(fcntl.fcntl(fd, _OFD_GETLK, _wish(r)))
    if kind == fcntl.F_UNLCK:
        return protocol.LOCK.pack(start, end, fcntl.F_UNLCK, 0)
    end = at + length - 1 if length else _LAST
    return protocol.LOCK.pack(at, end, kind, max(pid, 0))


def _asked(r: KernelRequest) -> tuple[int, int, int, int]:
    """Returns (handle, first and last byte, F_RDLCK, F_WRLCK or F_UNLCK)."""
    fh, _, start, end, kind, _, _, _ = protocol.LK_IN.unpack_from(r.body)
    return fh, start, end, kind


def _wish(r: KernelRequest) -> bytes:
    _, start, end, kind = _asked(r)
    length = 0 if end >= _LAST else end - start + 1
    return _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)


assert errno.EAGAIN == errno.EWOULDBLOCK, "BlockingIOError is what a lock in the way raises"
