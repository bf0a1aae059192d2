"""Locks of many owners on the bytes of one file: the obstacles to a lock, and the locks held once
it is granted. Pure. They follow fcntl(2); a flock(2) lock is one on all bytes.

Invariants
- No two locks of one owner overlap, and neighbours of one kind are one lock.
- Locks of different owners overlap only where both are shared.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

LAST: Final = (1 << 63) - 1
"""The last byte of a file, as the kernel counts."""


class LockOwner(msgspec.Struct, array_like=True, frozen=True):
    """An owner of locks: an open file or a process of one run of a node."""

    node: int
    incarnation: int
    number: int
    """Its number in that node's kernel."""


class ByteRangeLock(msgspec.Struct, array_like=True, frozen=True):
    """Bytes `start` to `end`, both included."""

    owner: LockOwner
    exclusive: bool
    start: int
    end: int
    pid: int = 0
    """The process that asked, on its host."""

    def overlaps(self, other: "ByteRangeLock") -> bool:
        return self.start <= other.end and other.start <= self.end


def obstacle(held: Iterable[ByteRangeLock], wish: ByteRangeLock) -> ByteRangeLock | None:
    """Returns the first lock that keeps `wish` from being granted."""
    for lock in held:
        if lock.owner == wish.owner or not lock.overlaps(wish):
            continue
        if lock.exclusive or wish.exclusive:
            return lock
    return None


def granted(held: Sequence[ByteRangeLock], wish: ByteRangeLock) -> list[ByteRangeLock]:
    """Returns the locks once `wish` is granted, in place of those that its owner had there."""
    others = released(held, wish.owner, wish.start, wish.end)
    joined = wish
    kept = []
    for lock in others:
        if _continues(lock, joined):
            joined = _between(joined, min(lock.start, joined.start), max(lock.end, joined.end))
        else:
            kept.append(lock)
    return [*kept, joined]


def released(
    held: Sequence[ByteRangeLock], owner: LockOwner, start: int = 0, end: int = LAST
) -> list[ByteRangeLock]:
    """Returns the locks once `owner` has given these bytes back."""
    left = []
    for lock in held:
        if lock.owner != owner or lock.end < start or end < lock.start:
            left.append(lock)
            continue
        if lock.start < start:
            left.append(_between(lock, lock.start, start - 1))
        if end < lock.end:
            left.append(_between(lock, end + 1, lock.end))
    return left


def _continues(lock: ByteRangeLock, other: ByteRangeLock) -> bool:
    same = lock.owner == other.owner and lock.exclusive == other.exclusive
    return same and lock.start <= other.end + 1 and other.start <= lock.end + 1


def _between(lock: ByteRangeLock, start: int, end: int) -> ByteRangeLock:
    return msgspec.structs.replace(lock, start=start, end=end)
