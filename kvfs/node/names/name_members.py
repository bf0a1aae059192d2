"""The nodes that take part in keeping names, as one of them sees them: who lives, and to whom it
passes on what comes from whom."""

from collections.abc import Callable, Iterable
from typing import Final

from kvfs.holdings.dissemination_tree import DisseminationTree

_INTERVAL_S: Final = 0.05
_REQUESTS_PER_S: Final = 60
"""Requests that a node is sent by all others together: each costs it as much as hundreds of
changes."""


COLD: Final = 1 << 15
"""Beyond the numbers of nodes, but for clusters that gave out more: the origins of what nodes have
sent to the cold tier."""


def cold_of(node: int) -> int:
    """Returns the origin of the names that a node has sent to the cold tier."""
    return node | COLD


def interval_s(neighbours: int) -> float:
    """Returns the time between two requests to one node, and between two messages of each while
    there is news all the time, where each node is told by so many others. Along a tree of three
    steps news takes four times as long at most: below 2 s."""
    return max(_INTERVAL_S, neighbours / _REQUESTS_PER_S)


_IN_TIME_S: Final = 1.5
"""Time in which all nodes should know a name: they promise to know it within 2 s, and may be busy.
"""


def most_delay_s(neighbours: int, steps: int) -> float:
    """Returns the longest time for which a node may keep a name to itself, where news goes to so
    many neighbours, and in so many steps to all nodes; 0: for none."""
    return max(0.0, _IN_TIME_S - (1 + steps) * interval_s(neighbours))


class NameMembers:
    """The members, as of the last look."""

    def __init__(self, me: int, members: Callable[[], Iterable[tuple[int, bool]]]) -> None:
        """`members`: the numbers of all nodes of the cluster, and whether each lives."""
        self.me: Final = me
        self._members = members
        self._tree = DisseminationTree([me])
        self._numbers: frozenset[int] = frozenset([me])
        self._dead: frozenset[int] = frozenset()
        self._children: dict[int, tuple[int, ...]] = {}
        """The answers of `children` since another one came, died or returned."""

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, node: int) -> bool:
        return node in self._numbers

    def interval_s(self) -> float:
        """Returns `interval_s` of those that tell this node: as many as it tells itself."""
        return interval_s(len(self.children(self.me)))

    def most_delay_s(self) -> float:
        """Returns `most_delay_s` of this node."""
        return most_delay_s(len(self.children(self.me)), self._tree.steps)

    def look(self) -> set[int]:
        """Looks who is there; returns those that are members no more."""
        members = dict(self._members())
        numbers = frozenset([self.me, *members])
        dead = frozenset(node for node, lives in members.items() if not lives)
        gone = set(self._numbers - numbers)
        if numbers != self._numbers:
            self._tree = DisseminationTree(numbers)
        if (numbers, dead) != (self._numbers, self._dead):
            self._children = {}
        self._numbers, self._dead = numbers, dead
        return gone

    def lives(self, node: int) -> bool:
        """Returns whether another node is a member and lives."""
        return node != self.me and node in self._numbers and node not in self._dead

    def living(self) -> list[int]:
        """Returns the other members that live."""
        return [node for node in self._numbers if self.lives(node)]

    def node_of(self, origin: int) -> int | None:
        """Returns the member that an origin is of; None: of none."""
        if origin in self._numbers:
            return origin
        node = origin ^ COLD
        return node if node < COLD and node in self._numbers else None

    def is_cold(self, origin: int) -> bool:
        """Returns whether an origin tells of the cold tier, and not of what a node holds."""
        return origin >= COLD and origin not in self._numbers

    def children_of(self, origin: int) -> tuple[int, ...]:
        """Returns the nodes to which this one passes on what comes from an origin."""
        node = self.node_of(origin)
        return () if node is None else self.children(node)

    def children(self, origin: int) -> tuple[int, ...]:
        """Returns the nodes to which this one passes on what comes from `origin`."""
        found = self._children.get(origin)
        if found is None:
            found = tuple(self._tree.children(origin, self.me, self._dead))
            self._children[origin] = found
        return found
