"""Transactions of a node's other processes: run on the metadata replica in those processes,
committed by the node.

A process that has the replica's file open (to read) runs the function itself and sends its reads
and writes; the node proposes them as its own. Refused, it is run again: the replica is newer by
then.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from kvfs.base.errors import UNDECODABLE, Conflict, Invalid, KvfsError, TooLarge, Unavailable
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.gathered_writes import MAX_KEY
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.merge_operators import MERGED
from kvfs.meta.records import unpack_namespace
from kvfs.meta.redis.log import Proposal
from kvfs.meta.replica.replica_mark import ReplicaMark, read_mark
from kvfs.meta.replica.replica_view import View
from kvfs.meta.shards.first_shard import first_shard
from kvfs.meta.shards.partial_view import beside_node
from kvfs.meta.shards.shard_map import space_of

T = TypeVar("T")
DEADLINE_S: Final = 10.0
_TOP: Final = keys.pack_u16(0)
"""The namespace of the root directory, as keys have it."""


class _Packed(msgspec.Struct, array_like=True):
    reads: dict[bytes, bytes | None]
    ranges: list[tuple[bytes, bytes, int, bytes]]
    writes: dict[bytes, bytes | None]
    merges: list[tuple[bytes, bytes]]


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Packed).decode


def pack(proposal: Proposal) -> bytes:
    return _encode(tuple(proposal))


def unpack(packed: bytes) -> Proposal:
    """Returns the proposal. Raises Invalid for anything else."""
    try:
        found = _decode(packed)
    except UNDECODABLE as error:
        raise Invalid(f"that is no transaction: {error}") from None
    written = [*found.writes, *(key for key, _ in found.merges)]
    if any(not 0 < len(key) <= MAX_KEY or key >= b"\xff" for key in written):
        raise Invalid(f"a key has 1 to {MAX_KEY} bytes, and does not begin with 0xff")
    if any(key[0] not in MERGED for key, _ in found.merges):
        raise Invalid("only usage and times are merged")
    return Proposal(found.reads, found.ranges, found.writes, found.merges)


def ask(
    local: EmbeddedEngine,
    fn: Callable[[Transaction], T],
    propose: Callable[[bytes], bool],
    *,
    most_bytes: int,
    deadline_s: float = DEADLINE_S,
) -> T:
    """Runs `fn` on the replica `local` and has its writes committed by `propose`, which sends them
    to the node (`unpack`, `ReplicaEngine.propose`) and returns its answer; blocking.

    Errors of both pass through. Raises Unavailable while the replica is not whole, Conflict if
    others were faster until the deadline, TooLarge over `most_bytes`.
    """
    end = time.monotonic() + deadline_s
    while True:
        result, proposal = local.read_now(lambda t: _run(t, fn))
        if not proposal.is_needed:
            return result
        packed = pack(proposal)
        if len(packed) > most_bytes:
            raise TooLarge(f"{len(packed)} bytes of metadata in one change, not {most_bytes}")
        if propose(packed):
            return result
        if time.monotonic() >= end:
            raise Conflict("others committed first until the deadline: try again")


def concerns_own(t: Transaction, fn: Callable[[Transaction], object]) -> bool:
    """Returns whether `fn` is about namespaces alone whose names are this node's own, so that what
    it raises on the replica is so. Nothing is certain while that is read anew."""
    mark = read_mark(t)
    if mark is None or mark.filled is not None:
        return False
    view = View(t, keys.pack_node(mark.node))
    with contextlib.suppress(KvfsError):
        fn(view)
    touched = (*view.reads, *view.writes, *(start for start, *_ in view.proposal().ranges))
    spaces = {key[1:3] for key in touched if key[:1] in keys.OF_NAMESPACES} - {_TOP}
    records = [t.get(keys.NAMESPACE + each) for each in spaces]
    return bool(records) and all(
        value is not None and unpack_namespace(value).is_peer for value in records
    )


def namespace_of(t: Transaction, fn: Callable[[Transaction], object]) -> int:
    """Returns the namespace in which `fn` does something first; 0: in none."""
    return first_shard(t, fn, lambda key: int.from_bytes(space_of(key)))


def _run(t: Transaction, fn: Callable[[Transaction], T]) -> tuple[T, Proposal]:
    view = View(beside_node(t, {}), keys.pack_node(_mark(t).node))
    return fn(view), view.proposal(is_elsewhere=True)


def _mark(t: Transaction) -> ReplicaMark:
    mark = read_mark(t)
    if mark is None or mark.filled is not None:
        raise Unavailable("the metadata replica is being read: try again")
    return mark
