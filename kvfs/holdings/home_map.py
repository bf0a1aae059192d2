"""The home nodes of fingerprints, where a cluster has too many names for each node to know all:
each range of fingerprints has two homes, which know who holds its names. Pure.

Homes are drawn by rendezvous hashing: a node that comes takes ranges for itself alone, one that
goes loses only its own, and the other home of these ranges stays. The second home is in another
zone than the first, where there is one.

Changes go along the trees of these nodes (`dissemination_tree`), to each child only those of the
ranges at home below it. A child's descendants are the same for all nodes that have this map,
whoever of them is dead: so what passes by such nodes has all that its receiver is a home of, and a
message names its map.
"""

from collections.abc import Container, Mapping
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvfs.holdings.dissemination_tree import DisseminationTree
from kvfs.holdings.fingerprints import RANGES, mixed

HOMES: Final = 2
"""Homes of a range."""
MOST_NUMBER: Final = (1 << 16) - 1
Share: TypeAlias = NDArray[np.bool_]
"""Whether each range belongs to something."""
_DRAWN: Final = 64
"""Ranges whose homes are drawn together: for a thousand nodes that takes a few megabytes."""
_SALT: Final = np.uint64(0xD1B54A32D192ED03)


def no_ranges() -> Share:
    """Returns a share of nothing."""
    return np.zeros(RANGES, np.bool_)


class HomeMap:
    """The homes among some nodes."""

    def __init__(self, number: int, nodes: Mapping[int, str]) -> None:
        """`number`: from 1 to `MOST_NUMBER`, that of the map in messages. `nodes`: their zones, of
        at least one node. Draws all homes: 50 ms for a thousand nodes."""
        self.number: Final = number
        self.zones: Final = dict(nodes)
        """The zone of each node."""
        self._tree = DisseminationTree(nodes)
        self._homes = _drawn(nodes)
        self._shares: dict[int, Share] = {}
        self._below: dict[tuple[int, int], Share] = {}

    def homes_of(self, range_: int) -> list[int]:
        """Returns the homes of a range, the first one first."""
        homes: list[int] = self._homes[range_].tolist()
        return homes

    def share_of(self, node: int) -> Share:
        """Returns the ranges of which a node is a home."""
        found = self._shares.get(node)
        if found is None:
            found = self._shares[node] = (self._homes == node).any(axis=1)
        return found

    def children(self, origin: int, me: int, dead: Container[int] = ()) -> list[tuple[int, Share]]:
        """Returns the nodes to which `me` passes on what comes from `origin`, each with the ranges
        that it, or one that it tells, is a home of."""
        return [
            (child, self._share_below(origin, child))
            for child in self._tree.children(origin, me, dead)
        ]

    def _share_below(self, origin: int, child: int) -> Share:
        found = self._below.get((origin, child))
        if found is None:
            found = no_ranges()
            for node in self._tree.subtree(origin, child):
                found |= self.share_of(node)
            self._below[origin, child] = found
        return found


def _drawn(nodes: Mapping[int, str]) -> NDArray[np.uint16]:
    numbers = np.array(sorted(nodes), np.uint16)
    zone_names = [nodes[each] for each in numbers.tolist()]
    known = {name: at for at, name in enumerate(dict.fromkeys(zone_names))}
    zones = np.array([known[each] for each in zone_names])
    own = mixed(numbers.astype(np.uint64) * _SALT)
    homes = np.empty((RANGES, min(HOMES, len(numbers))), np.uint16)
    for start in range(0, RANGES, _DRAWN):
        ranges = np.arange(start, start + _DRAWN, dtype=np.uint64)
        draws = mixed(mixed(ranges)[:, None] ^ own)
        first = draws.argmax(axis=1)
        lines = np.arange(_DRAWN)
        draws[lines, first] = 0
        homes[start : start + _DRAWN, 0] = numbers[first]
        if len(numbers) > 1:
            apart = np.where(zones != zones[first][:, None], draws, 0)
            second = np.where(apart.any(axis=1), apart.argmax(axis=1), draws.argmax(axis=1))
            homes[start : start + _DRAWN, 1] = numbers[second]
    return homes
