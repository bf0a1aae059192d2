"""Append leases: only one node of a cluster at a time may append to a file of a strict namespace.

A node's appends are its own until it closes the file, and of two such closes the last would take
the other's lines away. So a node that opens a file with O_APPEND first takes its lease, and with it
the newest content; it gives the lease back when the last such open file of it is closed there.

| step | in the engine | after a kill here |
|---|---|---|
| 1 taken | node and incarnation | it ends with the node's own lease |
| 2 appended, closed: published | the same | the same |
| 3 given back | nothing | nothing to do |

Invariants
- A lease counts while its node is alive in the run that took it. A node that was taken for dead
  publishes nothing over what others appended since (`content_versions.check_follows`).
- A waiting request is made again when the lease has changed, and at least once in RECHECK_S.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

import msgspec
import trio

from kvfs.base import detach
from kvfs.base.errors import Busy
from kvfs.base.retry import Persistence
from kvfs.meta import keys
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.records import pack

log = logging.getLogger(__name__)
RECHECK_S: Final = 1.0
LINGER_S: Final = 1.0
"""Time for which a lease is kept for a thread that is to come back for it."""
PATIENCE_S: Final = 10.0
"""Time for which an open waits until another node has closed the file."""
IsAlive = Callable[[int, int], bool]
"""Returns whether a node, by number and incarnation, still has what it took."""


class LeaseHolder(msgspec.Struct, array_like=True, frozen=True):
    """One run of a node."""

    node: int
    incarnation: int


_unpack: Final = msgspec.msgpack.Decoder(LeaseHolder).decode


class AppendLeases:
    """The append leases of one node. `is_strict` tells which files have any."""

    def __init__(
        self,
        engine: Engine,
        node: int,
        incarnation: int,
        is_alive: IsAlive,
        is_strict: Callable[[int], bool],
    ) -> None:
        self._engine = engine
        self._own = LeaseHolder(node, incarnation)
        self._is_alive = is_alive
        self.is_strict = is_strict
        self._users: Counter[int] = Counter()
        """Open files that append, by inode."""
        self._returning: dict[int, trio.Event] = {}
        """Leases that nobody here uses any more, until that is recorded."""
        self._lingering: dict[tuple[int, int], float] = {}
        """Files that a thread was told to look up again, and the time until which it may come
        back."""
        self._unsure: set[int] = set()
        """Files that others may have appended to before this node had their lease, and that nobody
        here has looked up since."""
        self._waiting: dict[int, trio.Event] = {}
        self._wake = trio.Event()

    def put(self, t: Transaction, ino: int) -> None:
        """Records that this node has the lease of a file that it makes; then call `made`."""
        t.put(keys.append_lease(ino), pack(self._own))

    def made(self, ino: int) -> None:
        """Notes that the file was made, and is open to be appended to."""
        self._users[ino] += 1

    async def take(self, ino: int) -> None:
        """Takes the lease, and everything that was appended before: call `give_back` once for each
        time. Raises Busy if another node keeps it, Unavailable. Cancelled: it is not taken."""
        if ino in self._users:
            self._users[ino] += 1
            return
        await detach.aside()
        with trio.move_on_after(PATIENCE_S):
            while not await self._try(ino):
                changed = self._waiting.setdefault(ino, trio.Event())
                with trio.move_on_after(RECHECK_S):
                    await changed.wait()
            return
        raise Busy("another node has the file open to append to it, and does not close it")

    def give_back(self, ino: int) -> None:
        """Gives it back for one of its takers."""
        self._users[ino] -= 1
        if not self._users[ino]:
            del self._users[ino]
            self._unsure.discard(ino)
            self._returning[ino] = trio.Event()
            self._wake.set()

    def give_back_later(self, ino: int, thread: int) -> None:
        """Like `give_back`, soon: the thread is told to look the file up, and to come back."""
        if (ino, thread) in self._lingering:
            self.give_back(ino)
        else:
            self._lingering[ino, thread] = trio.current_time() + LINGER_S
            self._wake.set()

    def knows_end(self, ino: int, thread: int) -> bool:
        """Returns whether the kernel knows the length of a file that a thread opens, and of which
        this node has the lease. It does when the thread has come back."""
        if self._lingering.pop((ino, thread), None) is not None:
            self._unsure.discard(ino)
            self.give_back(ino)
        return ino not in self._unsure

    def applied(self, changed: Iterable[bytes]) -> None:
        """Repeats requests that wait for a lease, if these are among the keys that others changed
        in the engine."""
        for key in changed:
            if self._waiting and keys.is_append_lease(key):
                self._wake_waiting(keys.unpack_u64(key, 1))

    async def run(self) -> None:
        """Gives back the leases that are no longer needed, until cancelled."""
        returning = Persistence(log.warning, "files that nobody appends to here are still leased")
        while True:
            with trio.move_on_after(LINGER_S if self._lingering else math.inf):
                await self._wake.wait()
            self._wake = trio.Event()
            now = trio.current_time()
            for each in [each for each, end in self._lingering.items() if end <= now]:
                del self._lingering[each]
                self.give_back(each[0])
            while self._returning:
                await returning.attempt(self._return_all)

    async def _return_all(self) -> None:
        inos = list(self._returning)
        own = pack(self._own)

        def fn(t: Transaction) -> None:
            for ino in inos:
                if t.get(keys.append_lease(ino)) == own:
                    t.delete(keys.append_lease(ino))

        await self._engine.transact(fn)
        for ino in inos:
            self._returning.pop(ino).set()
            self._wake_waiting(ino)

    async def _try(self, ino: int) -> bool:
        if ino in self._returning:
            await self._returning[ino].wait()
        if ino in self._users:  # another one here has it by now
            self._users[ino] += 1
            return True

        def fn(t: Transaction) -> bool:
            value = t.get(keys.append_lease(ino))
            if value is not None and self._counts(_unpack(value)):
                return False
            self.put(t, ino)
            return True

        if not await self._engine.transact(fn):
            return False
        if ino not in self._users:
            self._unsure.add(ino)
        self._users[ino] += 1
        return True

    def _counts(self, holder: LeaseHolder) -> bool:
        return holder == self._own or self._is_alive(holder.node, holder.incarnation)

    def _wake_waiting(self, ino: int) -> None:
        event = self._waiting.pop(ino, None)
        if event is not None:
            event.set()
