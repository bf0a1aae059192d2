"""The parts of a namespace's capacity that its nodes may fill, each by its own files. Pure.

A node fills what it was granted without asking anyone; it takes more in bulk while there is any,
and gives back what it does not use.

| capacity that nobody was granted | this node | what it does |
|---|---|---|
| some | has less than a portion left of its grant | takes one more |
| some | leaves more than three portions unused | keeps two |
| none | has less than an equal part, and less than a portion left | says that it lacks some |
| none, and another lacks some | has more than an equal part | empties the rest, gives it back |
| less than none: it was lowered | the same | the same |
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

_LEAST: Final = 64 << 20
_PORTIONS: Final = 32


class CapacityShare(NamedTuple):
    """The part of one node, in bytes."""

    used: int
    granted: int
    """The bytes that no other node may fill."""
    keeps: int
    """The bytes that it fills at most: fewer than it was granted while it gives some back."""
    lacks: bool = False
    """Whether it has less than an equal part, and others should give some back."""


def next_share(
    capacity: int, mine: CapacityShare, others: Sequence[CapacityShare], members: int
) -> CapacityShare:
    """Returns the part of a node from now on, given those of the others, of `members` in all. The
    grants of all never exceed the capacity, unless that was lowered."""
    portion = max(capacity // _PORTIONS, min(capacity // 4, _LEAST))
    equal = capacity // (1 + sum(bool(each.granted or each.lacks) for each in others))
    free = capacity - mine.granted - sum(each.granted for each in others)
    if mine.granted > equal and (free < 0 or (not free and any(each.lacks for each in others))):
        keeps = min(mine.keeps, equal)
        return mine._replace(granted=max(keeps, min(mine.used, mine.granted)), keeps=keeps)
    left = mine.granted - mine.used
    if not mine.granted and not mine.used:
        more = min(portion, capacity // max(members, 1))
    elif left < portion:
        more = max(portion, mine.used + portion - mine.granted)
    elif left > 3 * portion:
        more = mine.used + 2 * portion - mine.granted
    else:
        more = 0
    granted = mine.granted + min(more, max(free, 0))
    lacks = more > 0 and granted == mine.granted and granted < equal
    return CapacityShare(mine.used, granted, granted, lacks)
