"""Why a name that a mount was asked for is not there: counted by reason.

A name is remembered with the reason for which its file went, for the newest of those that went; a
name that nobody remembers was never stored, or removed by its users.
"""

from collections.abc import Iterable
from typing import Final, Literal

Reason = Literal["never_stored", "evicted", "damaged", "unavailable"]
_REMEMBERED: Final = 65_536
"""Names, some 200 bytes each."""


class Misses:
    """Of one node; one thread."""

    def __init__(self) -> None:
        self._gone: dict[tuple[int, bytes], Reason] = {}
        self.counters = {
            "misses_never_stored": 0,
            "misses_evicted": 0,
            "misses_damaged": 0,
            "misses_unavailable": 0,
        }

    def gone(self, names: Iterable[tuple[int, bytes]], reason: Reason) -> None:
        """The files under these names (directory, name) went for this reason."""
        for name in names:
            self._gone.pop(name, None)  # the newest are last
            self._gone[name] = reason
        while len(self._gone) > _REMEMBERED:
            del self._gone[next(iter(self._gone))]

    def missed(self, parent: int, name: bytes) -> None:
        """Somebody looked for a name that is not there."""
        self.count(self._gone.get((parent, name), "never_stored"))

    def count(self, reason: Reason) -> None:
        """Somebody found nothing, for this reason."""
        self.counters["misses_" + reason] += 1
