"""Decides how much must go, and which files: the least recently used first. Pure.

The kernel moves the bytes, so the daemon does not see single writes: free space ahead of the
writers, the headroom, keeps them below a limit. Eviction starts when used space enters the headroom
and ends a little below it, so that it works in batches instead of file by file.
"""

import heapq
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

_GIB: Final = 1 << 30
_HYSTERESIS: Final = 8


def headroom(capacity: int) -> int:
    """Returns bytes to keep free of `capacity` bytes: 1 GiB or 5 %, whichever is more, but never
    over a quarter of it."""
    return min(max(_GIB, capacity // 20), capacity // 4)


def excess(used: int, capacity: int) -> int:
    """Returns bytes to evict now: 0 outside the headroom, else down to an eighth of it below."""
    free = headroom(capacity)
    if used <= capacity - free:
        return 0
    return used - (capacity - free - free // _HYSTERESIS)


def share(need: int, here: int, everywhere: int) -> int:
    """Returns one node's part of the bytes that a cluster has to evict from a namespace, by its
    share of the namespace; each node does its part."""
    if need <= 0 or here >= everywhere:
        return need
    return -(-need * here // everywhere)


def reserve(coming: int, capacity: int) -> int:
    """Returns bytes to keep for the expected growth of files open for writing; at most the
    headroom, so that files which stay open and never grow starve nobody."""
    return min(coming, headroom(capacity))


def coldest(orders: Iterable[list[tuple[int, int]]], limit: int) -> list[int]:
    """Returns the coldest inodes, at most `limit`, of several lists of (clock, inode), each sorted,
    coldest first."""
    return [ino for _, ino in islice(heapq.merge(*orders), limit)]


def choose(candidates: Iterable[tuple[int, int]], need: int) -> Iterator[int]:
    """Yields inodes from (inode, bytes), in order, until `need` bytes are covered.

    A file without bytes is passed over: evicting it frees nothing. Lazy: a candidate is drawn only
    when still needed.
    """
    if need <= 0:
        return
    for ino, size in candidates:
        if size <= 0:
            continue
        yield ino
        need -= size
        if need <= 0:
            return


def may_wait_for_cold_tier(used: int, capacity: int) -> bool:
    """Returns whether half of the headroom is free: until then files wait until the cold tier has
    them. With less, the writers come first, and files of a cache go without."""
    return used <= capacity - headroom(capacity) // 2
