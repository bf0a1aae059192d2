"""Failure detection: tells from leases and this host's own clock which nodes live. Pure.

Clocks of hosts and of the engine may be wrong, and may jump. So no two clocks are ever compared:

- another node lives while the number of its lease grows, which the engine compares for us with what
  it told us before (`LeaseNews`). Only time in which we looked counts, so
  that neither an engine that was away nor a host that was asleep makes all others look dead:
  afterwards they have most of a term to be seen again;
- our own lease holds for a term from when we *asked* for it, by CLOCK_BOOTTIME, which nobody can
  set and which goes on while the host sleeps.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from kvfs.meta.node_leases import Lease, LeaseNews

TERM_S: Final = 10.0
"""Time for which a lease holds."""
RENEWAL_S: Final = 2.8
"""Time between two renewals: three have their time before our own lease ends. Each costs the server
some 0.2 ms."""
_MARGIN_S: Final = 1.0
"""Time by which we stop before others may think that we did."""
_LOOKED_S: Final = 2 * RENEWAL_S
"""The most that counts of the time between two looks."""
assert _LOOKED_S + RENEWAL_S < TERM_S - _MARGIN_S


class _Sighting(NamedTuple):
    lease: Lease
    silent_s: float
    """Seconds in which we looked and its number stood still."""


class Sightings:
    """One node's observations of the others' leases."""

    def __init__(self) -> None:
        self._seen: dict[int, _Sighting] = {}
        self._silent: set[int] = set()
        """Nodes whose number stood still at the last look."""
        self._looked_s: float | None = None

    def __len__(self) -> int:
        """Returns the number of nodes that have a lease."""
        return len(self._seen)

    def look(self, leases: Mapping[int, Lease], now_s: float) -> None:
        """Takes all of the engine's leases at `now_s`, by a clock that is never set."""
        passed_s = self._passed_s(now_s)
        self._seen = {
            node: _seen(self._seen.get(node), lease, passed_s) for node, lease in leases.items()
        }
        self._silent = {node for node, seen in self._seen.items() if seen.silent_s}

    def hear(self, news: LeaseNews, now_s: float) -> set[int]:
        """Takes what became of the engine's leases since the look before, at `now_s`; returns the
        nodes of which something else is known now. It takes no longer for many nodes that live."""
        if news.is_whole:
            before = set(self._seen)
            self.look(news.leases, now_s)
            return before | set(self._seen)
        passed_s, seen = self._passed_s(now_s), self._seen
        for node in self._silent - news.silent.keys() - news.leases.keys():
            seen[node] = _Sighting(seen[node].lease, 0.0)
        for node, beat in news.silent.items():
            if node in seen:
                lease, silent_s = seen[node]
                seen[node] = _still(lease._replace(beat=beat), silent_s + passed_s)
        for node, lease in news.leases.items():
            seen[node] = _seen(seen.get(node), lease, passed_s)
        for node in news.gone:
            seen.pop(node, None)
        touched = {*self._silent, *news.silent, *news.leases, *news.gone}
        self._silent = news.silent.keys() & seen.keys()
        return touched

    def lives(self, node: int) -> bool:
        """Returns whether it held its lease at our last look."""
        seen = self._seen.get(node)
        return seen is not None and seen.silent_s < TERM_S

    def lease(self, node: int) -> Lease | None:
        """Returns its last lease; None: it has left in order, or was never there."""
        seen = self._seen.get(node)
        return None if seen is None else seen.lease

    def silent_s(self, node: int) -> float:
        """Returns the seconds for which nothing was heard of the node, at least."""
        seen = self._seen.get(node)
        return 0.0 if seen is None else seen.silent_s

    def _passed_s(self, now_s: float) -> float:
        """Returns the time since the look before, as far as it counts."""
        looked_s, self._looked_s = self._looked_s, now_s
        return 0.0 if looked_s is None else min(now_s - looked_s, _LOOKED_S)


class Tenure:
    """Our own lease."""

    def __init__(self, now_s: float) -> None:
        self._until_s = now_s
        self._lapses = 0

    def renewed(self, asked_s: float, now_s: float) -> None:
        """Notes that the engine granted the lease asked for at `asked_s`."""
        self._lapses += not self.holds(now_s)
        self._until_s = max(self._until_s, asked_s + TERM_S - _MARGIN_S)

    def end(self) -> None:
        """Notes that the lease was given up, or taken from us."""
        self._until_s = float("-inf")

    def holds(self, now_s: float) -> bool:
        """Returns whether we may do what only a living node may."""
        return now_s < self._until_s

    def lapses(self, now_s: float) -> int:
        """Returns how often it has ended so far, so that others may have taken this node for
        dead."""
        return self._lapses + (now_s >= self._until_s)


def _seen(before: _Sighting | None, lease: Lease, passed_s: float) -> _Sighting:
    if before is None:
        # Whether it stands still is not known yet: the server's clock is all there is. One that is
        # wrong is corrected with the next renewal, or after a term without one.
        return _Sighting(lease, min(max(lease.age_s, 0.0), TERM_S))
    if (lease.incarnation, lease.beat) != (before.lease.incarnation, before.lease.beat):
        return _Sighting(lease, 0.0)
    return _still(lease, before.silent_s + passed_s)


def _still(lease: Lease, silent_s: float) -> _Sighting:
    return _Sighting(lease, min(silent_s, 1e9))
