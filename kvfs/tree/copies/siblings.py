"""The copies of a file in a namespace that is kept by its nodes (coherence `peer`): the other
holders that one of them knows, its siblings. Functions of a transaction.

A sibling is recorded as a placement beside this node's own, so that what a node held is found by
its number when it dies.

Invariants
- Only a sealed file has siblings: they have the content of its checksum. With the next content
  (`lifecycle.publish`) this node holds the file alone.
- What is recorded is what this node was told. A sibling that is none any more costs one question.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag, Inode, Namespace, namespace_of, unpack_namespace
from kvfs.tree.copies import held_names, placements
from kvfs.tree.copies.held_names import HeldName
from kvfs.tree.inodes import read_inodes
from kvfs.tree.namespaces import is_peer


class HeldBlock(NamedTuple):
    """A file that this node holds, and its siblings."""

    ino: int
    inode: Inode
    path: bytes
    held: HeldName
    siblings: list[int]
    namespace: Namespace

    @property
    def namespace_id(self) -> int:
        return namespace_of(self.ino)

    @property
    def is_sealed(self) -> bool:
        return bool(self.inode.flags & Flag.SEALED)

    @property
    def wanted(self) -> int:
        """The wanted number of copies, this node's included."""
        return 1 + self.namespace.replicas


def look(t: Transaction, inos: Sequence[int]) -> list[HeldBlock]:
    """Returns those of these files that this node holds and could tell others of."""
    found: list[HeldBlock] = []
    policies: dict[int, Namespace | None] = {}
    for ino, inode in zip(inos, read_inodes(t, inos), strict=True):
        space = namespace_of(ino)
        if space not in policies:
            value = t.get(keys.namespace(space))
            policies[space] = None if value is None else unpack_namespace(value)
        policy = policies[space]
        if inode is None or policy is None or not policy.is_peer:
            continue
        path = held_names.path_of(t.get, ino)
        held = None if path is None else held_names.told(t, space, path)
        if path is not None and held is not None and held.ino == ino:
            found.append(HeldBlock(ino, inode, path, held, list(held.siblings), policy))
    return found


def note(t: Transaction, ino: int, version: int, nodes: Iterable[int]) -> None:
    """Records nodes that have a copy of a file, if this node has that content, sealed, and the
    namespace is still kept by its nodes: else that is everybody's record."""
    inode = read_inodes(t, [ino])[0]
    if inode is None or inode.version != version or not inode.flags & Flag.SEALED:
        return
    if not held_names.is_held(t, ino) or not is_peer(t, namespace_of(ino)):
        return
    known = {each.node for each in placements.holders(t, ino)}
    for node in map(keys.pack_node, nodes):
        if node not in known and len(known) <= held_names.MOST_SIBLINGS:
            placements.hold_at(t, ino, version, node)
            known.add(node)


def forget(t: Transaction, ino: int, node: int) -> bool:
    """Records that a node has no copy of a file that this one holds; returns whether that is
    news. Nothing where the namespace is not kept by its nodes any more."""
    packed = keys.pack_node(node)
    if packed == t.node or t.get(keys.placement(ino, packed)) is None:
        return False
    if not held_names.is_held(t, ino) or not is_peer(t, namespace_of(ino)):
        return False
    placements.let_go(t, ino, packed)
    return True
