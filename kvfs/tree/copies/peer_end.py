"""The end of a namespace's coherence `peer`: what it does to the records that all nodes share.
Functions of a transaction.

| step | who | recorded |
|---|---|---|
| 1 it is closed: from this entry of the log on no node writes to keys of it that are its own; it is
  `peer` still, and read | who asks | the tag ENDS_PEER |
| 2 each removal that a node knows is known to all | each node | its key `y`: STONES |
| 3 the engine has the record of each file, and each directory | each node | RECORDS |
| 4 of the files of one name one has it | each node | TOLD |
| 5 the names are everybody's, as a cache's are: one entry of the log | one node | the record |
| 6 its replica has what the engine has: the namespace is open | each node | DONE |
| 7 the record has its new coherence | one node | the record; the tag and the keys `y`, `v` end |

A step begins when all members have done the one before. Up to the entry of step 5 the change is
asked back by one entry: then all is as it was at step 1, since nothing was written to what nodes
have. The engine's records are dropped when each node has forgotten them.

| event, up to step 5 | follows |
|---|---|
| a node dies, is removed, or starts again | it is asked back |
| the engine, or a node's disk, is full | the same |
| `--coherence peer` | the same |
| a kill of who asked | nothing: the nodes go on |
| the server is away | the namespace is closed until it is back |

From step 5 on a node that starts takes the engine's records before it recovers.
"""

from itertools import islice
from typing import Final

from kvfs.base.errors import Conflict, NotSupported
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.local_keys import NOTHING
from kvfs.meta.records import (
    Namespace,
    Tag,
    namespace_root,
    pack,
    unpack_inode,
    unpack_namespace,
)
from kvfs.tree import coherence_change
from kvfs.tree.coherence_change import DONE, TOLD
from kvfs.tree.copies import node_usage

STONES: Final = b"stones"
RECORDS: Final = b"records"
ORDER: Final = (STONES, RECORDS, TOLD, DONE)


def begin(t: Transaction, namespace_id: int, record: Namespace, now: int) -> None:
    """Has a record, which the caller writes, say that the namespace is closed, and gets the
    coherence that it has now. Raises NotSupported for what it cannot have meanwhile."""
    if record.kind != "cache" or record.cold:
        raise NotSupported(
            "a namespace ends being peer as a cache without the cold tier: set --cold off before,"
            " and other settings after it"
        )
    if next(t.scan(keys.PLACE, keys.after(keys.PLACE)), None) is not None:
        raise NotSupported(
            "namespaces have shards of their own (`kvfs engine spread`): none ends being peer then."
            " Run `kvfs engine gather` before"
        )
    record.tags = {
        **(record.tags or {}),
        Tag.ENDS_PEER: b"%s %d" % (record.coherence.encode(), now),
    }
    record.coherence = "peer"
    t.put(keys.usage(namespace_id), NOTHING)


def ask_back(t: Transaction, namespace_id: int, record: Namespace) -> None:
    """Has a record, which the caller writes, say that the namespace stays `peer`."""
    began = (record.tags or {})[Tag.ENDS_PEER].partition(b" ")[2]
    record.tags = {**(record.tags or {}), Tag.ENDS_PEER: b"peer " + began}
    for node in coherence_change.steps(t, namespace_id):
        t.delete(keys.switched(namespace_id, keys.pack_node(node)))
    key = keys.inode(namespace_root(namespace_id))
    top = unpack_inode(t.get(key) or b"")
    top.nlink = 2
    t.put(key, pack(top))


def ask_back_closed(t: Transaction, namespace_id: int) -> bool:
    """Asks the change back if the namespace is closed and not ended; returns whether it was."""
    record = _record(t, namespace_id)
    if record is None or not record.is_peer or not record.ends_peer or record.is_asked_back:
        return False
    ask_back(t, namespace_id, record)
    t.put(keys.namespace(namespace_id), pack(record))
    return True


def ending(t: Transaction) -> dict[int, Namespace]:
    """Returns the namespaces whose end of being `peer`, or what that left, is not finished."""
    records = t.scan(keys.NAMESPACE, keys.after(keys.NAMESPACE))
    found = {keys.unpack_node(key[1:]): unpack_namespace(value) for key, value in records}
    return {number: record for number, record in found.items() if record.ends_peer}


def check_begun(t: Transaction, namespace_id: int, began: bytes) -> None:
    """Raises Conflict unless the namespace is closed by the change that `began` names."""
    record = _record(t, namespace_id)
    if record is None or not record.is_peer or (record.tags or {}).get(Tag.ENDS_PEER) != began:
        raise Conflict("the change of the namespace's coherence was asked back")


def report(t: Transaction, namespace_id: int, began: bytes, step: bytes) -> None:
    """Records that this node did a step up to TOLD. Raises Conflict."""
    check_begun(t, namespace_id, began)
    t.put(keys.switched(namespace_id, t.node), step)


def have_done(steps: dict[int, bytes], members: list[int], step: bytes) -> bool:
    """Returns whether all nodes did a step. Pure."""
    least = ORDER.index(step)
    return all(each in steps and ORDER.index(steps[each]) >= least for each in members)


def end(t: Transaction, namespace_id: int, began: bytes, members: list[int]) -> None:
    """Makes the namespace's names everybody's: those of a cache, whatever it is to be when all
    nodes have taken them, since one that has not shows what it had. Raises Conflict unless all
    members have told, and nobody else."""
    check_begun(t, namespace_id, began)
    steps = coherence_change.steps(t, namespace_id)
    if steps.keys() - set(members):
        raise Conflict("a node was removed that has told what it holds")
    if not have_done(steps, members, TOLD):
        raise Conflict("a node has joined, and has to tell first")
    record = _record(t, namespace_id)
    assert record is not None, "it was found to be closed"
    record.coherence = "cache"
    node_usage.forget(t, namespace_id)
    t.put(keys.namespace(namespace_id), pack(record))


def put_stone(t: Transaction, namespace_id: int, digest: bytes, stone: bytes) -> None:
    """Has all nodes know a removal, by a digest of the path."""
    t.put(keys.removed(namespace_id, digest), stone)


def drop_stones(t: Transaction, namespace_id: int, limit: int) -> bool:
    """Drops up to `limit` removals that were told; returns whether that was all."""
    prefix = keys.removed(namespace_id, b"")
    found = [key for key, _ in islice(t.scan(prefix, keys.after(prefix)), limit)]
    for key in found:
        t.delete(key)
    return len(found) < limit


def _record(t: Transaction, namespace_id: int) -> Namespace | None:
    value = t.get(keys.namespace(namespace_id))
    return None if value is None else unpack_namespace(value)
