"""The demand for namespaces' shards on a node: it begins to follow one, and may end. Pure.

| what is asked in the namespace | the node |
|---|---|
| a look-up: keys that can be named, at most `MOST_KEYS` | asks the server; the LOOKS-th: follows |
| a range (a listing), a change, what only a whole replica answers | follows, and waits |
| nothing for a round of IDLE_S | need not follow any more |
"""

from collections.abc import Iterable
from typing import Final

LOOKS: Final = 16
"""Look-ups that are read at the server before it is cheaper to have all: each costs a round trip,
and two reads of a page of 2,000 keys cost as much."""
IDLE_S: Final = 600.0
"""The time of a round. What was read has to be read anew when it is used again, so it is long."""


class Demand:
    """A count of what is asked of the namespaces' shards."""

    def __init__(self) -> None:
        self._looks: dict[int, int] = {}
        self._used: set[int] = set()

    def use(self, shard: int) -> None:
        """Takes notice that what a whole replica has is used."""
        self._used.add(shard)

    def look(self, shard: int) -> bool:
        """Takes notice of a look-up in a shard that is not followed; returns whether it is to be
        followed now."""
        self._looks[shard] = self._looks.get(shard, 0) + 1
        return self._looks[shard] >= LOOKS

    def unused(self, followed: Iterable[int]) -> list[int]:
        """Ends a round; returns those of these shards that were not used in it."""
        found = [shard for shard in followed if shard not in self._used]
        self._used.clear()
        self._looks.clear()
        return found
