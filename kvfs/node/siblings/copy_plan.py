"""The nodes that are to be offered copies of blocks. Pure.

64 blocks that were made one after the other have the same order of nodes, so that many go together,
and the order is drawn once for all of them. Nodes that are said to hold a name come first: they
need nothing but a comparison.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from kvfs.policy import placement, replica_repair
from kvfs.policy.cluster_snapshot import ClusterSnapshot
from kvfs.tree.copies.siblings import HeldBlock

_GROUP_BITS: Final = 6
"""Files whose numbers differ in these bits alone have the same order of nodes."""


class LackingBlock:
    """A block that may lack copies, and what is known of nodes for it."""

    __slots__ = ("block", "claimed", "have", "made", "others", "refused")

    def __init__(self, block: HeldBlock, me: int, claimed: Sequence[int]) -> None:
        self.block = block
        self.have = [me, *block.siblings]
        self.claimed = [node for node in claimed if node not in self.have]
        """Nodes that are said to hold the name."""
        self.made: list[int] = []
        self.refused: set[int] = set()
        self.others: set[int] = set()
        """Nodes that have other content under the block's name, and keep that."""


def group_of(ino: int) -> int:
    """Returns the key by which nodes are drawn for a file."""
    return ino >> _GROUP_BITS


def missing(snapshot: ClusterSnapshot, lacking: LackingBlock) -> int:
    """Returns how many copies a block lacks."""
    block = lacking.block
    verdict = replica_repair.judge(snapshot, group_of(block.ino), lacking.have, block.wanted)
    return block.wanted - 1 if verdict.actor is None else verdict.missing


def is_hopeless(snapshot: ClusterSnapshot, lacking: LackingBlock) -> bool:
    """Returns whether a block lacks copies only because nodes keep other content under its name:
    there is no further node that it could go to, now or later."""
    if not lacking.others:
        return False
    further = placement.choose(
        snapshot,
        group_of(lacking.block.ino),
        lacking.block.inode.size,
        1,
        holders=lacking.have,
        media=lacking.block.namespace.media,
        without={*lacking.have, *lacking.others},
    )
    return not further


def plan(
    snapshot: ClusterSnapshot, resting: Collection[int], works: Iterable[LackingBlock]
) -> dict[int, list[LackingBlock]]:
    """Returns which nodes are to be offered which blocks; none that rests now."""
    found: dict[int, list[LackingBlock]] = {}
    drawn: dict[tuple[int, tuple[int, ...], frozenset[int], int], list[int]] = {}
    for work in works:
        count = missing(snapshot, work)
        barred = {*work.have, *work.refused, *resting}
        first = [node for node in work.claimed if node not in barred][:count]
        count -= len(first)
        key = group_of(work.block.ino), (*work.have, *first), frozenset(work.refused), count
        if count and key not in drawn:
            drawn[key] = placement.choose(
                snapshot,
                key[0],
                work.block.inode.size,
                count,
                holders=key[1],
                media=work.block.namespace.media,
                without=barred,
            )
        for node in (*first, *drawn.get(key, ())):
            found.setdefault(node, []).append(work)
    return found
