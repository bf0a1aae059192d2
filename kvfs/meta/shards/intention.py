"""A change of a namespace that two shards are to have, all or nothing, wherever its maker dies.
Pure.

| step | in | leaves there | whoever finds it so |
|---|---|---|---|
| 1 intend | TOP | the intention; TOP keeps what it reads | waits, forbids step 2, drops it |
| 2 reach | the namespace's shard | its part, and the id as `reached` | goes on with step 3 |
| 3 conclude | TOP | its part; the intention is gone | |

Each step is an ordinary proposal, which a shard takes or refuses. Step 2 finds the `reached` that
was there before step 1, which whoever forbids it replaces: so it comes too late for ever.

Until step 3 others commit in TOP what writes nothing that the change read, or will write: as if
they had come before it.
"""

from typing import Final

import msgspec

from kvfs.base.errors import NotSupported
from kvfs.meta import keys
from kvfs.meta.redis.log import Proposal
from kvfs.meta.redis.scripts import TOP


class Intention(msgspec.Struct, array_like=True, frozen=True):
    """The key in TOP between steps 1 and 3."""

    id: bytes
    namespace_id: int
    before: bytes | None
    """The `reached` that step 2 must find: whoever forbids it puts another one there."""
    writes: dict[bytes, bytes | None]
    merges: list[tuple[bytes, bytes]]
    reads: list[bytes]
    ranges: list[tuple[bytes, bytes]]
    """Starts and ends. All that was read of TOP, these and `reads`, stays as it is."""

    def meets(self, other: Proposal) -> bool:
        """Returns whether a change of TOP has to wait for this one."""
        merged = {key for key, _ in other.merges}
        own_merges = {key for key, _ in self.merges}
        kept = self.writes.keys() | self.reads
        return (
            not kept.isdisjoint(other.writes)
            or not own_merges.isdisjoint(other.writes)
            or not kept.isdisjoint(merged)
            or any(
                start <= key < end for start, end in self.ranges for key in (*other.writes, *merged)
            )
        )

    @property
    def forbidden(self) -> bytes:
        """The `reached` that keeps step 2 from being done."""
        return b"!" + self.id


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Intention).decode


def read_intention(packed: bytes) -> Intention:
    return _decode(packed)


class Steps:
    """The three proposals of a change over TOP and one other shard."""

    def __init__(self, parts: dict[int, Proposal], id_: bytes, before: bytes | None) -> None:
        """Raises NotSupported: there are more shards than that."""
        others = [shard for shard in parts if shard != TOP]
        if len(others) != 1 or TOP not in parts:
            raise NotSupported(
                "two namespaces in shards of their own are not changed at once: remove or rename"
                " one of them first"
            )
        (number,) = others
        self.top, self.other = parts[TOP], parts[number]
        writes = dict(self.top.writes)
        if keys.place(number) in writes:
            # Whoever hears of a new shard has at once all that it begins with.
            writes |= self.other.writes
        ranges = [(start, end) for start, end, *_ in self.top.ranges]
        self.intention = Intention(
            *(id_, number, before, writes, list(self.top.merges), list(self.top.reads), ranges)
        )
        self.packed = _encode(self.intention)

    def intend(self, place: bytes | None) -> Proposal:
        """Checks all that was read of TOP; from then on nobody changes that. `place`: that of the
        namespace: one that was gathered has no second shard."""
        key = keys.place(self.intention.namespace_id)
        reads = {key: place, **self.top.reads, keys.INTENTION: None}
        return self.top._replace(reads=reads, writes={keys.INTENTION: self.packed}, merges=())

    def reach(self) -> Proposal:
        """Checks all that was read of the other shard, and writes there."""
        key = keys.reached(self.intention.namespace_id)
        reads = {**self.other.reads, key: self.intention.before}
        return self.other._replace(
            reads=reads, writes={**self.other.writes, key: self.intention.id}
        )


def conclude(intention: Intention, *, is_reached: bool) -> Proposal:
    """Returns the last step, whoever does it: the rest is written to TOP, or nothing."""
    reads = {keys.INTENTION: _encode(intention)}
    if not is_reached:
        return Proposal(reads, (), {keys.INTENTION: None}, ())
    return Proposal(reads, (), {**intention.writes, keys.INTENTION: None}, intention.merges)


def forbid(intention: Intention) -> Proposal:
    """Returns what keeps step 2 from being done. As that step it is refused once anything reached
    the namespace since step 1: of whoever hears late that this change is over, too."""
    key = keys.reached(intention.namespace_id)
    return Proposal({key: intention.before}, (), {key: intention.forbidden}, ())
