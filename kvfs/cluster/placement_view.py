"""The roster as placement sees it."""

from kvfs.base.errors import Unavailable
from kvfs.cluster.peer_protocol import PeerAddress
from kvfs.cluster.roster import Member, Roster
from kvfs.policy.cluster_snapshot import ClusterSnapshot, Host


class PlacementView:
    """The nodes of a roster that were not removed, for placing data; one that others cannot reach
    lends nothing."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._drawn = -1
        self._snapshot = ClusterSnapshot(())

    def snapshot(self) -> ClusterSnapshot:
        """Returns a snapshot, the same one until the roster shows something else: each file asks
        for one, and it takes 2 ms to draw a thousand nodes."""
        if self._drawn != self._roster.drawn:
            self._drawn = self._roster.drawn
            self._snapshot = ClusterSnapshot(map(_host, self._roster.all()))
        return self._snapshot


def _host(member: Member) -> Host:
    return Host(
        number=member.number,
        capacity=member.capacity_bytes if member.peer else 0,
        free=member.free_bytes if member.peer else 0,
        zone=member.zone,
        rack=member.rack,
        load=member.load,
        media=frozenset(member.media),
        state=member.state,
        alive=member.alive,
    )


def address(roster: Roster, number: int) -> PeerAddress:
    """Returns the address at which a node's peers reach it. Raises Unavailable if it is away, or
    cannot be reached."""
    found = roster.get(number)
    if found is None or not found.alive:
        raise Unavailable(f"node {number} is not there")
    host, _, port = found.peer.rpartition(":")
    if not port.isdecimal():
        raise Unavailable(f"node {number} ({found.name}) cannot be reached by other nodes")
    return PeerAddress(number, host.removeprefix("[").removesuffix("]"), int(port))
