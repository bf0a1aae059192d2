"""How far a node of a cluster believes its metadata replica, and for how long its kernel may.

| names of | before a look-up | what the kernel remembers |
|---|---|---|
| a strict namespace | the replica catches up: a round trip, shared by all look-ups | nothing |
| a cache namespace | believed for CACHE_S since the engine was heard | the rest of that time |
| the root | as in a cache; an absent name is looked for in the engine | that, but no absence |

While the engine is silent, a look-up in a strict namespace fails, and a name in a cache is a miss:
a cache may lose any file, but not show one that others have long replaced. The root stays, so that
a mount can be examined and removed.
"""

from typing import Final, Protocol

from kvfs.base.clock import now
from kvfs.base.errors import Unavailable, Unreached
from kvfs.meta.records import Namespace, namespace_of, namespace_root

CACHE_S: Final = 2.0
_TOP: Final = 0


class Mirror(Protocol):
    """The view of a node's metadata replica that coherence needs."""

    @property
    def heard_at(self) -> float:
        """The time when it held everything that was committed, in seconds of CLOCK_BOOTTIME; 0: it
        is not fit for use."""

    async def catch_up(self) -> None:
        """Returns when it holds everything that was committed before the call. Raises
        Unavailable."""

    def namespace(self, number: int) -> Namespace | None:
        """Returns the record of a namespace. Raises Unavailable."""


class Coherence:
    """The coherence of one node, for its mounts."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror

    @property
    def is_believed(self) -> bool:
        """Whether the engine was heard of late."""
        return now() - self._mirror.heard_at < CACHE_S

    def is_strict(self, namespace_id: int) -> bool:
        """Returns whether a namespace is strict; True for one that is gone. Raises Unavailable."""
        record = self._mirror.namespace(namespace_id)
        return namespace_id != _TOP if record is None else record.is_strict

    async def fresh(self, directory: int) -> None:
        """Makes the replica fresh enough to look up names in a directory, or to list it.

        Raises Unavailable (strict), Unreached (a cache: everything is a miss). Cancelled: nothing
        happened."""
        namespace_id = namespace_of(directory)
        if namespace_id == _TOP:
            return
        if self.is_strict(namespace_id):
            await self._mirror.catch_up()
        elif not self.is_believed:
            raise Unreached("the engine is not heard, and a cache's names may be outdated")

    async def fresh_root(self) -> None:
        """Catches up before a name is reported absent at the root; if the engine is silent, it is
        not."""
        try:
            await self._mirror.catch_up()
        except Unavailable:
            return

    def entry_s(self, ino: int) -> float:
        """Returns seconds for which the kernel may believe that a name leads to this inode."""
        namespace_id = namespace_of(ino)
        if ino == namespace_root(namespace_id) or not self.is_strict(namespace_id):
            return self.rest_s()
        return 0.0

    def absence_s(self, directory: int) -> float:
        """Returns seconds for which the kernel may believe that a name is not in this directory."""
        namespace_id = namespace_of(directory)
        if namespace_id == _TOP or self.is_strict(namespace_id):
            return 0.0
        return self.rest_s()

    def rest_s(self) -> float:
        """Returns seconds for which the contents of the replica are still believed."""
        return max(0.0, self._mirror.heard_at + CACHE_S - now())
