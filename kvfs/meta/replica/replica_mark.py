"""The mark that makes an LMDB file a metadata replica: its cluster and node, and how far it has
come."""

from typing import TYPE_CHECKING, Final

import msgspec

from kvfs.base.errors import Conflict, Corrupt, NotSupported
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb.journal import REPLICA_KEY
from kvfs.meta.redis.scripts import TOP

if TYPE_CHECKING:
    from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine


class ReplicaMark(msgspec.Struct, array_like=True, kw_only=True, frozen=True):
    """Written in one commit with everything that it describes."""

    cluster: str
    node: int
    position: int
    """The position of the last entry of the log that was applied."""
    token: bytes
    """The token of that entry."""
    filled: bytes | None
    """None: it is whole; else it is being read, from the beginning after a restart, or, a shard's,
    LEAVING: it is being dropped."""


LEAVING: Final = b"-"
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(ReplicaMark).decode


def new_mark(cluster: str, node: int) -> ReplicaMark:
    """Returns the mark of a replica that holds nothing yet."""
    return ReplicaMark(cluster=cluster, node=node, position=0, token=b"", filled=b"")


def read_mark(t: Transaction, shard: int = TOP) -> ReplicaMark | None:
    """Returns the mark of a shard's log; None: nothing was read of it, of TOP: it is no replica.
    Raises Corrupt."""
    packed = t.get(_key(shard))
    return None if packed is None else _unpack(packed)


def is_whole(t: Transaction, shard: int) -> bool:
    """Returns whether the replica has all of a shard, as of some moment. Raises Corrupt."""
    mark = read_mark(t, shard)
    return mark is not None and mark.filled is None


def write_mark(t: Transaction, mark: ReplicaMark, shard: int = TOP) -> None:
    t.put(_key(shard), _encode(mark))


def drop_mark(t: Transaction, shard: int) -> None:
    """Forgets a shard's log: the namespace has no shard of its own any more."""
    t.delete(_key(shard))


def _key(shard: int) -> bytes:
    return REPLICA_KEY if shard == TOP else REPLICA_KEY + keys.pack_u16(shard)


def unfilled(packed: bytes) -> bytes:
    """Returns a mark of a replica that is to be read anew. Raises Corrupt."""
    return _encode(msgspec.structs.replace(_unpack(packed), filled=b""))


def _unpack(packed: bytes) -> ReplicaMark:
    try:
        return _decode(packed)
    except msgspec.DecodeError as error:
        raise Corrupt(f"the mark of the metadata replica is damaged: {error}") from None


def refuse_replica(local: "EmbeddedEngine") -> None:
    """Refuses a replica for a lone node. Raises Conflict if its store's metadata are a
    cluster's."""
    mark = local.read_now(read_mark)
    if mark is not None:
        raise Conflict(
            f"the store's metadata in {local.path} replicate those of the cluster {mark.cluster}:"
            " start the node with --engine, or give it another store"
        )


def refuse_lone(local: "EmbeddedEngine") -> None:
    """Refuses a lone node's metadata for a node of a cluster, before it joins. Raises
    NotSupported."""
    if local.read_now(read_mark) is None and local.read_now(lambda t: t.get(keys.VERSION)):
        raise NotSupported(
            f"the store's metadata in {local.path} are a lone node's: copy them with kvfs engine"
            " copy, or give the node another store"
        )


def check_replica(local: "EmbeddedEngine", cluster: str, node: int) -> ReplicaMark | None:
    """Checks the file for a node of a cluster. None if it is new, or was another node's of the
    cluster, as which it was removed: it is to be read anew. Raises NotSupported if it holds a lone
    node's metadata, Conflict if another cluster's."""
    mark = local.read_now(read_mark)
    if mark is None:
        if local.read_now(lambda t: t.get(keys.VERSION)) is not None:
            raise NotSupported(
                f"the store's metadata in {local.path} are a lone node's: copy them with kvfs"
                " engine copy, or give the node another store"
            )
        return None
    if mark.cluster != cluster:
        raise Conflict(
            f"the store's metadata in {local.path} replicate those of the cluster"
            f" {mark.cluster}, not {cluster}: give the node another store"
        )
    return mark if mark.node == node else None
