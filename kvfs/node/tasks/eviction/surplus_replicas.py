"""Data files of this node of which other nodes have enough copies: they are the first to go when
space is short, and no name goes with them.

Invariants
- A copy goes in a transaction that has seen those of the others: of two nodes that let go at the
  same time one sees the other, and keeps its own.
- A kill between that and the end of the data file leaves a stray, which `stale_data_gc` finds.
"""

from collections.abc import Callable, Sequence

from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Inode, namespace_of
from kvfs.tree import namespaces
from kvfs.tree.copies import placements
from kvfs.tree.inodes import read_inodes

Name = tuple[int, int]


class Spare:
    """The surplus replicas of one node; `lives` tells whether a node is there."""

    def __init__(self, lives: Callable[[int], bool]) -> None:
        self._lives = lives

    def among(self, t: Transaction, inodes: dict[int, Inode]) -> set[int]:
        """Returns those of these files of which enough others have the recorded content; none whose
        records are each node's own: no transaction sees those of the others (`peer_spares`)."""
        numbers = {namespace_of(ino) for ino in inodes}
        wanted = {each: _wanted(t, each) for each in numbers if not namespaces.is_peer(t, each)}
        return {
            ino
            for ino, inode in inodes.items()
            if namespace_of(ino) in wanted
            and self._others(t, ino, inode) >= wanted[namespace_of(ino)]
        }

    def look(self, t: Transaction, inos: Sequence[int]) -> tuple[set[int], set[int]]:
        """Returns those of these files that `among` returns, and those of durable namespaces that
        it does not."""
        found = zip(inos, read_inodes(t, inos), strict=True)
        inodes = {ino: inode for ino, inode in found if inode is not None}
        there = self.among(t, inodes)
        return there, {ino for ino in inodes if ino not in there and namespaces.is_durable(t, ino)}

    def let_go(self, t: Transaction, names: Sequence[Name]) -> list[tuple[Name, Inode]]:
        """Gives up this node's placement of those that are surplus; returns the data files that may
        go."""
        found = zip(names, read_inodes(t, [name[0] for name in names]), strict=True)
        here = {
            name[0]: inode
            for name, inode in found
            if inode is not None and inode.version == name[1]
        }
        spare = self.among(t, here)
        for ino in spare:
            placements.let_go(t, ino, t.node)
        return [((ino, here[ino].version), here[ino]) for ino in spare]

    def _others(self, t: Transaction, ino: int, inode: Inode) -> int:
        return sum(
            each.node != t.node
            and each.whole
            and each.holding.version == inode.version
            and self._lives(keys.unpack_node(each.node))
            for each in placements.holders(t, ino)
        )


def _wanted(t: Transaction, namespace_id: int) -> int:
    policy = namespaces.get(t, namespace_id)
    return 1 if policy.kind == "cache" else 1 + policy.replicas
