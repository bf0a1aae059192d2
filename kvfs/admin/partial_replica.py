"""The namespaces of a cluster that a stopped node's metadata replica does not have whole: it does
not follow their shards, or was reading them when it ended."""

from collections.abc import Sequence
from typing import Final

from kvfs.base.errors import Conflict
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.records import unpack_namespace
from kvfs.meta.replica.replica_mark import is_whole, read_mark
from kvfs.meta.shards.shard_map import ShardMap

_NAMED: Final = 10
"""Names in a message."""


def missing_namespaces(t: Transaction) -> list[bytes]:
    """Returns the names of the namespaces of which the replica does not have all, in the order of
    their numbers; none of a lone node's metadata. Raises Corrupt."""
    if read_mark(t) is None:
        return []
    known = ShardMap()
    known.load(t)
    records = (
        t.get(keys.NAMESPACE + space)
        for space in sorted(known.spaces)
        if not is_whole(t, keys.unpack_node(space))
    )
    return [unpack_namespace(record).name for record in records if record is not None]


def check_to_copy(local: EmbeddedEngine, name: bytes | None) -> None:
    """Refuses to copy what a store does not have: of this namespace, or (None) of any. Raises
    Conflict, Corrupt."""
    mark = local.read_now(read_mark)
    if mark is not None and mark.filled is not None:
        raise Conflict(
            f"the metadata replica in {local.path} is not whole, it was being read anew: copy from"
            " the engine's URL"
        )
    found = [each for each in local.read_now(missing_namespaces) if name in (None, each)]
    if found:
        raise Conflict(
            f"the metadata replica in {local.path} does not have all of {shown(found)}: copy from"
            " the engine's URL, or start the node, list each of them (`kvfs ls /NAME`), and stop it"
        )


def check_to_replace(local: EmbeddedEngine) -> None:
    """Refuses to discard shards of namespaces that this node could not put back. Raises Conflict,
    Corrupt."""
    mark = local.read_now(read_mark)
    if mark is None or mark.filled is not None:
        missing = "the names of namespaces"
    elif found := local.read_now(missing_namespaces):
        missing = shown(found)
    else:
        return
    raise Conflict(
        f"the metadata replica in {local.path} does not have all of {missing}, and --replace"
        " discards what the engine's servers have of it: begin with a node that has all of it, or"
        " add --replace-unfollowed: what no node has whole comes back only as far as data files"
        " tell"
    )


def shown(names: Sequence[bytes]) -> str:
    """Returns namespaces as a message names them."""
    told = ", ".join(each.decode(errors="backslashreplace") for each in names[:_NAMED])
    return f"{told} and {len(names) - _NAMED:,} more" if len(names) > _NAMED else told
