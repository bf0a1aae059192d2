"""Leases of nodes, as an engine has them: types for their keepers and their readers."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from kvfs.base.errors import Conflict, Unavailable


class Lease(NamedTuple):
    """A node's lease, as the engine told of it."""

    incarnation: int
    beat: int
    """Grows with each renewal. Of a node that goes on renewing it is the number that was told last,
    not the present one."""
    age_s: float
    """Seconds since the last renewal, by the engine's clock; below 0 if that was set back."""
    words: bytes
    """The node's report about itself."""


Leases = dict[int, Lease]
"""Leases by number of the node."""


class Joined(NamedTuple):
    """The number and incarnation of this process as a node."""

    node: int
    incarnation: int
    """Grows with each start: an older one is fenced."""


class JoinState(NamedTuple):
    """The state that a joining node finds."""

    cluster: str
    """The cluster; empty: there are no metadata."""
    secrets: tuple[bytes, ...]
    """Digests of the valid secrets; empty: no node was ever here."""
    leases: Leases


class LeaseNews(NamedTuple):
    """The news of a look at the leases, for a node that looked before."""

    leases: Leases
    """Leases that came or have another incarnation or report; if `is_whole`, all of them."""
    silent: Mapping[int, int]
    """The nodes that did not renew theirs since the look before, with their beats."""
    gone: Collection[int]
    """The nodes that gave theirs up."""
    is_whole: bool
    """Whether all leases were told, since it is not known what the node has heard: `silent` and
    `gone` are empty."""


class Renewed(NamedTuple):
    """The answer to a node that renews its lease."""

    secrets: tuple[bytes, ...]
    news: LeaseNews
    time_ns: int
    """The engine's time, since 1970."""


class HeardLeases:
    """All that a node has heard of the leases: the rest is news."""

    def __init__(self) -> None:
        self.words = b""
        """The report that the engine took last."""
        self.number = b""
        """The number of its renewal whose answer it heard last; empty: there was none."""
        self.dead_beat = 0
        """The greatest beat of a node that was silent at two looks: most likely it is dead."""
        self._silent: dict[int, int] = {}

    @property
    def dead(self) -> dict[int, int]:
        """The nodes up to that beat: as long as they are as many, they need not be told again."""
        return {node: beat for node, beat in self._silent.items() if beat <= self.dead_beat}

    def hear(self, number: bytes, silent: Mapping[int, int]) -> None:
        """Takes the answer of a renewal: all nodes that are silent, with their beats."""
        again = [beat for node, beat in silent.items() if self._silent.get(node) == beat]
        self.number, self.dead_beat, self._silent = number, max(again, default=0), dict(silent)


class Lost(Unavailable):
    """The engine does not know this node as the node knows itself: its data are gone or older."""


class Fenced(Conflict):
    """Another process is this node, or it was removed: writes of this one are refused."""
