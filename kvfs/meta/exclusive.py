"""Exclusive delegations: while a node holds one of a namespace, no other node changes names or
attributes there, so that its metadata replica has all of them without a question to the engine.
Functions of a transaction.

| key `d` namespace | written by |
|---|---|
| node, number, held | its node, with a change that it makes there |
| node, number | a node that wants to make a change there: it asks for it back |
| none | its node, when it hears that; or who asked, after REVOKED_S |

Invariants
- A transaction that changes names or attributes reads the key, and there is none of another node.
- Its node does without questions while its replica says that it is held, and for BELIEVED_S after
  the engine was last heard: what it heard later says that it was asked back. Each node counts these
  times by its own clock, so a node that is cut off, stopped or dead keeps others for REVOKED_S.
- Each that is taken has a number of its own, so that nobody ends another than was asked back.
- None is taken in metadata that nodes of the version before may change: they do not read the key.
"""

from collections.abc import Collection
from typing import Final

from kvfs.base.errors import Busy
from kvfs.meta import delegations, keys, schema
from kvfs.meta.engine import Transaction
from kvfs.meta.records import unpack_namespace
from kvfs.meta.redis.log import Proposal

BELIEVED_S: Final = 1.0
REVOKED_S: Final = 1.25
"""Longer, so that clocks which do not run equally fast do no harm."""
HELD: Final = b"held"
_NAMED: Final = 10
"""Bytes of node and number."""
_SEEN: Final = frozenset(keys.INODE + keys.ENTRY + keys.XATTR + keys.TIMES)
"""First bytes of keys of names and attributes."""
_ROOT: Final = keys.pack_u16(0)


class Excluded(Busy):
    """Another node holds an exclusive delegation, which has to end first."""

    def __init__(self, namespace_id: int) -> None:
        super().__init__(
            f"another node alone changes names of namespace {namespace_id} just now: try again"
        )
        self.namespace_id = namespace_id


def check(t: Transaction, written: Collection[bytes]) -> list[int]:
    """Checks, before these keys are written, that no other node holds one of their namespaces.
    Returns the namespaces of which nobody does. Raises Excluded."""
    free: list[int] = []
    for namespace_id in _changed(written):
        value = t.get(keys.exclusive(namespace_id))
        if value is None:
            free.append(namespace_id)
        elif value[:2] != t.node:
            raise Excluded(namespace_id)
    return free


def checked(t: Transaction, proposal: Proposal) -> Proposal:
    """Returns a proposal of another process that is not committed unless `check` finds the same.
    Raises Excluded."""
    written = {*proposal.writes, *dict(proposal.merges)}
    check(t, written)
    found = map(keys.exclusive, _changed(written))
    return proposal._replace(reads={**proposal.reads, **{key: t.get(key) for key in found}})


def take(t: Transaction, namespace_id: int, number: int) -> None:
    """Takes one, which nobody holds, from this commit on, if the namespace is strict."""
    record = t.get(keys.namespace(namespace_id))
    if record is not None and unpack_namespace(record).is_strict and schema.has_tags(t):
        t.put(keys.exclusive(namespace_id), t.node + keys.pack_u64(number) + HELD)


def is_held(t: Transaction, namespace_id: int) -> bool:
    """Returns whether this node holds one, and nobody has asked for it back."""
    value = t.get(keys.exclusive(namespace_id))
    return value is not None and value[:2] == t.node and value[_NAMED:] == HELD


def is_asked_back(t: Transaction, namespace_id: int) -> bool:
    """Returns whether this node holds one, and somebody has asked for it back."""
    value = t.get(keys.exclusive(namespace_id))
    return value is not None and value[:2] == t.node and value[_NAMED:] != HELD


def namespaces(t: Transaction) -> list[int]:
    """Returns the namespaces of which a node holds one."""
    found = [keys.parse_delegation(key) for key, _ in t.scan(*keys.DELEGATIONS)]
    return [namespace_id for namespace_id, node in found if node == delegations.EXCLUSIVE]


def of_other(t: Transaction, namespace_id: int) -> bytes | None:
    """Returns which one another node has, whether it was asked back or not."""
    value = t.get(keys.exclusive(namespace_id))
    return None if value is None or value[:2] == t.node else value[:_NAMED]


def ask_back(t: Transaction, namespace_id: int, which: bytes) -> None:
    """Asks another node to give one back, unless somebody has."""
    if t.get(keys.exclusive(namespace_id)) != which:
        t.put(keys.exclusive(namespace_id), which)


def end(t: Transaction, namespace_id: int, which: bytes) -> None:
    """Ends one, unless it has ended."""
    value = t.get(keys.exclusive(namespace_id))
    if value is not None and value.startswith(which):
        t.delete(keys.exclusive(namespace_id))


def _changed(written: Collection[bytes]) -> set[int]:
    """Returns the namespaces of which these keys are names or attributes."""
    spaces = {key[1:3] for key in written if key[0] in _SEEN}
    return {keys.unpack_node(space) for space in spaces if space != _ROOT}
