"""What a history may look like of names that nodes keep themselves (`--coherence peer`). Pure.

- A value that is read is one that a write gave this name before the read ended.
- While a host has what it wrote itself it reads that, and no value of an earlier write of its own.
- A value that was removed since it was written is read only until the removal was heard.
- A name is absent only until an acknowledged write of it was heard; then where it was perhaps
  removed, or its writer's host gave up what it held.

What a host did itself counts there at once, what others did after `lag_s`, or that long after the
last thing that kept one of the two from the others. The metadata server's faults keep nobody.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from tests.cluster.histories.events import ABSENT, TORN, Disturbance, Event
from tests.cluster.histories.models import Violation

_SHOWN: Final = 40


class _Write(NamedTuple):
    """A name was given one of these values; None: any of its directory's."""

    event: Event
    values: frozenset[int] | None


class _Name(NamedTuple):
    """What was done to one name."""

    writes: list[_Write]
    removals: list[Event]
    reads: list[Event]


def check_peer(events: Iterable[Event], disturbances: Sequence[Disturbance], lag_s: float) -> None:
    """Raises Violation."""
    names: dict[str, _Name] = defaultdict(lambda: _Name([], [], []))
    for event in events:
        if event.is_refused:
            continue
        of_it = names[event.name]
        match event.action:
            case "put":
                of_it.writes.append(_Write(event, frozenset([event.value])))
            case "remove" | "drop":
                of_it.removals.append(event)
            case "rename":
                of_it.removals.append(event)
                names[event.other].writes.append(_Write(event, None))
            case "read":
                of_it.reads.append(event)
            case action:
                raise ValueError(action)
    put = {write.event.value: write.event for each in names.values() for write in each.writes}
    for name, of_it in names.items():
        judge = _Judge(of_it, _Hearing(disturbances, lag_s), put)
        for read in of_it.reads:
            if why := judge.fault_of(read):
                raise Violation(_shown(f"{name}: {why}: {read}", of_it, read))


class _Hearing:
    """From when on a host knows what another one did."""

    def __init__(self, disturbances: Sequence[Disturbance], lag_s: float) -> None:
        self._disturbances = disturbances
        self._lag_s = lag_s

    def from_when(self, event: Event, host: int, until: float) -> float:
        """`until`: when that is asked. Infinite where it may not know then."""
        if event.host == host:
            return event.ended
        since = event.ended
        for each in self._disturbances:
            if {event.host, host} & each.hosts and each.began <= until:
                since = max(since, each.ended)
        return since + self._lag_s

    def are_together(self, host: int, other: int, since: float, until: float) -> bool:
        """Whether nothing kept the two from each other in this time, and a while before."""
        return host == other or not any(
            {host, other} & each.hosts and each.began <= until and each.ended + self._lag_s >= since
            for each in self._disturbances
        )

    def gave_up(self, host: int, since: float, until: float) -> bool:
        return any(
            each.empties and host in each.hosts and each.began <= until and each.ended >= since
            for each in self._disturbances
        )


class _Judge:
    """Of the reads of one name."""

    def __init__(self, name: _Name, hearing: _Hearing, put: dict[int, Event]) -> None:
        self._name = name
        self._hearing = hearing
        self._put = put

    def fault_of(self, read: Event) -> str:
        """What is wrong with it; nothing where it may have been."""
        if read.value == ABSENT:
            lost = next(filter(lambda each: self._is_lost(each, read), self._name.writes), None)
            return f"not found, written by {lost.event}" if lost else ""
        sources = [each.event for each in self._name.writes if self._may_give(each, read)]
        if read.value == TORN or not sources:
            return "of no write before it"
        for own in self._name.writes:
            if self._stands(own.event, read) and not any(
                each.host == read.host and each.ended >= own.event.began for each in sources
            ):
                return f"not its own: {own.event}"
        for removal in self._name.removals:
            if self._hides(removal, sources, read):
                return f"removed by {removal}"
        return ""

    def _may_give(self, write: _Write, read: Event) -> bool:
        if write.event.began > read.ended:
            return False
        if write.values is not None:
            return read.value in write.values
        made = self._put.get(read.value)
        return made is not None and (
            _directory(made.name) == _directory(write.event.name)
            and made.began <= write.event.ended
        )

    def _is_lost(self, write: _Write, read: Event) -> bool:
        """Whether the read should have found what this write made."""
        event = write.event
        heard = self._hearing.from_when(event, read.host, read.ended)
        return (
            event.is_known
            and heard < read.began
            and not self._may_be_removed(event.began, read.ended)
            and not self._hearing.gave_up(event.host, event.began, read.ended)
        )

    def _stands(self, own: Event, read: Event) -> bool:
        """Whether the host has for sure what it wrote itself."""
        return (
            own.host == read.host
            and own.ended < read.began
            and not self._may_be_removed(own.began, read.ended)
            and not self._hearing.gave_up(own.host, own.began, read.ended)
        )

    def _may_be_removed(self, since: float, until: float) -> bool:
        """Whether a removal fell into this time, or nobody knows. One of another host is heard some
        time after it was done, and takes what is older than itself alone."""
        return any(each.ended >= since and each.began <= until for each in self._name.removals)

    def _hides(self, removal: Event, sources: Sequence[Event], read: Event) -> bool:
        if not removal.is_known or removal.action == "drop":  # nobody says that it found it
            return False
        if self._hearing.from_when(removal, read.host, read.ended) >= read.began:
            return False
        return all(each.ended < removal.began for each in sources) and (
            removal.action == "remove" or self._was_known(removal, sources)
        )

    def _was_known(self, rename: Event, sources: Sequence[Event]) -> bool:
        """Whether the host that moved a file away knew of all that had its name: it tells the
        others of no removal where none of them is said to have the name."""
        return all(
            self._hearing.from_when(each, rename.host, rename.ended) < rename.began
            and self._hearing.are_together(each.host, rename.host, each.ended, rename.ended)
            for each in sources
        )


def _directory(name: str) -> str:
    return name.rpartition("/")[0]


def _shown(title: str, name: _Name, read: Event) -> str:
    """With what was done to the name of late, and a while after."""
    told = [*(each.event for each in name.writes), *name.removals, *name.reads]
    ordered = sorted(told, key=lambda event: event.began)
    at = ordered.index(read)
    return "\n".join([title, *map(str, ordered[max(0, at - _SHOWN) : at + _SHOWN // 2])])
