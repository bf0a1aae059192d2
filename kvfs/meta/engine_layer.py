"""The records that the engine has of namespaces whose names were each node's own and become
everybody's again (`kvfs.tree.copies.peer_end`): kept beside the node's own records until all nodes
have told these.

| stage of a namespace | its keys in the replica | what the log says of them goes |
|---|---|---|
| none | this node's own | (nothing) |
| CLOSED: nodes tell what they hold | its own; nobody writes them | into the layer |
| VOID: asked back | its own, written again | nowhere; the layer is dropped |
| ENDED: all have told | its own; nobody writes them | into the layer |
| TAKING, with a key | up to it the engine's, behind it its own | there, behind it into the layer |
| the end | the engine's | there |

Invariants
- The stage stands in the mark of the namespace (`local_namespaces`), so a kill leaves each as it
  was; it changes in the commit of the entry that says so.
- In CLOSED, ENDED and TAKING the layer has all that the engine has of these keys, as of the
  replica's position.
"""

from collections.abc import Container, Iterator
from heapq import merge
from itertools import islice
from typing import Final

from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.local_keys import LOCAL_KINDS, is_local_key

MARKS: Final = b"\xff~l"
_LAYER: Final = b"\xff~e"
"""Keys in the unnamed database, beyond every key of the metadata: the marks of namespaces, by
number, with their stages; and what the engine has of a key, by that."""
CLOSED: Final = b"t"
VOID: Final = b"v"
ENDED: Final = b"e"
_TAKING: Final = b"c"
_KINDS: Final = sorted({*LOCAL_KINDS, keys.HELD})


Changed = tuple[bytes, bytes | None, bytes | None]
"""A key that was changed, with its values before and now."""


def space_of(key: bytes) -> bytes:
    """Returns the namespace's id in a local key."""
    return key[3:5] if key[0] == keys.HELD[0] else key[1:3]


class EngineLayer:
    """The layer of one replica. `stages`: those of namespaces that have one, by id."""

    def __init__(self) -> None:
        self.stages: dict[bytes, bytes] = {}
        self.heard = 0
        """Keys that came into the layer since the start."""

    def load(self, t: Transaction) -> set[bytes]:
        """Loads the stages; returns the ids of all marked namespaces."""
        marks = {key[len(MARKS) :]: stage for key, stage in t.scan(MARKS, keys.after(MARKS))}
        self.stages = {space: stage for space, stage in marks.items() if stage}
        return set(marks)

    def enter(self, t: Transaction, space: bytes, stage: bytes) -> None:
        """Brings a namespace to a stage; empty: to none."""
        if stage:
            self.stages[space] = stage
        else:
            self.stages.pop(space, None)
        t.put(MARKS + space, stage)

    def drop(self, t: Transaction, space: bytes, limit: int) -> bool:
        """Drops up to `limit` keys that the layer has of a namespace; returns whether that was
        all."""
        found = list(islice(_keys(t, _LAYER, space, b""), limit))
        for key in found:
            t.delete(_LAYER + key)
        return len(found) < limit

    def has_ended(self, space: bytes) -> bool:
        """Returns whether the namespace has ended being of this kind for all nodes."""
        return self.stages.get(space, CLOSED) not in (CLOSED, VOID)

    def is_closed(self, space: bytes) -> bool:
        """Returns whether nothing may be written to a namespace's own keys."""
        return self.stages.get(space, VOID) != VOID

    def above(self) -> frozenset[bytes]:
        """Returns the namespaces all of whose local keys are kept in the layer."""
        return frozenset(space for space in self.stages if not self.is_taking(space))

    def is_taking(self, space: bytes) -> bool:
        """Returns whether a part of a namespace's keys is the engine's already."""
        return self.stages.get(space, b"")[:1] == _TAKING

    def is_above(self, key: bytes) -> bool:
        """Returns whether what the engine has of a key is kept in the layer."""
        space = space_of(key)
        stage = self.stages.get(space)
        if stage is None or not is_local_key(key, (space,)):
            return False
        return stage[:1] != _TAKING or key > stage[1:]

    def put(self, t: Transaction, key: bytes, value: bytes | None) -> None:
        """Writes what the engine has of a key that is kept here."""
        if value is None:
            t.delete(_LAYER + key)
        elif self.stages[space_of(key)] != VOID:
            t.put(_LAYER + key, value)
            self.heard += 1

    def names(self, t: Transaction, start: bytes) -> Iterator[bytes]:
        """Yields the keys that the engine may have, from `start` on."""
        if self.stages:
            for key in t.scan_keys(_LAYER + start, keys.after(_LAYER)):
                yield key[len(_LAYER) :]

    # ---- the node's own records become the engine's

    def add(
        self, t: Transaction, space: bytes, after: bytes, limit: int, *, switches: bool
    ) -> tuple[list[Changed], bytes]:
        """Adds the engine's records to this node's own, of up to `limit` keys behind one: so every
        name is found on its way, whatever the numbers of directories are here and there. Where
        `switches`, only names of directories that have another number are changed: to be done when
        all else was added. Returns the keys that changed, with their values before and now, and the
        last key; empty: that was all."""
        changed: list[Changed] = []
        found = list(islice(_keys(t, _LAYER, space, after), limit))
        for key in found:
            new, old = t.get(_LAYER + key), t.get(key)
            is_entry = key[0] == keys.ENTRY[0]
            is_switch = is_entry and old is not None
            if new in (None, old) or is_switch != switches or key[0] == keys.USAGE[0]:
                continue
            changed.append((key, old, new))
            t.put(key, new or b"")
        return changed, found[-1] if len(found) == limit else b""

    def take(self, t: Transaction, space: bytes, limit: int) -> tuple[list[Changed], bool]:
        """Makes up to `limit` of a namespace's keys what the engine has of them; the last of them
        is its mark. Returns the keys that changed, with their values before and now, and whether
        that was all."""
        stage = self.stages[space]
        after = stage[1:] if stage[:1] == _TAKING else b""
        both = merge(_keys(t, b"", space, after), _keys(t, _LAYER, space, after))
        changed: list[Changed] = []
        last, count = b"", 0
        for key in list(islice(both, limit)):
            count += 1
            if key == last:
                continue
            last = key
            new, old = t.get(_LAYER + key), t.get(key)
            if new != old:
                changed.append((key, old, new))
                if new is None:
                    t.delete(key)
                else:
                    t.put(key, new)
            t.delete(_LAYER + key)
        if count == limit:
            self.enter(t, space, _TAKING + last)
            return changed, False
        del self.stages[space]
        t.delete(MARKS + space)
        return changed, True


class Layered:
    """A replica as the engine has it: with the layer over what is the node's own. To be read."""

    def __init__(self, t: Transaction, spaces: Container[bytes]) -> None:
        """`spaces`: the namespaces whose keys are kept in the layer."""
        self._t = t
        self._spaces = spaces
        self.node = t.node

    def get(self, key: bytes, /) -> bytes | None:
        """Like `Transaction.get`."""
        if is_local_key(key, self._spaces):
            return self._t.get(_LAYER + key)
        return self._t.get(key)

    def scan(self, start: bytes, end: bytes, /) -> Iterator[tuple[bytes, bytes]]:
        """Like `Transaction.scan`, of keys that all are of a namespace, or all of none."""
        if not is_local_key(start, self._spaces):
            yield from self._t.scan(start, end)
            return
        for key, value in self._t.scan(_LAYER + start, _LAYER + end):
            yield key[len(_LAYER) :], value


def _keys(t: Transaction, base: bytes, space: bytes, after: bytes) -> Iterator[bytes]:
    """Yields a namespace's keys behind one, in order, of the replica or (`base`) of the layer."""
    skipped = len(base)
    for kind in _KINDS:
        if kind == keys.HELD:
            yield from _held(t, base, space, after)
            continue
        prefix = kind + space
        if keys.after(prefix) <= after:
            continue
        start = base + max(prefix, after + b"\0")
        for key in t.scan_keys(start, base + keys.after(prefix)):
            if is_local_key(key[skipped:], (space,)):
                yield key[skipped:]


def _held(t: Transaction, base: bytes, space: bytes, after: bytes) -> Iterator[bytes]:
    start, end = base + max(keys.HELD, after + b"\0"), base + keys.after(keys.HELD)
    skipped = len(base)
    if start >= end:
        return
    while (first := next(t.scan_keys(start, end), None)) is not None:
        prefix = first[: skipped + 3] + space
        within = max(start, prefix)
        if within < keys.after(prefix):
            for key in t.scan_keys(within, keys.after(prefix)):
                yield key[skipped:]
        start = keys.after(first[: skipped + 3])
