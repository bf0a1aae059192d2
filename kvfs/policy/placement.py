"""The placement of a file's copies: the writer's own node first, then nodes far from each other.
Pure.

A copy goes to a zone that has none yet, and there to a rack that has none; among equals, rendezvous
hashing decides, weighted by a node's free space and load. So nodes fill evenly, and nothing moves
when one is added: the decision is recorded with the file, not computed again.
"""

from collections.abc import Collection, Sequence

from kvfs.policy import rendezvous
from kvfs.policy.cluster_snapshot import ClusterSnapshot, Host


def choose(
    snapshot: ClusterSnapshot,
    key: int,
    size: int,
    count: int,
    *,
    holders: Collection[int] = (),
    media: Collection[str] = (),
    without: Collection[int] = (),
) -> list[int]:
    """Returns up to `count` nodes that are to take a copy of `size` bytes, beside the `holders` it
    has.

    `media`: they must lend one of these (empty: any). `without`: nodes that are not to be asked.
    Fewer than `count` if no more have space.
    """
    barred = {*holders, *without}
    drawn = [
        (rendezvous.draw(key, host.number, weight), host.number, host)
        for host, room, weight in snapshot.offers
        if room >= size and host.number not in barred and lends(host, media)
    ]
    order = [host for _, _, host in sorted(drawn, reverse=True)]
    taken = [host for number in holders if (host := snapshot.get(number)) is not None]
    chosen: list[int] = []
    while order and len(chosen) < count:
        best = _farthest(order, taken)
        order.remove(best)
        taken.append(best)
        chosen.append(best.number)
    return chosen


def _farthest(order: Sequence[Host], taken: Sequence[Host]) -> Host:
    """Returns the first of those that are least near to the taken ones."""
    places: dict[tuple[str, str], Host] = {}
    for host in order:
        places.setdefault((host.zone, host.rack), host)
    return min(places.values(), key=lambda host: crowd(host, taken))


def crowd(host: Host, others: Sequence[Host]) -> tuple[int, int]:
    """Returns how near a copy there would be to the others: how many share its zone, and its
    rack."""
    zone = [each for each in others if each.zone == host.zone]
    return len(zone), sum(each.rack == host.rack for each in zone)


def lends(host: Host, media: Collection[str]) -> bool:
    """Returns whether it has one of these media (empty: any will do)."""
    return not media or not host.media.isdisjoint(media)
