"""The shard of each key, where namespaces have shards of their own: a log each, on any server of a
Redis cluster. Pure.

| key | shard |
|---|---|
| what begins with a namespace's id or inode, but what is about all of it | its own |
| a node's part of a file (`h`) | that of the file |
| a namespace's record, settings and changes of coherence; all that is of none | TOP |
| all keys of a namespace without a place (`P`) | TOP |

The shard of a namespace has its number.
"""

from collections.abc import Callable, Container, Iterable, Iterator
from typing import Final

from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.redis.log import Proposal
from kvfs.meta.redis.scripts import TOP
from kvfs.meta.replica.replica_mark import LEAVING, read_mark

_HELD: Final = keys.HELD[0]
_PLACE: Final = keys.PLACE[0]
_OF_NAMESPACE: Final = frozenset(b"".join(keys.OF_NAMESPACES) + keys.INTENTION) - keys.OF_REGISTRY
_ID: Final = 3
"""The end of the id in most keys."""
OWN: Final = b""
SHUT: Final = b"!"
GATHERED: Final = b"<"
CLOSED: Final = b">"
WITHDRAWN: Final = b"?"
"""As a place: the keys are in a shard of their own; or (with an id) on their way there; or there
still and on their way back to TOP: and their shard takes commits, takes none, or will take them
again. As the place of namespace 0: those that are made get shards of their own; or (GATHERED) they
get none, and others still have them."""
_BACK: Final = GATHERED + CLOSED + WITHDRAWN
_TAKING_NONE: Final = SHUT + CLOSED + WITHDRAWN
_LASTING: Final = frozenset(keys.counter(0)[:1] + keys.INTENTION)
_MADE_FROM_NOW_ON: Final = keys.pack_u16(0)
_END: Final = b"\xff"
"""Beyond every key of the metadata."""


def is_own(place: bytes | None) -> bool:
    """Returns whether a namespace's place says that it has a shard of its own."""
    return place is not None and (place == OWN or place[0] in _BACK)


def shut_place(mover: bytes, position: int) -> bytes:
    """Returns the place of a namespace that is on its way to a shard whose log begins at this
    position."""
    return SHUT + mover + b".%d" % position


def position_of(place: bytes | None) -> int:
    """Returns the position in such a place."""
    return int((place or b"0").rpartition(b".")[2])


def is_half_moved(place: bytes) -> bool:
    """Returns whether neither shard takes commits of a namespace with this place."""
    return place[:1] != b"" and place[0] in _TAKING_NONE


def shard_of(key: bytes, own: Container[bytes]) -> int:
    """Returns the shard of a key; `own`: the ids, as keys have them, that have one."""
    space = space_of(key)
    return int.from_bytes(space) if space in own else TOP


def space_of(key: bytes) -> bytes:
    """Returns the id of the namespace with which a key moves; empty: none."""
    kind = key[0]
    return key[3:5] if kind == _HELD else key[1:_ID] if kind in _OF_NAMESPACE else b""


class ShardMap:
    """The namespaces with shards of their own, as a replica knows them."""

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self.spaces: set[bytes] = set()
        """Their ids, as keys have them."""
        self.kept: set[bytes] = set()
        """The namespaces whose shards the file has, or has begun to read."""
        self.followed: Container[int] = ()
        """The shards whose logs are followed."""
        self.shut: set[bytes] = set()
        """Namespaces of which one shard takes no commits any more, and the other one not yet."""
        self.returning: set[bytes] = set()
        """Namespaces with shards of their own that are on their way back to TOP."""
        self.is_used = False
        """Whether there are any, or those made from now on will be."""
        self.on_change = on_change

    def load(self, t: Transaction) -> None:
        """Loads what the file knows."""
        found = dict(t.scan(keys.PLACE, keys.after(keys.PLACE)))
        self.spaces = {key[1:] for key, value in found.items() if is_own(value)}
        self.spaces.discard(_MADE_FROM_NOW_ON)
        marks = {space: read_mark(t, keys.unpack_node(space)) for space in self.spaces}
        self.kept = {space for space, mark in marks.items() if mark and mark.filled != LEAVING}
        self.shut = {key[1:] for key, value in found.items() if is_half_moved(value)}
        self.returning = {space for space in self.spaces if found[keys.PLACE + space]}
        self.is_used = bool(found)

    def places(self) -> list[bytes]:
        """Returns the keys of the places of these namespaces."""
        return [keys.PLACE + space for space in self.spaces]

    def empty(self, t: Transaction) -> set[bytes]:
        """Returns the namespaces that were removed, and of whose shards nothing is left but what
        stays for ever: the counter of inode numbers, and the last change over two shards."""
        return {
            space
            for space in self.spaces
            if t.get(keys.NAMESPACE + space) is None
            and all(key[0] in _LASTING for key in self.names(t, keys.unpack_node(space), b""))
        }

    def note(self, key: bytes, value: bytes | None) -> None:
        """Takes notice of a place that is written: it stays."""
        self.is_used, space = True, key[1:]
        is_apart = is_own(value) and space != _MADE_FROM_NOW_ON
        for found, is_in in (
            (self.spaces, is_apart),
            (self.shut, value is not None and is_half_moved(value)),
            (self.returning, is_apart and value != OWN),
        ):
            (found.add if is_in else found.discard)(space)
        self.on_change()

    def shard_of(self, key: bytes) -> int:
        """Returns the shard of a key."""
        return shard_of(key, self.spaces) if self.spaces else TOP

    def may_have(self, shard: int, key: bytes) -> bool:
        """Returns whether a shard's key is one that counts: TOP has some that were moved, and what
        a namespace began with. The shard of one whose place is not known yet is read too."""
        if shard == TOP:
            return self.shard_of(key) == TOP
        return space_of(key) == keys.pack_u16(shard)

    def is_followed(self, shard: int) -> bool:
        """Returns whether the log of a namespace's shard is followed."""
        return shard in self.followed

    def is_shut(self, written: Iterable[bytes]) -> bool:
        """Returns whether keys are written that are on their way to another shard."""
        return any(space_of(key) in self.shut for key in written)

    def of_inode(self, ino: int) -> int:
        """Returns the shard of a file."""
        return self.shard_of(keys.inode(ino))

    def divided(self, proposal: Proposal, at: int) -> dict[int, Proposal]:
        """Returns what each shard has to check and write, with those that it makes; if none is
        written to, what the shard `at` has to check."""
        made = {key[1:] for key in proposal.writes if key[0] == _PLACE} - {_MADE_FROM_NOW_ON}
        return divided(proposal, self.spaces | made if made else self.spaces, at)

    def names(self, t: Transaction, shard: int, start: bytes, end: bytes = _END) -> Iterator[bytes]:
        """Yields the keys of a shard from `start` on, before `end`."""
        if shard == TOP:
            yield from (key for key in t.scan_keys(start, end) if self.shard_of(key) == TOP)
            return
        space = keys.pack_u16(shard)
        for kind in sorted(_OF_NAMESPACE | {_HELD}):
            if kind < start[0] if start else False:
                continue
            for prefix in _held(t, space) if kind == _HELD else (bytes([kind]) + space,):
                last = min(end, keys.after(prefix))
                yield from t.scan_keys(max(start, prefix), max(start, last))


def _held(t: Transaction, space: bytes) -> Iterator[bytes]:
    """Yields the prefixes of the parts that nodes have of a namespace's files."""
    start, end = keys.HELD, keys.after(keys.HELD)
    while (first := next(t.scan_keys(start, end), None)) is not None:
        yield first[:3] + space
        start = keys.after(first[:3])


def divided(proposal: Proposal, own: Container[bytes], at: int) -> dict[int, Proposal]:
    """Returns what each shard has to check and write; those that are only read are left out: what
    was read there was so when the transaction was run, and nobody checks it again. If all are, it
    leans on what goes before it to the shard `at`, which checks that."""
    found: dict[int, Proposal] = {}

    def part(key: bytes) -> Proposal:
        shard = shard_of(key, own)
        if shard not in found:
            found[shard] = Proposal({}, [], {}, [])
        return found[shard]

    for key, value in proposal.writes.items():
        part(key).writes[key] = value  # type: ignore[index]
    for merge in proposal.merges:
        part(merge[0]).merges.append(merge)  # type: ignore[attr-defined]
    if not found:
        found[at] = Proposal({}, [], {}, [])
    for key, value in proposal.reads.items():
        if (shard := shard_of(key, own)) in found:
            found[shard].reads[key] = value  # type: ignore[index]
    for each in proposal.ranges:
        shards = {shard_of(each[0], own)} if space_of(each[0]) == space_of(each[1]) else set(found)
        for shard in shards & found.keys():
            found[shard].ranges.append(each)  # type: ignore[attr-defined]
    return found
