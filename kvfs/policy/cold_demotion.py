"""Decides whether an eviction may wait for the cold tier. Pure."""

from kvfs.policy import eviction


def may_wait(used: int, capacity: int) -> bool:
    """Returns whether half of the headroom is free: until then files wait until the cold tier has
    them. With less, the writers come first, and files of a cache go without."""
    return used <= capacity - eviction.headroom(capacity) // 2
