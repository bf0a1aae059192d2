"""Delegations: a node of a cluster that holds one of a namespace may make files there that no other
node knows of. Functions of a transaction.

So a directory that looks empty may hold a file, and a name that looks free may be a file's. A node
that removes a directory makes all other nodes give their delegations back first: then the files
that they made there are known, and keep the directory. A node that makes or moves one does the same
if a close of others may be acknowledged before it is known (a cache). Making a file costs nothing
for it; the rarer changes of directories pay.

| key | written by |
|---|---|
| held | its node, with the first file that it makes there |
| recalled | a node that wants to remove a directory, or to make one |
| none | its node, with the last file that only it knew; or a node that found that one dead |

Invariants
- A removal of a directory reads all delegations of its namespace in the same transaction, and there
  is none of another node.
- A file that only one node knows of is made, and published, while that node's replica says that it
  holds one.
"""

from typing import Final

from kvfs.meta import keys
from kvfs.meta.engine import Transaction

EXCLUSIVE: Final = 0
"""The node of none, in the key of an exclusive delegation (`kvfs.meta.exclusive`)."""
HELD: Final = b"held"
RECALLED: Final = b""
"""Shorter than the held value: a server whose memory is full accepts it, so that it can be
emptied."""


class Delegated(Exception):
    """Other nodes may have files in a directory that nobody else knows of. It leaves a transaction
    past all handlers of errors; the caller never gets it, since the transaction is run again when
    those nodes have been asked."""

    def __init__(self, namespace_id: int) -> None:
        super().__init__(namespace_id)
        self.namespace_id = namespace_id


def is_held(t: Transaction, namespace_id: int) -> bool:
    """Returns whether this node may make files that no other node knows of."""
    return t.get(keys.delegation(namespace_id, t.node)) == HELD


def take(t: Transaction, namespace_id: int) -> None:
    """Takes one from this commit on, unless it is being given back."""
    key = keys.delegation(namespace_id, t.node)
    if t.get(key) is None:
        t.put(key, HELD)


def others(t: Transaction, namespace_id: int) -> list[int]:
    """Returns the other nodes that hold one."""
    prefix, own = keys.delegations(namespace_id), keys.unpack_node(t.node)
    found = [keys.parse_delegation(key)[1] for key, _ in t.scan(prefix, keys.after(prefix))]
    return [node for node in found if node not in (own, EXCLUSIVE)]


def of_node(t: Transaction, node: bytes) -> list[int]:
    """Returns the namespaces of which a node holds one."""
    found = [keys.parse_delegation(key) for key, _ in t.scan(*keys.DELEGATIONS)]
    return [namespace_id for namespace_id, each in found if each == keys.unpack_node(node)]


def check_none(t: Transaction, namespace_id: int) -> None:
    """Checks, before a directory of the namespace is removed or made, that no other node holds one.
    Raises Delegated."""
    if t.node and others(t, namespace_id):
        raise Delegated(namespace_id)
