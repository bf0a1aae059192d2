"""How far a node of a cluster believes its metadata replica, and for how long its kernel may.

| names of | before a look-up | what the kernel remembers |
|---|---|---|
| a strict namespace | the replica catches up: a round trip, shared by all look-ups | nothing |
| one that this node alone changes | nothing (`kvfs.meta.exclusive`) | nothing |
| a cache namespace | believed for CACHE_S since the engine was heard | the rest of that time |
| a peer namespace | believed; an absent name may be another node's | CACHE_S, but no absence |
| one that is not followed | read at its server | nothing |
| the root | as in a cache; an absent name is looked for in the engine | that, but no absence |

While the engine is silent, a look-up in a strict namespace finds what there was when it was last
heard, or fails (`kvfs.meta.engine_absence`), and a name in a cache is a miss: a cache may lose any
file, but not show one that others have long replaced. A node that did not run for a while (it was
stopped, or had no processor) hears the engine at once when it runs again: so the first look-ups
wait for that before they miss. The root stays, so that a mount can be examined and removed.

Two names of a cache are there even then: that of a file of which, as far as this node knows, nobody
else knows (`Replica.is_alone`), so that a program that stores a block under a temporary name can
rename it; and that of a directory, in which such files are made. The file is read for CACHE_S since
it was closed or got its name; then it is a miss, since others may have made a newer one.
"""

from typing import Final, Protocol

import trio

from kvfs.base import detach
from kvfs.base.clock import now
from kvfs.base.errors import Unavailable, Unreached
from kvfs.meta.records import Namespace, namespace_of, namespace_root

CACHE_S: Final = 2.0
_HEARING_S: Final = 1.0
"""Longest wait for an engine that was not heard of late: the follower of its log hears one that
answers twice in this time. Waited once for each silence."""
_TOP: Final = 0


class Replica(Protocol):
    """The view of a node's metadata replica that coherence needs."""

    def heard_at(self, namespace_id: int = 0) -> float:
        """Returns the time when it held everything that was committed of a namespace, in seconds of
        CLOCK_BOOTTIME; 0: it is not fit for use."""

    async def until_heard_again(self, namespace_id: int) -> None:
        """Returns when the engine is heard of a namespace the next time, of whatever moment; at
        once while the engine is away. Cancelled: nothing happened."""

    def is_alone(self, name: bytes, ino: int, /) -> bool:
        """Returns whether this node alone knows that a name (the key of an entry) leads to this
        file, or of the file."""

    def closed_alone_at(self, ino: int) -> float:
        """Returns the time when a file that this node alone knows of was closed, or got its name,
        in seconds of CLOCK_BOOTTIME; 0: others may know of it, or it was never closed."""

    async def catch_up(self, namespace_id: int = 0) -> None:
        """Returns when it holds everything that was committed of a namespace before the call.
        Raises Unavailable."""

    async def fresh(self, namespace_id: int) -> None:
        """Returns when it holds all names and attributes of a namespace that were committed before
        the call. Raises Unavailable."""

    def namespace(self, number: int) -> Namespace | None:
        """Returns the record of a namespace. Raises Unavailable."""

    def is_local(self, number: int, /) -> bool:
        """Returns whether the names of a namespace are this node's own."""

    def is_whole(self, namespace_id: int) -> bool:
        """Returns whether the replica has all of a namespace: else what is read of it is as new as
        the read."""


class Coherence:
    """The coherence of one node, for its mounts."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.is_local: Final = replica.is_local
        """Like `Replica.is_local`."""
        self.is_alone: Final = replica.is_alone
        """Like `Replica.is_alone`."""
        self._silent_since: dict[int, float] = {}
        """The time when the engine was heard of a namespace, where it was waited for in vain
        since."""

    def is_believed(self, namespace_id: int) -> bool:
        """Returns whether the engine was heard of a namespace of late."""
        return now() - self._replica.heard_at(namespace_id) < CACHE_S

    def is_strict(self, namespace_id: int) -> bool:
        """Returns whether a namespace is strict; True for one that is gone. Raises Unavailable."""
        record = self._replica.namespace(namespace_id)
        return namespace_id != _TOP if record is None else record.is_strict

    async def fresh(self, directory: int) -> None:
        """Makes the replica fresh enough to look up names in a directory, or to list it.

        Raises Unavailable (strict), Unreached (a cache: everything is a miss). Cancelled: nothing
        happened."""
        namespace_id = namespace_of(directory)
        replica = self._replica
        if namespace_id == _TOP or replica.is_local(namespace_id):
            return
        if not replica.is_whole(namespace_id):
            return
        if self.is_strict(namespace_id):
            await replica.fresh(namespace_id)
        elif not self.is_believed(namespace_id) and not await self._is_heard(namespace_id):
            raise Unreached("the engine is not heard, and a cache's names may be outdated")

    async def _is_heard(self, namespace_id: int) -> bool:
        """Returns whether the engine is heard again within _HEARING_S; if that was waited for in
        vain since it was heard last, it is not."""
        heard_at = self._replica.heard_at
        if self._silent_since.get(namespace_id) == heard_at(namespace_id):
            return False
        await detach.aside()
        with trio.move_on_after(_HEARING_S):
            while not self.is_believed(namespace_id):
                before = heard_at(namespace_id)
                await self._replica.until_heard_again(namespace_id)
                if heard_at(namespace_id) == before:  # it is known to be away
                    break
        if self.is_believed(namespace_id):
            self._silent_since.pop(namespace_id, None)
            return True
        self._silent_since[namespace_id] = heard_at(namespace_id)
        return False

    def check_content(self, ino: int) -> None:
        """Checks a file that is to be read by its name. Raises Unreached while the engine is
        silent, if this node alone knows of it and others may have made a newer one since."""
        if self.is_believed(namespace_of(ino)):
            return
        closed_at = self._replica.closed_alone_at(ino)
        if closed_at and not 0.0 <= now() - closed_at <= CACHE_S:
            raise Unreached("the engine is not heard, and others may have replaced the file")

    async def fresh_root(self) -> None:
        """Catches up before a name is reported absent at the root; if the engine is silent, it is
        not."""
        try:
            await self._replica.catch_up()
        except Unavailable:
            return

    def entry_s(self, ino: int) -> float:
        """Returns seconds for which the kernel may believe that a name leads to this inode."""
        namespace_id = namespace_of(ino)
        if self._replica.is_local(namespace_id) and ino != namespace_root(namespace_id):
            return CACHE_S
        if ino == namespace_root(namespace_id) or not self.is_strict(namespace_id):
            return self.rest_s(namespace_id)
        return 0.0

    def attributes_s(self, ino: int) -> float:
        """Returns seconds for which the kernel may believe the attributes of an inode; 0 if the
        engine was not heard for long, and they are not this node's own."""
        namespace_id = namespace_of(ino)
        return CACHE_S if self._replica.is_local(namespace_id) else self.rest_s(namespace_id)

    def absence_s(self, directory: int) -> float:
        """Returns seconds for which the kernel may believe that a name is not in this directory."""
        namespace_id = namespace_of(directory)
        is_local = self._replica.is_local(namespace_id)  # others write there, and tell nobody first
        if namespace_id == _TOP or is_local or self.is_strict(namespace_id):
            return 0.0
        return self.rest_s(namespace_id)

    def rest_s(self, namespace_id: int) -> float:
        """Returns seconds for which what the replica has of a namespace is still believed."""
        return max(0.0, self._replica.heard_at(namespace_id) + CACHE_S - now())
