"""The trees along which the changes of nodes reach all others, each by few neighbours. Pure.

Members stand in one order, drawn by hash (`kvfs.policy.rendezvous`), so that neighbours in it are
neighbours in nothing else. A member's place in an origin's tree is its distance from the origin, in
digits of one base: its parent's has the last digit that is not 0 set to 0. So a member sends to
those whose distance from itself is one such digit, whatever the origin: with a thousand nodes (base
10, three digits) 27, and it hears from as many. What came from a hundred origins goes on in one
request. A thousand nodes are reached in three steps, and over all origins each node passes on as
much as any other. Nodes that agree on the members agree on every tree without a word.

A dead node's children are taken by its parent. Nodes that do not agree who is a member, or dead,
leave some out or tell some twice; both are seen by the receiver (`received_sets`).
"""

import itertools
from collections.abc import Container, Iterable, Iterator
from typing import Final

from kvfs.policy import rendezvous

FAN_OUT: Final = 16
"""The most members that one is told of in one step: a base is this and one, or less."""
_ORDER: Final = 0x6B766673
"""The key of the order's draw; the same on all nodes."""


class DisseminationTree:
    """The trees of all origins among these members."""

    __slots__ = ("_order", "_places", "_strides")

    def __init__(self, members: Iterable[int], fan_out: int = FAN_OUT) -> None:
        """Draws the order: 1 ms for 1,000 members, when they change."""
        self._order = sorted(
            set(members), key=lambda member: (rendezvous.mix(_ORDER, member), member)
        )
        self._places = {member: place for place, member in enumerate(self._order)}
        self._strides = _strides(len(self._order), fan_out)

    def __len__(self) -> int:
        """Returns how many members there are."""
        return len(self._order)

    @property
    def steps(self) -> int:
        """The most steps in which what comes from a member reaches all others."""
        return len(self._strides) - 1

    def children(self, origin: int, me: int, dead: Container[int] = ()) -> list[int]:
        """Returns the members to which `me` passes on what comes from `origin`; none if one of the
        two is no member. For the origin itself: to which it sends."""
        first, own = self._places.get(origin), self._places.get(me)
        if first is None or own is None:
            return []
        return list(self._live_below((own - first) % len(self._order), first, dead))

    def subtree(self, origin: int, member: int) -> list[int]:
        """Returns a member and all that hear of the origin by it, dead ones too."""
        first = self._places[origin]
        found, places = [], [(self._places[member] - first) % len(self._order)]
        while places:
            place = places.pop()
            found.append(self._order[(place + first) % len(self._order)])
            places.extend(self._below(place))
        return found

    def _live_below(self, place: int, first: int, dead: Container[int]) -> Iterator[int]:
        for child in self._below(place):
            member = self._order[(child + first) % len(self._order)]
            if member in dead:
                yield from self._live_below(child, first, dead)
            else:
                yield member

    def _below(self, place: int) -> Iterator[int]:
        """Yields the places of a place's children: one of its digits that are 0 behind all others
        is another one there."""
        for stride, above in itertools.pairwise(self._strides):
            if place % above:
                return
            yield from range(place + stride, min(place + above, len(self._order)), stride)


def _strides(members: int, fan_out: int) -> list[int]:
    """Returns the powers of the base, from 1 to the first that is not below `members`: as few as
    the fan-out allows, and of the least base for so many."""
    digits = 1
    while (fan_out + 1) ** digits < members:
        digits += 1
    base = 2
    while base**digits < members:
        base += 1
    return [base**power for power in range(digits + 1)]
