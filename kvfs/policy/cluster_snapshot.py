"""The basis of placement: the nodes of a cluster as one of them saw them. Pure.

Invariants
- A snapshot is a value: decisions depend on nothing else, so that nodes that see the same decide
  the same, and a simulation decides as a node does.
- An unknown node (removed, or too new) counts as one that is away.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Final, NamedTuple

from kvfs.policy.eviction import headroom

ACTIVE: Final = "active"


class Host(NamedTuple):
    """One node, as far as placement is concerned."""

    number: int
    capacity: int
    """Bytes that it lends; 0: none, it only reads."""
    free: int
    """Bytes of them that are free."""
    zone: str = ""
    rack: str = ""
    load: float = 0.0
    """Its load, from 0 (idle) to 1 (as busy as it may become)."""
    media: frozenset[str] = frozenset({"ssd"})
    state: str = ACTIVE
    """The state in its record: only an active node is given data."""
    alive: bool = True
    """Whether it holds its lease."""

    @property
    def is_open(self) -> bool:
        """Whether it may be given data."""
        return self.alive and self.state == ACTIVE

    @property
    def room(self) -> int:
        """Bytes that it can take without using the headroom of its writers."""
        return max(self.free - headroom(self.capacity), 0)


class ClusterSnapshot:
    """The nodes at one moment, by number."""

    def __init__(self, hosts: Iterable[Host]) -> None:
        self._hosts = {each.number: each for each in hosts}

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts.values())

    def get(self, number: int) -> Host | None:
        return self._hosts.get(number)

    def alive(self, numbers: Iterable[int]) -> list[Host]:
        """Returns the nodes among `numbers` that are there, in their order."""
        found = (self._hosts.get(each) for each in numbers)
        return [each for each in found if each is not None and each.alive]

    @cached_property
    def open(self) -> list[Host]:
        """The nodes that may be given data."""
        return [each for each in self._hosts.values() if each.is_open]

    @cached_property
    def offers(self) -> list[tuple[Host, int, float]]:
        """The nodes with free space, how much, and the share of placed data that each should get:
        its free space, reduced if it is busy."""
        rooms = [(each, each.room) for each in self.open]
        return [
            (host, room, room * (1.0 - min(max(host.load, 0.0), 0.9)))
            for host, room in rooms
            if room
        ]
