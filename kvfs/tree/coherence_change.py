"""The change of a namespace's coherence to `peer` while it has files: what it does to the records
that all nodes share. Functions of a transaction.

| step | who | recorded |
|---|---|---|
| 1 the namespace's record says `peer`: from that entry of the log on each node takes what its
  replica has of the namespace for its own | who asks | the tag SWITCHES_TO |
| 2 it has told others which of these files it holds | each node | its key `y`: TOLD |
| 3 it has let go what it does not hold | each node | DONE |
| 4 the server's records of the namespace are dropped, when all nodes are done | one node | the
  tag and the keys `y` end |

`kvfs.tree.copies.peer_end` has the way back.

A node that is away does its part when it follows the log again, or reads the server's records anew:
until then they stay there. A kill leaves each step to be done again by whoever had to.
"""

from typing import Final

from kvfs.base.errors import Busy, NotSupported
from kvfs.meta import keys, local_keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import (
    Namespace,
    Tag,
    namespace_root,
    pack,
    unpack_inode,
    unpack_namespace,
)

TOLD: Final = local_keys.TOLD
DONE: Final = b"done"


def begin(t: Transaction, namespace_id: int, record: Namespace) -> None:
    """Has a record, which the caller writes, say that the names become each node's own. Raises
    NotSupported if the namespace has what such a one cannot have."""
    prefix = b"b" + keys.pack_u16(namespace_id)
    if next(t.scan(prefix, keys.after(prefix)), None) is not None:
        raise NotSupported(
            "the namespace has hard links, and a file of a namespace with --coherence peer has one"
            " name: remove the further names (`find -links +1`)"
        )
    record.tags = {**(record.tags or {}), Tag.SWITCHES_TO: record.coherence.encode()}
    key = keys.inode(namespace_root(namespace_id))
    top = unpack_inode(t.get(key) or b"")
    top.nlink = 2
    t.put(key, pack(top))


def switching(t: Transaction) -> list[int]:
    """Returns the namespaces whose change to `peer` is not finished."""
    records = t.scan(keys.NAMESPACE, keys.after(keys.NAMESPACE))
    return [
        keys.unpack_node(key[1:])
        for key, value in records
        if Tag.SWITCHES_TO in (unpack_namespace(value).tags or {})
    ]


def is_switching(t: Transaction, namespace_id: int) -> bool:
    """Returns whether the namespace's change, to `peer` or back, is not finished."""
    value = t.get(keys.namespace(namespace_id))
    return value is not None and bool(unpack_namespace(value).switches_to)


def steps(t: Transaction, namespace_id: int) -> dict[int, bytes]:
    """Returns the last step that each node did, TOLD or DONE."""
    prefix = keys.switched(namespace_id, b"")
    found = t.scan(prefix, keys.after(prefix))
    return {keys.unpack_node(key[len(prefix) :]): value for key, value in found}


def report(t: Transaction, namespace_id: int, step: bytes) -> None:
    """Records that this node did a step."""
    if is_switching(t, namespace_id):
        t.put(keys.switched(namespace_id, t.node), step)


def finish(t: Transaction, namespace_id: int) -> None:
    """Records that the change is finished."""
    key = keys.namespace(namespace_id)
    record = unpack_namespace(t.get(key) or b"")
    if record.ends_peer:
        record.coherence = record.switches_to
    done = (Tag.SWITCHES_TO, Tag.ENDS_PEER)
    record.tags = {
        number: value for number, value in (record.tags or {}).items() if number not in done
    } or None
    for node in steps(t, namespace_id):
        t.delete(keys.switched(namespace_id, keys.pack_node(node)))
    t.put(key, pack(record))


def check_settled(record: Namespace) -> None:
    """Raises Busy while a change of a namespace's coherence is not finished."""
    if not record.switches_to:
        return
    name = record.name.decode(errors="backslashreplace")
    raise Busy(
        f"the namespace {name} is still becoming {record.switches_to}: `kvfs namespace show {name}`"
        " names the nodes that have to do their part; one that does not come back is let go with"
        " `kvfs node remove`"
    )
