"""The copies that a file lacks, those that may go, and the node that acts on it. Pure.

Invariants
- One node acts on a file at a time: the first of its live holders by rendezvous. Nodes that see
  different members may both act; then a copy too many is made, and goes later.
- A copy on a draining node is read from, but does not count: it is about to go.
- All holders decide alike, from the same snapshot, which copy may go, and its node confirms it in
  the transaction in which it lets go: two that see different members cannot both drop the last.
"""

from collections.abc import Collection
from typing import NamedTuple

from kvfs.policy import rendezvous
from kvfs.policy.cluster_snapshot import ClusterSnapshot, Host
from kvfs.policy.placement import crowd


class Verdict(NamedTuple):
    """The verdict on one file's copies."""

    missing: int
    """Copies to be made."""
    actor: int | None
    """The node that is to act; None: no holder is there, so nobody can."""


def judge(snapshot: ClusterSnapshot, key: int, holders: Collection[int], wanted: int) -> Verdict:
    """Returns the verdict. `wanted`: all copies, the first one included. More copies than nodes
    that can hold them cannot be made: see `placement.choose`."""
    there = snapshot.alive(holders)
    if not there:
        return Verdict(0, None)
    staying = [host for host in there if host.is_open]
    actor = rendezvous.first(key, [host.number for host in there])
    return Verdict(max(wanted - len(staying), 0), actor)


def may_go(
    snapshot: ClusterSnapshot, key: int, holders: Collection[int], wanted: int, number: int
) -> bool:
    """Returns whether the others can do without the copy on this node.

    A draining node's copy may go as soon as enough others have one; at least one always stays.
    """
    staying = [host for host in snapshot.alive(holders) if host.is_open]
    own = next((host for host in staying if host.number == number), None)
    if own is None:
        return len(staying) >= max(wanted, 1)
    return own.number in _surplus(key, staying, max(wanted, 1))


def _surplus(key: int, staying: list[Host], wanted: int) -> list[int]:
    """Returns the surplus copies: first those nearest to others, among these those on the fullest
    nodes."""
    left, gone = list(staying), []
    while len(left) > wanted:
        worst = max(left, key=lambda host: _dispensable(key, host, left))
        left.remove(worst)
        gone.append(worst.number)
    return gone


def _dispensable(key: int, host: Host, left: list[Host]) -> tuple[int, int, float, int]:
    zone, rack = crowd(host, [each for each in left if each is not host])
    used = 1.0 - host.free / host.capacity if host.capacity else 1.0
    return zone, rack, used, rendezvous.mix(key, host.number)
