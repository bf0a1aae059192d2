"""Evens out how full nodes are, with the least possible bytes. Pure.

Each node that is fuller than the cluster gives its surplus to those below, in proportion to what
they lack. Nodes need not agree on it: the sum of all gifts is what the emptier ones lack, so the
bytes moved are the least possible. A full node gives to all that are emptier; one that is nearly
even gives its part only to those that are nearly empty, as one that was just added is. If less is
left to give than a file holds, a hash decides whether it goes, with a probability of the rest's
share of it: of a thousand nodes that each should give a tenth of a file, a hundred give one.

Invariants
- Nothing moves to a node that is fuller than the cluster, or away from one that is emptier: so
  nothing moves twice.
- A file moves only to a node that is no nearer to its other copies than before.
"""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from kvfs.policy import rendezvous
from kvfs.policy.cluster_snapshot import ClusterSnapshot, Host
from kvfs.policy.placement import crowd

TOLERANCE: Final = 0.05
"""The share of a node's capacity below which a difference is not worth a move."""


class Copy(NamedTuple):
    """A file that a node holds."""

    ino: int
    size: int
    holders: tuple[int, ...]
    """The holders of the file, this node included."""


class Move(NamedTuple):
    """A copy that another node is to have instead."""

    ino: int
    size: int
    target: int


def fill(snapshot: ClusterSnapshot) -> float:
    """Returns how full the nodes that may be given data are, together: 0 to 1."""
    capacity = sum(host.capacity for host in snapshot.open)
    if not capacity:
        return 0.0
    return 1.0 - sum(host.free for host in snapshot.open) / capacity


def shed(snapshot: ClusterSnapshot, number: int, copies: Iterable[Copy]) -> Iterator[Move]:
    """Yields the moves from this node to others, in the order of `copies`, until it holds its
    share.

    Lazy: a copy is drawn only while there is something to give.
    """
    budget = _budget(snapshot, number)
    give = sum(budget.values())
    for copy in copies:
        if give <= 0:
            return
        target = _target(snapshot, number, copy, budget)
        if target is None:
            continue
        if give < copy.size and rendezvous.mix(copy.ino, number) % copy.size >= give:
            return
        give -= copy.size
        budget[target] -= copy.size
        yield Move(copy.ino, copy.size, target)


def _budget(snapshot: ClusterSnapshot, number: int) -> dict[int, float]:
    """Returns the bytes that this node is to give to each of the others."""
    own = snapshot.get(number)
    mean = fill(snapshot)
    if own is None or not own.is_open or (over := _over(own, mean)) <= 0:
        return {}
    lacks = {host.number: lack for host in snapshot.open if (lack := -_over(host, mean)) > 0}
    total = sum(lacks.values())
    is_full = over > TOLERANCE * own.capacity
    return {
        host.number: over * lacks[host.number] / total
        for host in snapshot.open
        if host.number in lacks and (is_full or lacks[host.number] > TOLERANCE * host.capacity)
    }


def _over(host: Host, mean: float) -> int:
    return host.capacity - host.free - round(mean * host.capacity)


def _target(
    snapshot: ClusterSnapshot, number: int, copy: Copy, budget: dict[int, float]
) -> int | None:
    """Returns the node that is to have this copy: not a holder, no nearer to the others, and with
    space for it."""
    own = snapshot.get(number)
    if own is None or copy.size <= 0:
        return None
    others = snapshot.alive(each for each in copy.holders if each != number)
    limit = crowd(own, others)
    fitting = [
        (host.number, max(left, 0.0))
        for each, left in budget.items()
        if (host := snapshot.get(each)) is not None
        and each not in copy.holders
        and host.room >= copy.size
        and crowd(host, others) <= limit
    ]
    return next(iter(rendezvous.ranked(copy.ino, fitting)), None)
