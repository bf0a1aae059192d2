"""The face of the table to which messages of other nodes are applied (`holder_table`)."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvfs.holdings.fingerprints import U64
from kvfs.holdings.home_map import Share
from kvfs.holdings.row_address import Lines


class ClaimTable(Protocol):
    """A table of claims."""

    @property
    def is_full(self) -> bool:
        """Whether it refuses claims."""
        ...

    def apply_many(
        self,
        nodes: Sequence[int],
        added: U64,
        added_counts: Sequence[int] | Lines,
        removed: U64,
        removed_counts: Sequence[int] | Lines,
    ) -> None:
        """Removes and adds claims of several nodes."""
        ...

    def replace_range(self, node: int, range_: int, fingerprints: U64) -> None:
        """Makes these the node's only claims in a range."""
        ...

    def drop_node(self, node: int) -> None:
        """Removes all claims of a node."""
        ...

    def checksums(self, node: int) -> U64:
        """Returns the checksum of each range of a node's claims."""
        ...

    def digests(self, nodes: Iterable[int]) -> U64:
        """Returns the sum of the checksums of each node."""
        ...

    def lose(self, ranges: Share) -> None:
        """Removes all claims in these ranges."""
        ...
