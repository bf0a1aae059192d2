"""The nodes of a cluster that have a file's data. On a lone node nothing is recorded: it has
everything.

Invariants
- A record of a file with data has the placement of the node that made it, from its first
  transaction on; an orphan is reaped with its last placement.
- `p` and `h` of a node and a file come and go together.
- A node that publishes new content holds it alone: others have another content, and learn that by
  the end of their placement.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvfs.base.errors import Conflict, Stale
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag, Holding, Inode, pack, unpack_holding, unpack_inode
from kvfs.tree.inode_lists import listed
from kvfs.tree.inodes import read_inodes

_NODE = 9
"""The offset of the node in the key of a placement: `p` and the inode come before."""


class Holder(NamedTuple):
    """A node with its part of a file."""

    node: bytes
    holding: Holding

    @property
    def whole(self) -> bool:
        return not self.holding.blocks


def hold(t: Transaction, ino: int, version: int) -> None:
    """Records that this node has the data file, the whole of it."""
    if t.node:
        hold_at(t, ino, version, t.node)


def hold_at(t: Transaction, ino: int, version: int, node: bytes) -> None:
    """Records that a node has the data file, the whole of it."""
    t.put_all(of_holder(ino, version, node))


def of_holder(ino: int, version: int, node: bytes) -> list[tuple[bytes, bytes]]:
    """Returns the keys and values by which a node has the data file, the whole of it."""
    placement = keys.placement(ino, node)
    return [(placement, pack(Holding(version=version))), (keys.held(node, ino), b"")]


def hold_alone(t: Transaction, ino: int, version: int) -> None:
    """Records that this node has new content, and so no other node has the file."""
    if not t.node:
        return
    for each in holders(t, ino):
        if each.node != t.node:
            let_go(t, ino, each.node)
    hold(t, ino, version)


def let_go(t: Transaction, ino: int, node: bytes) -> None:
    """Records that the node has nothing of the file any more."""
    t.delete(keys.placement(ino, node))
    t.delete(keys.held(node, ino))


def hand_over(t: Transaction, ino: int, version: int, giver: bytes) -> None:
    """Makes this node responsible for a file whose data file it shares with another node, which was
    so alone. Raises Stale, Conflict (the file is another by now, or not on disk yet)."""
    value = t.get(keys.inode(ino))
    if value is None:
        raise Stale("the file was removed")
    inode = unpack_inode(value)
    settled = inode.flags & Flag.SEALED and t.get(keys.unsealed(ino)) is None
    if not settled or not inode.nlink or inode.version != version:
        raise Conflict("the file is being written, or was removed")
    if [each.node for each in holders(t, ino)] != [giver]:
        raise Conflict("the file is not that node's alone")
    let_go(t, ino, giver)
    hold(t, ino, version)


def leave_to_others(t: Transaction, ino: int) -> bool:
    """Drops this node's placement of a file if another node has all of its content, and has it on
    disk, as every node has that did not write it. Returns whether that is so."""
    value = t.get(keys.inode(ino))
    if value is None:
        return False
    inode = unpack_inode(value)
    others = [
        each.node
        for each in holders(t, ino)
        if each.whole and each.holding.version == inode.version and each.node != t.node
    ]
    if not others:
        return False
    let_go(t, ino, t.node)
    if t.get(keys.unsealed(ino)) == t.node:
        inode.boot = 0
        t.put(keys.inode(ino), pack(inode))
        if inode.flags & Flag.SEALED:
            t.delete(keys.unsealed(ino))
        else:
            t.put(keys.unsealed(ino), others[0])
    return True


def is_held(t: Transaction, ino: int) -> bool:
    """Returns whether any node has anything of the file."""
    prefix = keys.placements(ino)
    return next(t.scan(prefix, keys.after(prefix)), None) is not None


def holders(t: Transaction, ino: int) -> list[Holder]:
    """Returns all holders, in the order of their numbers; whether they live is not known here."""
    prefix = keys.placements(ino)
    return [
        Holder(key[_NODE:], unpack_holding(value))
        for key, value in t.scan(prefix, keys.after(prefix))
    ]


def is_here(t: Transaction, ino: int, inode: Inode) -> bool:
    """Returns whether this node has the data file of a record that has a name."""
    if not inode.nlink or not t.node:
        return inode.nlink > 0
    value = t.get(keys.placement(ino, t.node))
    return value is not None and unpack_holding(value).version == inode.version


def read_here(t: Transaction, inos: Sequence[int]) -> list[Inode | None]:
    """Returns the record of each of these files that has a name and its data file on this node."""
    return [
        inode if inode is not None and is_here(t, ino, inode) else None
        for ino, inode in zip(inos, read_inodes(t, inos), strict=True)
    ]


def holding(t: Transaction, inos: Sequence[int], node: bytes) -> list[Holding | None]:
    """Returns a node's holding of each of these files; one round trip."""
    values = t.get_many([keys.placement(ino, node) for ino in inos])
    return [None if value is None else unpack_holding(value) for value in values]


def held_by(t: Transaction, node: bytes, after_ino: int, limit: int) -> list[int]:
    """Returns up to `limit` inode numbers above `after_ino` of files of which a node has a part."""
    return listed(t, keys.held(node, after_ino), keys.after(b"h" + node), limit)


def held_within(
    t: Transaction, node: bytes, namespace_id: int, after_ino: int, limit: int
) -> list[int]:
    """Does what `held_by` does, for the files of one namespace."""
    prefix = keys.HELD + node + keys.pack_u16(namespace_id)
    start = max(prefix, keys.held(node, after_ino))
    return listed(t, start, keys.after(prefix), limit)
