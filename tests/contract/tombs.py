"""Removals without a tree."""

from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.node.names.tombstones import Tombstone, Tombstones


def removed(
    engine: EmbeddedEngine, stones: Tombstones, name: tuple[int, bytes, int], origin: int
) -> list[Tombstone]:
    """Has the users of a node remove a name: namespace, path, time of the last change. Returns the
    tombstones that it made."""
    made = stones.removed([name], origin)
    engine.transact_now(lambda t: stones.write(t, made, []))
    stones.written(made, [])
    return made
