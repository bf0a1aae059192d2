"""The locks that a mount keeps in place of its kernel, as a table of the mount's journal.

| an entry | its bytes | its last word |
|---|---|---|
| a lock that stands in the daemon's memory | those that are locked | all ones |
| an owner with locks of a file in the engine | none: the engine has them | all ones |
| an owner that a view's handle has asked for | number of the namespace | the handle |
"""

import mmap
import struct
from collections.abc import Collection
from typing import Final

from gateway.holder.journal_slots import JournalSlots
from kvfs.base.errors import NoLocks
from kvfs.policy.lock_journal import JournaledLock

LOCK: Final = struct.Struct("<QQQQIIQ")
"""Inode, owner, first and last byte, process, kind, handle."""
_KIND: Final = struct.Struct("<I")
_KIND_AT: Final = 36
_LAST: Final = struct.Struct("<Q")
_NOBODY: Final = (1 << 64) - 1
_WHOLE, _EXCLUSIVE, _THERE, _HELD = 1, 2, 4, 8


class LockTable:
    """The table by one process. Used from the event loop."""

    def __init__(self, packed: mmap.mmap, at: int, slots: JournalSlots) -> None:
        """`at`: the place of the first entry."""
        self._map = packed
        self._at = at
        self._slots = slots
        self._numbers: dict[JournaledLock, int] = {}
        """The entry of each, by all but whether it is held."""

    def enter(self, lock: JournaledLock) -> None:
        """Enters one, or whether it is held. Raises NoLocks if there is no room."""
        key = lock._replace(is_held=False)
        number = self._numbers.get(key, -1)
        if number >= 0:
            at = self._at + number * LOCK.size + _KIND_AT
            _KIND.pack_into(self._map, at, _kind(lock))
            return
        number = self._slots.take()
        if number < 0:
            raise NoLocks("programs of the mount hold too many locks")
        self._numbers[key] = number
        ino, _, owner, _, start, end, pid, _, _, fh = lock
        last = fh or _NOBODY
        at = self._at + number * LOCK.size
        LOCK.pack_into(self._map, at, ino, owner, start, end, pid, _kind(lock), last)

    def remove(self, lock: JournaledLock) -> None:
        """Removes one; does nothing where it was not entered."""
        number = self._numbers.pop(lock._replace(is_held=False), -1)
        if number >= 0:
            last = self._at + (number + 1) * LOCK.size - _LAST.size
            _LAST.pack_into(self._map, last, 0)
            self._slots.give(number)

    def take_over(self) -> None:
        """Begins with what daemons before left."""
        for number in range(self._slots.used):
            found = self._entry(number)
            if found is None:
                self._slots.give(number)
            else:
                self._numbers[found._replace(is_held=False)] = number

    def forget_views(self, kept: Collection[int]) -> None:
        """Removes all locks of views that did not outlive the daemon, which are those of other
        namespaces than these."""
        gone = {
            (each.ino, each.whole, each.owner)
            for each in self.all()
            if each.fh and each.start not in kept
        }
        for each in self.all():
            if (each.ino, each.whole, each.owner) in gone:
                self.remove(each)

    def all(self) -> list[JournaledLock]:
        """Returns all that are entered."""
        found = (self._entry(number) for number in self._numbers.values())
        return [each for each in found if each is not None]

    def _entry(self, number: int) -> JournaledLock | None:
        at = self._at + number * LOCK.size
        ino, owner, start, end, pid, kind, fh = LOCK.unpack_from(self._map, at)
        if not fh:
            return None
        is_whole, is_exclusive = bool(kind & _WHOLE), bool(kind & _EXCLUSIVE)
        is_there, is_held = bool(kind & _THERE), bool(kind & _HELD)
        fh = 0 if fh == _NOBODY else fh
        return JournaledLock(
            ino, is_whole, owner, is_exclusive, start, end, pid, is_there, is_held, fh
        )


def _kind(lock: JournaledLock) -> int:
    bits = (_WHOLE, lock.whole), (_EXCLUSIVE, lock.exclusive)
    return sum(
        bit for bit, is_set in (*bits, (_THERE, lock.is_there), (_HELD, lock.is_held)) if is_set
    )
