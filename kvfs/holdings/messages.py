"""Messages by which nodes tell each other what they hold. Plain values; `delta_codec` has their
wire form, `delta_batch` that of changes of many origins.

Each is of one origin, a node's store, and of one epoch of it: the life of its own set. Within an
epoch changes have sequence numbers 1, 2, ...
"""

from dataclasses import dataclass
from typing import TypeAlias

from kvfs.holdings.fingerprints import U64


@dataclass(frozen=True, slots=True, eq=False)
class Deltas:
    """The changes `first` to `last` of an origin, as their net effect. None if last is first - 1:
    then it tells only how far the origin is."""

    store: int
    epoch: int
    first: int
    last: int
    added: U64
    """In ascending order, as `removed`; no fingerprint is in both."""
    removed: U64
    digest: int | None
    """The digest of what the origin holds after `last` (`fingerprints.total`); None: unknown."""


@dataclass(frozen=True, slots=True, eq=False)
class Checksums:
    """The checksum of each range of what an origin holds after `sequence`."""

    store: int
    epoch: int
    sequence: int
    sums: U64


@dataclass(frozen=True, slots=True, eq=False)
class RangeContents:
    """All that an origin holds in one range after `sequence`, in ascending order."""

    store: int
    epoch: int
    sequence: int
    range_: int
    fingerprints: U64


@dataclass(frozen=True, slots=True)
class HoldingsAsk:
    """A question to the origin `store`: for the changes after `since`, or the contents of `ranges`;
    with neither, for its checksums."""

    store: int
    epoch: int
    """The one that the asking node knows."""
    since: int | None = None
    ranges: tuple[int, ...] = ()


Message: TypeAlias = Deltas | Checksums | RangeContents | HoldingsAsk
