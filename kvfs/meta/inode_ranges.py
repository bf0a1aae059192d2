"""Inode numbers: the counter of a namespace, and the ranges that a node of a cluster takes of it
ahead for a namespace whose names are its own. Functions of a transaction.

Such a node asks nobody when it makes a file, so its numbers have to last for as long as the engine
may be away. The ranges that it has taken are a local key; other processes of its host take theirs
from it.

Invariant
- No number is given out twice, whatever a power cut takes back, and though the store is an older
  image of itself: other nodes may have files by the numbers that were given out since. So ranges
  end with the run of the node that took them.
"""

from typing import Final

from kvfs.base.errors import Corrupt, NoSpace
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import namespace_of

RANGE: Final = 1 << 24
"""Numbers taken at a time: half of them last for a quarter of an hour at 9,000 files a second. A
namespace has 2^24 such ranges."""
_PAIR: Final = 16
"""Bytes of a range, its beginning and its end."""


class UsedUp(Exception):
    """The node has too few numbers left. It leaves a transaction past all handlers of errors; the
    caller never gets it, since the transaction is run again when the node has taken more."""

    def __init__(self, namespace_id: int) -> None:
        super().__init__(namespace_id)
        self.namespace_id = namespace_id


def advance(t: Transaction, namespace_id: int, count: int) -> int:
    """Takes `count` numbers of the namespace's counter, the first of which is returned; none is
    ever given out again. Raises NoSpace (2^48 were used), Corrupt."""
    key = keys.counter(namespace_id)
    value = t.get(key)
    if value is None:
        raise Corrupt(f"the namespace {namespace_id} has no counter of inode numbers")
    first = keys.unpack_u64(value)
    if namespace_of(first + count) != namespace_id:
        raise NoSpace(f"the namespace {namespace_id} has used up its inode numbers")
    t.put(key, keys.pack_u64(first + count))
    return first


def take(t: Transaction, namespace_id: int, count: int) -> int:
    """Takes `count` numbers of this node's ranges; returns the first. Raises UsedUp."""
    key = keys.own_counter(namespace_id, t.node)
    ranges = _unpack(t.get(key))
    while ranges:
        first, end = ranges[0]
        if first + count <= end:
            ranges[0] = first + count, end
            t.put(key, _pack(ranges))
            return first
        del ranges[0]  # too few: they are given up
    raise UsedUp(namespace_id)


def give_up(t: Transaction) -> None:
    """Gives up this node's ranges."""
    for key in list(t.scan_keys(keys.COUNTER, keys.after(keys.COUNTER))):
        if key[len(keys.counter(0)) :] == t.node:
            t.delete(key)


def left(t: Transaction, namespace_id: int) -> int:
    """Returns how many numbers this node has left."""
    return sum(end - first for first, end in _unpack(t.get(keys.own_counter(namespace_id, t.node))))


def add(t: Transaction, namespace_id: int, first: int) -> None:
    """Adds a range to those of this node."""
    key = keys.own_counter(namespace_id, t.node)
    t.put(key, _pack([*_unpack(t.get(key)), (first, first + RANGE)]))


def _unpack(value: bytes | None) -> list[tuple[int, int]]:
    return [
        (keys.unpack_u64(value, at), keys.unpack_u64(value, at + _PAIR // 2))
        for at in range(0, len(value or b""), _PAIR)
        if value is not None
    ]


def _pack(ranges: list[tuple[int, int]]) -> bytes:
    return b"".join(keys.pack_u64(first) + keys.pack_u64(end) for first, end in ranges)
