"""Delegations: a node of a cluster that has one of a namespace may make files there of which nobody
else knows. Functions of a transaction.

So a directory that looks empty may hold a file, and a name that looks free be a file's. Whoever
removes a directory has all other nodes give their delegations back first: then what they made there
is known, and keeps its directory. So does whoever makes one, or moves it, where a close of theirs
may be acknowledged before it is known (a cache). Making a file costs nothing for it; the rarer
changes of directories pay.

| key | written by |
|---|---|
| held | its node, with the first file that it makes there |
| recalled | a node that wants to remove a directory, or to make one |
| none | its node, with the last of what only it knew; or who found that node dead |

Invariants
- What removes a directory reads all delegations of its namespace in the same transaction, and there
  is none of another node.
- What only one node knows of is made, and published, while its mirror says that it holds one.
"""

from typing import Final

from kvfs.meta import keys
from kvfs.meta.engine import Transaction

HELD: Final = b"held"
RECALLED: Final = b""
"""Shorter: a server whose memory is full takes it, so that it can be emptied."""


class Delegated(Exception):
    """Other nodes may have files in a directory of which nobody else knows. A transaction is left
    by it, past all handlers of errors; its caller does not get it, since it is run again when they
    have been asked."""

    def __init__(self, namespace_id: int) -> None:
        super().__init__(namespace_id)
        self.namespace_id = namespace_id


def is_held(t: Transaction, namespace_id: int) -> bool:
    """Whether this node may make files of which nobody else knows."""
    return t.get(keys.delegation(namespace_id, t.node)) == HELD


def take(t: Transaction, namespace_id: int) -> None:
    """Have one from this commit on, unless it is being given back."""
    key = keys.delegation(namespace_id, t.node)
    if t.get(key) is None:
        t.put(key, HELD)


def others(t: Transaction, namespace_id: int) -> list[int]:
    """Other nodes that have one."""
    prefix, own = keys.delegations(namespace_id), keys.unpack_node(t.node)
    found = [keys.parse_delegation(key)[1] for key, _ in t.scan(prefix, keys.after(prefix))]
    return [node for node in found if node != own]


def of_node(t: Transaction, node: bytes) -> list[int]:
    """The namespaces of which a node has one."""
    found = [keys.parse_delegation(key) for key, _ in t.scan(*keys.DELEGATIONS)]
    return [namespace_id for namespace_id, each in found if each == keys.unpack_node(node)]


def check_none(t: Transaction, namespace_id: int) -> None:
    """Before a directory of the namespace is removed, or made. Raises Delegated."""
    if t.node and others(t, namespace_id):
        raise Delegated(namespace_id)
