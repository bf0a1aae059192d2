"""Requests about locks, for a mount whose kernel leaves them to the node.

The kernel asks for a lock by SETLK or SETLKW, and tells of a close by FLUSH (fcntl's locks of the
process that closed) and by RELEASE (flock's, of the open file). It takes the answer EAGAIN for
"somebody else has it", and sends INTERRUPT if the waiting caller was sent a signal.
"""

import fcntl
from typing import NamedTuple

from gateway.fuse.channel.handlers import Handler, KernelRequest
from gateway.fuse.codec import protocol
from gateway.fuse.codec.protocol import Op
from kvfs.cluster.cluster_locks import Locks, LockTarget
from kvfs.policy.byte_range_locks import ByteRangeLock


class Wish(NamedTuple):
    """The lock that a request is about; `kind` is F_RDLCK, F_WRLCK or F_UNLCK."""

    place: LockTarget
    kind: int
    lock: ByteRangeLock


class LockHandlers:
    """The handlers, by opcode; each runs as a task."""

    def __init__(self, locks: Locks) -> None:
        self._locks = locks

    def table(self) -> dict[int, Handler]:
        return {Op.GETLK: self.getlk, Op.SETLK: self.setlk, Op.SETLKW: self.setlkw}

    async def getlk(self, r: KernelRequest) -> bytes:
        place, kind, wish = self._wish(r)
        found = await self._locks.obstacle(place, wish)
        if found is None:
            return protocol.LOCK.pack(wish.start, wish.end, fcntl.F_UNLCK, 0)
        # A process of another host has no number here.
        pid = found.pid if found.owner.node == wish.owner.node else 0
        kind = fcntl.F_WRLCK if found.exclusive else fcntl.F_RDLCK
        return protocol.LOCK.pack(found.start, found.end, kind, pid)

    async def setlk(self, r: KernelRequest) -> bytes:
        await self._set(r, wait=False)
        return b""

    async def setlkw(self, r: KernelRequest) -> bytes:
        await self._set(r, wait=True)
        return b""

    async def _set(self, r: KernelRequest, *, wait: bool) -> None:
        place, kind, wish = self._wish(r)
        if kind == fcntl.F_UNLCK:
            await self._locks.release(place, wish.owner, wish.start, wish.end)
        else:
            await self._locks.acquire(place, wish, wait=wait)

    def _wish(self, r: KernelRequest) -> Wish:
        _, owner, start, end, kind, pid, flags, _ = protocol.LK_IN.unpack_from(r.body)
        place = LockTarget(r.nodeid, bool(flags & protocol.LK_FLOCK))
        exclusive = kind == fcntl.F_WRLCK
        return Wish(
            place, kind, ByteRangeLock(self._locks.owner(owner), exclusive, start, end, pid)
        )
