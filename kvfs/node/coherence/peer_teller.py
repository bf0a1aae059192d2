"""The telling of a node's records to the engine, when a namespace ends being `peer`
(`kvfs.tree.copies.peer_end` has the steps, `kvfs.tree.copies.told_records` the table of what
becomes of them).

Invariants
- Nobody writes meanwhile to what the node has, so each step can be done again, and what was told is
  as it was when the namespace was closed.
- Work is done in batches that are bounded by bytes; no list has all files.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

import msgspec
import trio
import xxhash

from kvfs.base.clock import file_time_ns
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.engine_layer import Layered
from kvfs.meta.records import Flag, namespace_root, unpack_inode
from kvfs.meta.replica.replica_engine import ReplicaEngine
from kvfs.node.names.tombstones import Tombstone, Tombstones, is_hidden, of_directory
from kvfs.node.siblings.differing_names import DifferingNames
from kvfs.tree.copies import own_part, peer_end, told_records
from kvfs.tree.copies.told_records import NameMet, OwnRecord
from kvfs.tree.inodes import later_times, stamp
from kvfs.tree.reserved_inodes import reserved

_BATCH: Final = 256
_BATCH_BYTES: Final = 256 << 10
_pack_stone: Final = msgspec.msgpack.Encoder().encode
_unpack_stone: Final = msgspec.msgpack.Decoder(Tombstone).decode


class PeerTeller:
    """The telling of one node. Each method raises Conflict if the change was asked back meanwhile,
    and KvfsError."""

    def __init__(
        self, engine: ReplicaEngine, stones: Tombstones, differing: DifferingNames
    ) -> None:
        """`differing` is told of names under which another node has other content."""
        self._engine = engine
        self._ending = engine.ending
        self._stones = stones
        self._differing = differing
        self.told: dict[int, int] = {}
        """Records that the engine was told, by namespace."""

    async def tell_removals(self, namespace_id: int, began: bytes) -> None:
        """Tells of the removals that the node knows, so that a copy of a node which has not heard
        of one does not bring the name back. `began` names the change."""
        stones = [each for each in self._stones.all() if each.namespace_id == namespace_id]
        for start in range(0, len(stones), _BATCH):
            await self._engine.transact(
                partial(_put_stones, namespace_id, began, stones[start : start + _BATCH])
            )

    async def tell_records(self, namespace_id: int, began: bytes) -> None:
        """Tells of files, without their names, and of directories, when all nodes have told of
        removals."""
        root = keys.times(namespace_root(namespace_id))
        times = self._ending.read(lambda _engines, t: t.get(root))
        await self._ending.tell(partial(_tell_times, namespace_id, began, times))
        for part in self._own(namespace_id):
            removed = self._removed(namespace_id, part)
            named = [
                each.path + b"/" if each.is_directory else each.path
                for each in part
                if each.path is not None and each.ino not in removed
            ]
            above = self._ending.read(
                lambda _engines, t: told_records.above(t, namespace_id, named)  # noqa: B023
            )
            files = [each for each in part if not each.is_directory]
            await self._ending.tell(partial(_tell, namespace_id, began, files, removed, above))
            self.told[namespace_id] = self.told.get(namespace_id, 0) + len(part)
            await trio.lowlevel.checkpoint()
        await self._tell_reserved(namespace_id, began)

    async def tell_names(self, namespace_id: int, began: bytes) -> None:
        """Tells of the files' names, when all nodes have told of their records."""
        for part in self._own(namespace_id):
            files = [each for each in part if not each.is_directory]
            met = await self._ending.tell(partial(_tell_names, namespace_id, began, files))
            for own, each in zip(files, met, strict=True):
                if each is NameMet.OTHER and own.path is not None:
                    self._differing.found(namespace_id, own.path, self._engine.node)
            await trio.lowlevel.checkpoint()

    # ---- inside

    async def _tell_reserved(self, namespace_id: int, began: bytes) -> None:
        """Tells of numbers of which processes of this host may be making files."""
        after = namespace_root(namespace_id)
        last = namespace_root(namespace_id + 1) - 1
        while inos := [
            each
            for each in await self._engine.read(lambda t: reserved(t, after, _BATCH))  # noqa: B023
            if each <= last
        ]:
            after = inos[-1]
            await self._ending.tell(partial(_reserve, namespace_id, began, inos))

    def _own(self, namespace_id: int) -> Iterator[list[OwnRecord]]:
        """Yields the records of this node that are told, in parts that one commit takes."""
        part, size, after = list[OwnRecord](), 0, 0
        while inos := self._ending.read(
            lambda _engines, t: own_part.files_after(t, namespace_id, after, _BATCH)  # noqa: B023
        ):
            after = inos[-1]
            for each in self._ending.read(lambda _engines, t: told_records.own_records(t, inos)):
                if part and size + each.size > _BATCH_BYTES:
                    yield part
                    part, size = [], 0
                part.append(each)
                size += each.size
            if len(part) >= _BATCH:
                yield part
                part, size = [], 0
        if part:
            yield part

    def _removed(self, namespace_id: int, part: Sequence[OwnRecord]) -> set[int]:
        """Returns the numbers of those of which any node knows a removal that this node's copy was
        written before."""
        stones = self._ending.read(partial(_stones_of, namespace_id, part))
        return {
            own.ino
            for own, stone in zip(part, stones, strict=True)
            if stone is not None and self._is_removed(own, _unpack_stone(stone))
        }

    def _is_removed(self, own: OwnRecord, stone: Tombstone) -> bool:
        inode = unpack_inode(own.packed)
        if own.is_directory:
            return inode.btime_ns < stone.removed_ns and inode.ctime_ns <= stone.removed_ns
        if inode.target or not inode.flags & Flag.PUBLISHED:
            return False
        renews = self._stones.renews(stone.namespace_id, stone.path)
        if not self._stones.is_news(stone):
            return self._stones.hides(stone.namespace_id, stone.path, inode.ctime_ns, renews)
        return is_hidden(stone.reach_ns(file_time_ns()), inode.ctime_ns, renews)


def _stones_of(
    namespace_id: int, part: Sequence[OwnRecord], _engines: Layered, t: Transaction
) -> list[bytes | None]:
    """Returns the removal that all nodes know of each record's path."""
    return [
        None if own.path is None else t.get(_stone_key(namespace_id, _removed_path(own, own.path)))
        for own in part
    ]


def _removed_path(own: OwnRecord, path: bytes) -> bytes:
    """Returns the path of a record as removals have it."""
    return of_directory(path) if own.is_directory else path


def _stone_key(namespace_id: int, path: bytes) -> bytes:
    return keys.removed(namespace_id, xxhash.xxh3_128_digest(path))


def _put_stones(
    namespace_id: int, began: bytes, stones: Sequence[Tombstone], t: Transaction
) -> None:
    """Puts removals, of each name the latest."""
    peer_end.check_begun(t, namespace_id, began)
    for each in stones:
        key = _stone_key(namespace_id, each.path)
        value = t.get(key)
        known = None if value is None else _unpack_stone(value)
        if known is None or (each.removed_ns, each.origin) > (known.removed_ns, known.origin):
            t.put(key, _pack_stone(each))


def _tell(
    namespace_id: int,
    began: bytes,
    files: Sequence[OwnRecord],
    removed: set[int],
    above: dict[bytes, OwnRecord],
    t: Transaction,
) -> None:
    peer_end.check_begun(t, namespace_id, began)
    numbers = told_records.tell_directories(t, namespace_id, above)
    for own in files:
        told_records.tell(t, own, numbers, is_removed=own.ino in removed)


def _tell_names(
    namespace_id: int, began: bytes, files: Sequence[OwnRecord], t: Transaction
) -> list[NameMet]:
    peer_end.check_begun(t, namespace_id, began)
    now = file_time_ns()
    return [told_records.tell_name(t, own, now) for own in files]


def _tell_times(namespace_id: int, began: bytes, times: bytes | None, t: Transaction) -> None:
    """Tells when names in the namespace's root changed last."""
    peer_end.check_begun(t, namespace_id, began)
    root = namespace_root(namespace_id)
    top = unpack_inode(t.get(keys.inode(root)) or b"")
    before = top.mtime_ns
    later_times(top, times)
    if top.mtime_ns > before:
        stamp(t, root, top, top.mtime_ns)


def _reserve(namespace_id: int, began: bytes, inos: Sequence[int], t: Transaction) -> None:
    peer_end.check_begun(t, namespace_id, began)
    for ino in inos:
        t.put(keys.reserved(ino), t.node)
