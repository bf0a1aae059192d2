"""Renames by two hosts of one name to the same new name: one host is told that there is nothing to
do.

The kernel looks both names up, the old one first, and finds one file under both if another host has
renamed it in between. It takes these names for links of one file, for which rename(2) does nothing,
and asks nobody. So the second look-up is answered by ESTALE, on which the kernel begins the system
call anew, and then the old name is not there.

Invariants
- Only a caller that looks up two names of one file in direct succession, the first of which does
  not lead to it any more, is told so; twice at most, since the kernel asks again for a name that it
  remembers. Other system calls begin anew as well, and get their file.
- For callers in a PID namespace that the node does not see, nobody knows what one thread looked up:
  any of them that looks up a second name of a file soon after the first one is told so.
- The memory is bounded, and covers strict namespaces alone: a cache promises nothing of moves.
"""

import platform
from dataclasses import dataclass
from typing import Final, TypeVar

from kvfs.base.clock import now
from kvfs.base.errors import Stale
from kvfs.meta.engine import Engine
from kvfs.tree import tree

K = TypeVar("K")
V = TypeVar("V")
_THREADS: Final = 1024
_UNSEEN: Final = 256
"""Most files, and names, remembered for callers whose threads are not seen."""
_TELL: Final = 2
_SAME_CALL_S: Final = 0.00025
"""An open follows its look-up within this time mostly: on two cores with other work 120 to 250 us,
of which the caller's wake-up is half. Another host's close takes longer to be committed,
acknowledged and noticed by a program that then opens the file: 200 us in the server alone."""
_RENAMES: Final[dict[str, frozenset[int]]] = {
    "x86_64": frozenset({82, 264, 316}),
    "aarch64": frozenset({38, 276}),
}
"""Numbers of rename, renameat, renameat2."""


@dataclass
class _LookedUp:
    """The last look-up of a thread."""

    parent: int
    name: bytes
    ino: int
    looked_at: float = 0.0
    """The time of the look-up, in seconds of CLOCK_BOOTTIME."""
    told: int = 0
    again: bool = False
    """Whether the kernel asks again at once, since it had remembered the other name."""

    def may_be_told(self, parent: int, name: bytes) -> bool:
        """Returns whether a caller that looks up this name may be told that the former one has
        moved."""
        return (self.parent, self.name) != (parent, name) and (not self.told or self.again)


class MovedNames:
    """The moved names of one mount."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._last: dict[int, _LookedUp] = {}
        """The last look-ups by thread, the newest at the end."""
        self._unseen: dict[int, _LookedUp] = {}
        """By inode, the look-ups of callers whose threads are not seen."""
        self._remembered: dict[tuple[int, bytes], None] = {}
        """Names that the kernel may remember from them, with the inodes that they led to."""

    def absent(self, thread: int) -> None:
        """Notes that the thread looked up a name that is not there."""
        self._last.pop(thread, None)

    def has_just_found(self, thread: int, ino: int) -> bool:
        """Returns whether a thread opens what it looked up in the same system call. It has to look
        it up again for the next time: a descriptor is opened anew, by /proc or a file handle,
        without a look-up."""
        last = self._last.pop(thread, None)
        return last is not None and last.ino == ino and now() - last.looked_at < _SAME_CALL_S

    async def found(
        self, thread: int, parent: int, name: bytes, ino: int, looked_at: float
    ) -> None:
        """Notes that the thread looked up a name that led to this inode. Raises Stale if it has to
        begin anew."""
        last = self._last.pop(thread, None)
        if last is not None and last.ino == ino and (last.parent, last.name) != (parent, name):
            allowed = _TELL if _is_renaming(thread) else 1
            if last.told < allowed and await self._has_moved(last):
                last.told += 1
                self._last[thread] = last
                raise Stale("another host has just renamed this: look it up again")
        self._last[thread] = _LookedUp(parent, name, ino, looked_at)
        _bound(self._last, _THREADS)

    async def found_unseen(self, parent: int, name: bytes, ino: int) -> None:
        """Like `found`, for a caller whose thread is not seen."""
        is_remembered = (parent, name) in self._remembered
        self._remembered.pop((parent, name), None)
        last = self._unseen.pop(ino, None)
        if last is not None and last.may_be_told(parent, name) and await self._has_moved(last):
            last.told += 1
            last.again = is_remembered
            self._unseen[ino] = last
            raise Stale("another host has renamed this: look it up again")
        self._unseen[ino] = _LookedUp(parent, name, ino)
        self._remembered[parent, name] = None
        _bound(self._unseen, _UNSEEN)
        _bound(self._remembered, _UNSEEN)

    async def _has_moved(self, last: _LookedUp) -> bool:
        there = await self._engine.read(lambda t: tree.find(t, last.parent, last.name))
        return there is None or there[0] != last.ino


def _bound(found: dict[K, V], most: int) -> None:
    """Drops the oldest entry if there are more."""
    if len(found) > most:
        del found[next(iter(found))]


def _is_renaming(thread: int) -> bool:
    """Returns whether the thread is in a rename; False also if that cannot be known."""
    try:
        with open(f"/proc/{thread}/syscall", "rb") as file:
            number = file.read(16).split()[0]
        return int(number) in _RENAMES.get(platform.machine(), ())
    except (OSError, ValueError, IndexError):
        return False
