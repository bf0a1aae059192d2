"""The usage of each node in a namespace that is kept by its nodes, as it tells the others:
functions of a transaction. Each copy of a file counts where it is, so the sum counts it once.
"""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from kvfs.base.errors import NotEmpty
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import (
    NodeUsage,
    Usage,
    pack,
    unpack_namespace,
    unpack_node_usage,
    unpack_usage,
)
from kvfs.policy import capacity_grants
from kvfs.policy.capacity_grants import CapacityShare
from kvfs.tree.copies import placements


def present(t: Transaction, namespace_id: int) -> NodeUsage:
    """Returns what this node has now."""
    usage = unpack_usage(t.get(keys.usage(namespace_id)) or pack(Usage()))
    has_files = bool(placements.held_within(t, t.node, namespace_id, 0, 1))
    return NodeUsage(bytes=usage.bytes, inodes=usage.inodes, has_files=has_files)


def told(t: Transaction, namespace_id: int) -> dict[int, NodeUsage]:
    """Returns what the nodes told last."""
    prefix = keys.node_usage(namespace_id, b"")
    found = t.scan(prefix, keys.after(prefix))
    return {keys.unpack_node(key[len(prefix) :]): unpack_node_usage(value) for key, value in found}


def own(t: Transaction, namespace_id: int) -> NodeUsage | None:
    """Returns what this node told last; None: nothing."""
    value = t.get(keys.node_usage(namespace_id, t.node))
    return None if value is None else unpack_node_usage(value)


def elsewhere(t: Transaction, namespace_id: int) -> Usage:
    """Returns the sum of what the other nodes told last."""
    me = keys.unpack_node(t.node)
    others = [each for node, each in told(t, namespace_id).items() if node != me]
    return Usage(
        bytes=sum(each.bytes for each in others), inodes=sum(each.inodes for each in others)
    )


def limit(t: Transaction, namespace_id: int, capacity: int) -> int:
    """Returns the bytes of a namespace's capacity that this node may fill: all, until it was
    granted a part."""
    mine = own(t, namespace_id)
    return capacity if mine is None else mine.keeps


def shares(
    told: Mapping[int, NodeUsage], node: int, members: Collection[int]
) -> list[CapacityShare]:
    """Returns the parts of the other `members`."""
    return [share(each) for other, each in told.items() if other in members and other != node]


def share(usage: NodeUsage) -> CapacityShare:
    """Returns a node's part of a capacity."""
    return CapacityShare(usage.bytes, usage.granted, usage.keeps, usage.lacks)


def with_grant(
    now: NodeUsage,
    before: NodeUsage | None,
    others: Sequence[CapacityShare],
    capacity: int,
    members: int,
) -> NodeUsage:
    """Returns what a node is to tell of a namespace with a capacity, with its grant. `before`: what
    it told last; `others`: the parts of the other members, of `members` in all."""
    mine = share(before or NodeUsage())._replace(used=now.bytes)
    part = capacity_grants.next_share(capacity, mine, others, members)
    return msgspec.structs.replace(now, granted=part.granted, keeps=part.keeps, lacks=part.lacks)


def take_grant(t: Transaction, namespace_id: int, members: Collection[int]) -> None:
    """Tells what this node has of a namespace, with its grant as those of the other `members`
    allow; what further nodes told is dropped."""
    value = t.get(keys.namespace(namespace_id))
    capacity = unpack_namespace(value).capacity if value is not None else 0
    if capacity:
        now, me = present(t, namespace_id), keys.unpack_node(t.node)
        found = told(t, namespace_id)
        others = shares(found, me, members)
        granted = with_grant(now, found.get(me), others, capacity, len(members))
        t.put(keys.node_usage(namespace_id, t.node), pack(granted))
        for gone in found.keys() - {*members, me}:
            t.delete(keys.node_usage(namespace_id, keys.pack_node(gone)))


def tell(t: Transaction, news: dict[int, NodeUsage], gone: Collection[int]) -> None:
    """Tells the others what this node has of namespaces, those that there are still, and drops what
    nodes told that are `gone`. It reads no range: all nodes write there."""
    for namespace_id, usage in news.items():
        if t.get(keys.namespace(namespace_id)) is None:
            continue
        t.put(keys.node_usage(namespace_id, t.node), pack(usage))
        for node in gone:
            t.delete(keys.node_usage(namespace_id, keys.pack_node(node)))


def check_empty(t: Transaction, namespace_id: int, name: bytes) -> None:
    """Raises NotEmpty while other nodes say that they have files of the namespace."""
    me = keys.unpack_node(t.node)
    having = [node for node, each in told(t, namespace_id).items() if each.has_files and node != me]
    if having:
        raise NotEmpty(
            f"the namespace {name.decode(errors='backslashreplace')} is not empty: files of it are"
            f" on {', '.join(f'node {each}' for each in having)}"
        )


def forget(t: Transaction, namespace_id: int) -> None:
    """Drops what nodes told of a namespace that is removed."""
    for node in told(t, namespace_id):
        t.delete(keys.node_usage(namespace_id, keys.pack_node(node)))
