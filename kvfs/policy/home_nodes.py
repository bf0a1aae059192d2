"""Decides whether each node of a cluster knows who holds which name, or homes do
(`kvfs.holdings.home_map`), and which nodes are homes. Pure.

| there are | names, and changes a second | then |
|---|---|---|
| no homes | more of either than may be known everywhere | all nodes that are there are homes |
| homes | fewer than half of both | each node knows all |
| homes | otherwise, or it is not known | all nodes that are there are homes |
| either | fewer than three nodes, or one that does not know homes | each node knows all |

A node is there from the moment it lives until it has been away for `AWAY_S`: a restart moves
nothing, and the other home of its ranges is asked meanwhile.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Final

LEAST_NODES: Final = 3
"""The least for homes: each of two would know all."""
MOST_CHANGES_PER_S: Final = 50_000
"""Changes of all nodes together that each is told of: they cost it about a tenth of a core."""
AWAY_S: Final = 30.0
_SMOOTH_S: Final = 60.0
"""Time over which the rate of changes is averaged."""


def wanted(
    homes: Mapping[int, str],
    there: Mapping[int, str],
    names: int | None,
    changes_per_s: float,
    most_names: int,
) -> dict[int, str]:
    """Returns the homes that there should be, with their zones; none: each node knows all.
    `homes`: those that there are. `there`: the nodes that are there, none if one of them does not
    know homes. `names`: of all nodes, None if that is not known."""
    if len(there) < LEAST_NODES:
        return {}
    share = 0.5 if homes else 1.0
    is_large = homes if names is None else names > most_names * share
    is_fast = changes_per_s > MOST_CHANGES_PER_S * share
    return dict(there) if is_large or is_fast else {}


class Presence:
    """The nodes that are there."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, str]] = {}

    def look(self, living: Iterable[tuple[int, str]], now_s: float) -> dict[int, str]:
        """Returns those that are there, with their zones. `living`: those that live now."""
        self._seen.update((node, (now_s, zone)) for node, zone in living)
        self._seen = {node: seen for node, seen in self._seen.items() if now_s - seen[0] <= AWAY_S}
        return {node: zone for node, (_, zone) in self._seen.items()}


class ChangeRate:
    """The rate of something that is counted, averaged over a minute."""

    def __init__(self) -> None:
        self.per_s = 0.0
        self._last: tuple[float, int] | None = None

    def look(self, count: int, now_s: float) -> float:
        """Returns the rate, where the count is this now."""
        if self._last is not None and now_s > self._last[0]:
            passed = now_s - self._last[0]
            rate = (count - self._last[1]) / passed
            self.per_s += (rate - self.per_s) * (1 - math.exp(-passed / _SMOOTH_S))
        self._last = now_s, count
        return self.per_s
