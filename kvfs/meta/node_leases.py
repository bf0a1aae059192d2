"""Leases of nodes, as an engine has them: types for their keepers and their readers."""

from typing import NamedTuple

from kvfs.base.errors import Conflict, Unavailable


class Lease(NamedTuple):
    """A node's lease, as the engine told of it."""

    incarnation: int
    beat: int
    """Grows with each renewal."""
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


class Renewed(NamedTuple):
    """The answer to a node that renews its lease."""

    secrets: tuple[bytes, ...]
    leases: Leases


class Lost(Unavailable):
    """The engine does not know this node as the node knows itself: its data are gone or older."""


class Fenced(Conflict):
    """Another process is this node, or it was removed: writes of this one are refused."""
