"""The nodes of a cluster as this one sees them: for placing, fetching and repair.

It is a picture of the last look at the engine, some seconds old at most while that answers; asking
it costs a dictionary look-up.
"""

from collections.abc import Iterable
from typing import NamedTuple

from kvfs.base.errors import UNDECODABLE
from kvfs.cluster.failure_detector import Sightings
from kvfs.cluster.node_records import NodeRecord, NodeState, Words, unpack_words
from kvfs.meta.node_leases import LeaseNews


class Member(NamedTuple):
    """One node."""

    number: int
    name: str
    incarnation: int
    """The incarnation of its lease, if it has one."""
    peer: str
    """HOST:PORT; empty: others cannot fetch from it."""
    zone: str
    rack: str
    media: tuple[str, ...]
    capacity_bytes: int
    free_bytes: int
    load: float
    lacking: int
    """Files that lack copies which this node must have made."""
    obstacle: str
    """The reason why it cannot be drained, for people."""
    state: NodeState
    alive: bool
    """Whether it holds its lease."""
    left: bool
    """Whether it has no lease: it stopped in order, and was not lost."""
    silent_s: float
    """Time for which its lease was not renewed, at least."""
    version: str
    protocol: int
    tls: bool
    """Whether it says that it speaks TLS with other nodes."""
    returns: bool
    """Whether another daemon follows its own when that dies."""


class Roster:
    """The known state of all nodes, this one included."""

    def __init__(self, me: int) -> None:
        self.me = me
        """This node's number."""
        self.drawn = 0
        """Grows whenever a member is another than before."""
        self._members: dict[int, Member] = {}
        self._sightings = Sightings()
        self._records: dict[int, NodeRecord] = {}

    def __len__(self) -> int:
        """Returns the number of nodes that have a lease."""
        return len(self._sightings)

    def all(self) -> list[Member]:
        """Returns all nodes that were not removed, by number."""
        return [each for each in self._members.values() if each.state != "removed"]

    def alive(self) -> list[Member]:
        """Returns the nodes that hold their lease."""
        return [each for each in self._members.values() if each.alive]

    def get(self, number: int) -> Member | None:
        """Returns a node; None: there never was one."""
        return self._members.get(number)

    def speaks_tls(self, number: int) -> bool:
        """Returns whether a node says that it speaks TLS with others."""
        found = self._members.get(number)
        return found is not None and found.tls

    def lives(self, number: int, incarnation: int | None = None) -> bool:
        """Returns whether a node, or this incarnation of it, holds its lease."""
        lease = self._sightings.lease(number)
        if lease is None or incarnation not in (None, lease.incarnation):
            return False
        return self._sightings.lives(number)

    def keeps(self, number: int, incarnation: int) -> bool:
        """Returns whether a node still has what this incarnation of it had taken: it lives in that
        one, or in a later one that goes on with what those before had open."""
        if self.lives(number, incarnation):
            return True
        lease = self._sightings.lease(number)
        if lease is None or incarnation >= lease.incarnation or not self.lives(number):
            return False
        words = _words(lease.words)
        return words is not None and 0 < words.since <= incarnation

    def hear(self, news: LeaseNews, now_s: float) -> None:
        """Takes the news of the engine's leases at `now_s` (CLOCK_BOOTTIME)."""
        touched = self._sightings.hear(news, now_s)
        self._draw(each for each in touched if each in self._records)

    def read(self, records: Iterable[NodeRecord]) -> None:
        """Takes the engine's records of nodes."""
        self._records = {each.number: each for each in records}
        self._members = {}
        self._draw(self._records)

    def _draw(self, numbers: Iterable[int]) -> None:
        drawn = {each: self._member(self._records[each]) for each in numbers}
        self._members.update(drawn)
        self.drawn += 1

    def _member(self, record: NodeRecord) -> Member:
        number = record.number
        lease = self._sightings.lease(number)
        words = None if lease is None else _words(lease.words)
        return Member(
            number=number,
            name=record.name,
            incarnation=record.incarnation if lease is None else lease.incarnation,
            peer=record.peer,
            zone=record.zone,
            rack=record.rack,
            media=record.media,
            capacity_bytes=words.capacity_bytes if words else record.capacity_bytes,
            free_bytes=words.free_bytes if words else 0,
            load=words.load if words else 0.0,
            lacking=words.lacking if words else 0,
            obstacle=words.obstacle if words else "",
            state=record.state,
            alive=record.state != "removed" and self.lives(number),
            left=lease is None,
            silent_s=self._sightings.silent_s(number),
            version=words.version if words else record.version,
            protocol=words.protocol if words else record.protocol,
            tls=words is not None and words.tls,
            returns=words is not None and words.returns,
        )


def _words(packed: bytes) -> Words | None:
    """Parses a report; None: another version's, which we cannot read."""
    try:
        return unpack_words(packed)
    except UNDECODABLE:
        return None
