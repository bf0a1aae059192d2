"""The numbers of copies that files have and should have: functions of a transaction."""

from collections.abc import Sequence
from typing import NamedTuple

from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag, Inode, Namespace, namespace_of, unpack_namespace
from kvfs.tree.copies import placements
from kvfs.tree.inodes import read_inodes


class HeldFile(NamedTuple):
    """A file with a name and published data, and its holders."""

    ino: int
    inode: Inode
    holders: list[int]
    """Nodes that have all of its present content."""
    wanted: int
    """The wanted number of copies, the first included."""
    namespace: Namespace


def look(t: Transaction, inos: Sequence[int]) -> list[HeldFile]:
    """Returns those of these files that have data which others can be given: an incomplete upload
    has them on its node alone, and of a namespace whose names are each node's own no other node
    knows a file."""
    found = []
    namespaces: dict[int, Namespace | None] = {}
    for ino, inode in zip(inos, read_inodes(t, inos), strict=True):
        if inode is None or not inode.nlink or not inode.flags & Flag.PUBLISHED:
            continue
        if inode.flags & Flag.ASSEMBLY:
            continue
        number = namespace_of(ino)
        if number not in namespaces:
            value = t.get(keys.namespace(number))
            namespaces[number] = None if value is None else unpack_namespace(value)
        namespace = namespaces[number]
        if namespace is not None and not namespace.is_peer:
            holders = whole_holders(t, ino, inode.version)
            found.append(HeldFile(ino, inode, holders, 1 + namespace.replicas, namespace))
    return found


def whole_holders(t: Transaction, ino: int, version: int) -> list[int]:
    """Returns the nodes that have all of this version of a file."""
    return [
        keys.unpack_node(each.node)
        for each in placements.holders(t, ino)
        if each.whole and each.holding.version == version
    ]
