"""The nodes for copies of blocks, as one of them sees them, also while the metadata server is away.

A node lives as long as its lease does, and as it is heard: each tells the others every second where
its names have come to. The lease of a node that dies while the server is away does not end, but it
falls silent.
"""

from collections.abc import Callable
from typing import Final

from kvfs.policy.cluster_snapshot import ClusterSnapshot

SILENT_S: Final = 15.0
"""Time after which a node that is not heard counts as one that is away."""


class LivingNodes:
    """The nodes of a cluster. `heard_at` tells when a node was heard last; None: never."""

    def __init__(
        self,
        me: int,
        snapshot: Callable[[], ClusterSnapshot],
        heard_at: Callable[[int], float | None],
        clock: Callable[[], float],
    ) -> None:
        self._me = me
        self._base = snapshot
        self._heard_at = heard_at
        self._clock = clock
        self._drawn: tuple[ClusterSnapshot, frozenset[int]] | None = None
        self._snapshot = ClusterSnapshot(())

    def snapshot(self) -> ClusterSnapshot:
        """Returns a snapshot, the same one while nothing changes."""
        base = self._base()
        silent = frozenset(host.number for host in base if self._is_silent(host.number))
        if self._drawn is None or self._drawn[0] is not base or self._drawn[1] != silent:
            self._drawn = base, silent
            self._snapshot = ClusterSnapshot(
                host._replace(alive=host.alive and host.number not in silent) for host in base
            )
        return self._snapshot

    def _is_silent(self, node: int) -> bool:
        if node == self._me:
            return False
        heard = self._heard_at(node)
        return heard is not None and self._clock() - heard > SILENT_S
