"""Whether an eviction may wait for the cold tier. Pure."""

from kvfs.policy import eviction


def may_wait(used: int, capacity: int) -> bool:
    """While half of the headroom is free: what is not in the cold tier yet waits until it is. Below
    that the writers come first, and files of a cache go without."""
    return used <= capacity - eviction.headroom(capacity) // 2
