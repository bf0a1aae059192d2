"""The roster as placement sees it."""

from kvfs.base.errors import Unavailable
from kvfs.cluster.peer_protocol import PeerAddress
from kvfs.cluster.roster import Roster
from kvfs.policy.cluster_snapshot import ClusterSnapshot, Host


def snapshot(roster: Roster) -> ClusterSnapshot:
    """Returns a snapshot of all nodes that were not removed. One that others cannot reach lends
    nothing."""
    return ClusterSnapshot(
        Host(
            number=each.number,
            capacity=each.capacity_bytes if each.peer else 0,
            free=each.free_bytes if each.peer else 0,
            zone=each.zone,
            rack=each.rack,
            load=each.load,
            media=frozenset(each.media),
            state=each.state,
            alive=each.alive,
        )
        for each in roster.all()
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
