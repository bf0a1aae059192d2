"""Clients of version 4 that have state at a node, known to the other nodes of its cluster, so that
another one can let them take it back.

Ganesha keeps a directory for each such client (RecoveryBackend = fs), named after the client's
address and its own name, and reads them when it starts: only these clients may reclaim opens and
locks in the grace period. So a node that is to serve another one's clients gets their directories,
and its Ganesha is started anew (4.3 reads them of another node at the start only, or by a message
bus, which the jail does not have).

The list lies in the engine, as a setting of the root, and is renewed within a second of a change.
"""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import trio

from kvfs.base.errors import Busy, Invalid, NotSupported
from kvfs.cluster.node_records import NodeRecord, find_node
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.node import Node

_PLACES: Final = ("v4recov/node0", "v4old/node0")
"""Directories of Ganesha's: those that have state, and those that had it before its start."""
_MOST_BYTES: Final = 256 << 10
_NAME_MOST: Final = 255
_GONE_S: Final = 30.0
"""Patience with the lease of a node that has just died."""
_PAUSE_S: Final = 0.1
log = logging.getLogger(__name__)


class ClientRecords:
    """The clients of one node of a cluster; those of a lone node are nobody else's."""

    def __init__(self, node: Node, state: Path) -> None:
        """`state`: the directory that Ganesha has for it."""
        self._node = node
        self._state = state
        self._seen: list[int] = []
        self.known = 0
        """The number of clients of this node that the others know."""

    async def publish(self) -> None:
        """Tells the cluster of the clients, if they are others now. Raises KvfsError."""
        cluster = self._node.cluster
        if cluster is None:
            return
        times = [_changed_at(self._state / place) for place in _PLACES]
        if times == self._seen:
            return
        names = await trio.to_thread.run_sync(self._names)
        packed = msgspec.json.encode(names)
        if len(packed) > _MOST_BYTES:
            log.warning("too many NFS clients: no other node can let them take back what they have")
            packed = b"[]"
        key = _key(cluster.member.node)

        def put(t: Transaction) -> None:
            if t.get(key) != packed:
                t.put(key, packed)

        await self._node.engine.transact(put)
        self._seen, self.known = times, len(names) if packed != b"[]" else 0

    def _names(self) -> list[str]:
        return sorted({name for place in _PLACES for name in _leaves(self._state / place)})

    async def of(self, which: str) -> tuple[NodeRecord, list[str]]:
        """Returns another node, which must have ended, and its clients. Raises NotSupported (this
        is no cluster), NotFound, Invalid (it is this one), Busy (it does not end)."""
        cluster = self._node.cluster
        if cluster is None:
            raise NotSupported("a lone node has its own NFS clients only")
        other = await self._node.engine.read(lambda t: find_node(t, which))
        if other.number == cluster.member.node:
            raise Invalid("these are this node's own clients")
        with trio.move_on_after(_GONE_S) as deadline:
            while cluster.member.roster.lives(other.number):
                await trio.sleep(_PAUSE_S)
        if deadline.cancelled_caught:
            raise Busy(
                f"node {other.name} runs, and has what its clients have open: stop it first"
                " (kvfs down)"
            )
        packed = await self._node.engine.read(lambda t: t.get(_key(other.number)))
        return other, _parsed(packed or b"[]")

    def let_return(self, names: list[str]) -> None:
        """Has the next Ganesha let these clients take back what they had. Raises OSError."""
        for name in names:
            (self._state / _PLACES[0] / name).mkdir(mode=0o700, parents=True, exist_ok=True)

    async def forget(self, other: NodeRecord) -> None:
        """Notes that a node's clients are this one's. Raises KvfsError."""
        await self._node.engine.transact(lambda t: t.delete(_key(other.number)))


def _key(node: int) -> bytes:
    return keys.setting(0, b"nfs-clients/%d" % node)


def _parsed(packed: bytes) -> list[str]:
    """Raises Invalid for what would lead out of Ganesha's directory."""
    try:
        names = msgspec.json.decode(packed, type=list[str])
    except msgspec.DecodeError as error:
        raise Invalid(f"the list of the node's NFS clients is damaged: {error}") from None
    for name in names:
        parts = name.split("/")
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise Invalid(f"no name of an NFS client: {name!r}")
        if any(len(os.fsencode(part)) > _NAME_MOST for part in parts):
            raise Invalid(f"too long for the name of an NFS client: {name!r}")
    return names


def _changed_at(directory: Path) -> int:
    try:
        return directory.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _leaves(root: Path) -> Iterator[str]:
    """Yields the clients: a name that is too long for a directory goes on in one below."""
    for where, below, _ in os.walk(root):
        if not below and Path(where) != root:
            yield os.path.relpath(where, root)
