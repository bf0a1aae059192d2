"""Decommission: removal of the traces of a removed node from the metadata, as functions of a
transaction.

| key | treatment |
|---|---|
| `w` | the file was never closed: dropped |
| `u` | another node that has the file seals it |
| `r` | dropped: nobody makes a data file of that number any more |
| `p`, `h` | dropped; a cache file that only it had is evicted, a durable one has no data then |
| `d` | dropped |

The traces are listed in a read, since the lists of all nodes change all the time; the transaction
checks each again.
"""

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

from kvfs.base.errors import KvfsError
from kvfs.meta import delegations, keys
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.records import namespace_of
from kvfs.tree import lifecycle, namespaces, tree
from kvfs.tree.copies import placements
from kvfs.tree.inode_lists import listed
from kvfs.tree.lifecycle import Evicted


class Left(NamedTuple):
    """Some traces of a node, by inode number except for the last."""

    unpublished: list[int]
    unsealed: list[int]
    reserved: list[int]
    held: list[int]
    delegated: list[int]
    """Namespaces."""

    def apart(self, engine: Engine) -> "list[Left]":
        """Returns them in parts of which each can be changed by one transaction."""
        parts: dict[int, Left] = {}
        for kind, inos in enumerate(self[:4]):
            for ino in inos:
                _part(parts, engine.shard(namespace_of(ino)))[kind].append(ino)
        for namespace_id in self.delegated:
            _part(parts, engine.shard(namespace_id)).delegated.append(namespace_id)
        return list(parts.values())


def _part(parts: dict[int, Left], shard: int) -> Left:
    return parts.setdefault(shard, Left([], [], [], [], []))


class Gone(NamedTuple):
    """The result of a removal."""

    evicted: list[Evicted]
    lost: int
    """Durable files that no node has any more."""


def alone(t: Transaction, node: bytes, after_ino: int, limit: int) -> tuple[list[int], int]:
    """Examines the next `limit` files of a node behind `after_ino`. Returns those in durable
    namespaces that no other node has, and where to go on; 0: that was all."""
    inos = placements.held_by(t, node, after_ino, limit)
    caches = _caches(t)
    found = [
        ino
        for ino in inos
        if namespace_of(ino) not in caches
        and t.get(keys.orphan(ino)) is None
        and all(each.node == node for each in placements.holders(t, ino))
    ]
    return found, inos[-1] if inos else 0


def shown_paths(t: Transaction, inos: Sequence[int]) -> str:
    """Returns the paths of files, for people."""
    shown = []
    for ino in inos:
        with contextlib.suppress(KvfsError):  # it was removed meanwhile
            shown.append(tree.path_of(t, ino).decode(errors="backslashreplace"))
    return ", ".join(shown)


def list_left(t: Transaction, node: bytes, limit: int) -> Left:
    """Returns up to `limit` traces of each kind. It reads the marks of all nodes: there are as many
    as files being made and sealed."""
    return Left(
        listed(t, keys.unpublished(0), b"x", limit, node),
        listed(t, keys.unsealed(0), b"v", limit, node),
        listed(t, keys.reserved(0), b"s", limit, node),
        placements.held_by(t, node, 0, limit),
        delegations.of_node(t, node),
    )


def let_go(t: Transaction, node: bytes, left: Left, now: int) -> Gone:
    """Removes the traces, as the table above says; the node does not run any more."""
    evicted: list[Evicted] = []
    for ino in left.unpublished:
        if t.get(keys.unpublished(ino)) == node:
            placements.let_go(t, ino, node)
            t.delete(keys.unpublished(ino))
            evicted += _drop(t, ino, now)
    for ino in left.unsealed:
        if t.get(keys.unsealed(ino)) == node:
            _pass_on(t, ino, node)
    for ino in left.reserved:
        if t.get(keys.reserved(ino)) == node:
            t.delete(keys.reserved(ino))
    for namespace_id in left.delegated:
        t.delete(keys.delegation(namespace_id, node))
    lost = 0
    caches = _caches(t)
    for ino in left.held:
        placements.let_go(t, ino, node)
        if placements.is_held(t, ino):
            continue
        if namespace_of(ino) in caches:
            evicted += _drop(t, ino, now)
        elif t.get(keys.orphan(ino)) is not None:
            tree.reap(t, ino)
        elif t.get(keys.inode(ino)) is not None:
            lost += 1
    return Gone(evicted, lost)


def _pass_on(t: Transaction, ino: int, node: bytes) -> None:
    others = [each.node for each in placements.holders(t, ino) if each.node != node]
    if others:
        t.put(keys.unsealed(ino), others[0])
    else:
        t.delete(keys.unsealed(ino))


def _drop(t: Transaction, ino: int, now: int) -> list[Evicted]:
    """Removes all names of a file that nobody has, and its record; returns the names."""
    found = lifecycle.evict(t, ino, now)
    tree.reap(t, ino)
    return [] if found is None else [found]


def _caches(t: Transaction) -> set[int]:
    return {number for number, each in namespaces.records(t).items() if each.kind == "cache"}
