"""Keeps space free ahead of the writers, by evicting the files of cache namespaces that were used
longest ago.

| step of an eviction | on disk | in the engine | after a kill here |
|---|---|---|---|
| 1 names removed | data file | orphan | recovery finishes it |
| 2 data file unlinked | nothing | orphan | recovery finishes it |
| 3 index entry removed | nothing | orphan | recovery finishes it |
| 4 record dropped | nothing | nothing | - |

In a cluster with a full store, a data file of which other nodes have copies goes first, without its
names (`surplus_replicas`); if a namespace is full names go, and each node evicts its share.

A commit that fails for lack of space is tried again after step 2: space must come from somewhere. A
kill then leaves a cache file's record without data, which is a miss.

Invariants
- Only published files of cache namespaces are evicted, and only while no part of this process has
  them open and the kernel knows of no descriptor or mapping anywhere (a lease on the data file).
- On an embedded engine nothing runs between those checks and step 1.
- No eviction waits for a mount.
"""

import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, Protocol

import trio

from kvfs.base.errors import NoSpace
from kvfs.base.retry import Persistence
from kvfs.datastore import file_lease
from kvfs.datastore.batch_unlink import unlink_each
from kvfs.datastore.files import DataFiles
from kvfs.datastore.index import Index
from kvfs.meta import keys
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.records import Flag, Inode
from kvfs.node.tasks.cold_offload import Releaser
from kvfs.node.tasks.surplus_replicas import Spare
from kvfs.policy import cold_demotion, eviction
from kvfs.tree import lifecycle, namespaces, tree
from kvfs.tree.copies import replica_counts
from kvfs.tree.inodes import BLOCK, read_inodes
from kvfs.vfs.admission import Admission
from kvfs.vfs.space_accounting import STORE, Accounting, Census, Space

log = logging.getLogger(__name__)
_BATCH: Final = 64
"""Files in one transaction: about 2 ms of the event loop."""
_BATCH_BYTES: Final = 256 << 20
"""Little enough that freed space is seen soon: 0.1 s if unlinking is slow."""
_PASSES: Final = 16
_ANNOUNCEMENTS: Final = 1024
"""Batches of names that mounts have not forgotten yet. A name beyond is noticed by its use: its
inode number is stale, and the kernel looks it up again."""

Evicted = Sequence[lifecycle.Evicted]


class EvictionHolds(Protocol):
    """The files that this process has open."""

    def in_use(self, ino: int) -> bool:
        """Returns whether a handle is open. A data file that was only kept open has been closed
        then."""


class Evictor:
    """Evicts ahead of the writers; one for each node.

    `on_removed` is told the removed names, so that mounts forget them; its failure or delay delays
    no eviction.
    """

    def __init__(
        self,
        engine: Engine,
        files: DataFiles,
        index: Index,
        holders: EvictionHolds,
        accounting: Accounting,
        on_removed: Callable[[Evicted], Awaitable[None]],
        on_evicted: Callable[[Evicted], None],
        *,
        spare: Spare | None = None,
        releaser: Releaser | None = None,
    ) -> None:
        """`on_evicted` is told at once, `on_removed` soon. `spare`: in a cluster the surplus
        replicas, data that others have too, which go without their names. `releaser`: of a node
        with a cold tier; files that go there keep their names."""
        self._engine = engine
        self._files = files
        self._index = index
        self._holders = holders
        self._on_removed = on_removed
        self._on_evicted = on_evicted
        self._stuck: set[int] = set()
        self._surplus = spare
        self._releaser = releaser
        self._to_announce, self._announced = trio.open_memory_channel[Evicted](_ANNOUNCEMENTS)
        self._admission = Admission(engine, accounting)
        self.must_wait = self._admission.must_wait
        self.pressed = self._admission.pressed
        self.make_room = self._admission.make_room
        self.room_for = self._admission.room_for
        self.sample = self._admission.sample
        self._counters = {
            "evicted_files_namespace_full": 0,
            "evicted_bytes_namespace_full": 0,
            "evicted_files_store_full": 0,
            "evicted_bytes_store_full": 0,
            "evicted_files_drained": 0,
            "evicted_bytes_drained": 0,
            "passed_over_in_use": 0,
            "dropped_copies": 0,
        }

    @property
    def counters(self) -> dict[str, int]:
        """Counts of evictions since the start by reason; of files not evicted because in use; of
        creates refused."""
        released = self._releaser.counters if self._releaser else {}
        return {**self._counters, "refused_no_space": self._admission.refused, **released}

    async def run(self) -> None:
        """Samples and evicts, until cancelled. Recovery finishes a cancelled eviction."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._announce)
            nursery.start_soon(self._keep_room)

    async def _keep_room(self) -> None:
        evicting = Persistence(log.error, "eviction failed, it will be tried again")
        while True:
            await evicting.attempt(self._round)

    async def _round(self) -> None:
        freed = await self._relieve(await self._admission.sample())
        self._admission.round_ended(self._stuck)
        if not freed:
            await self._admission.pause()

    async def _relieve(self, census: Census) -> int:
        """Evicts one batch for each limit that is exceeded; returns the bytes freed."""
        freed = 0
        self._stuck.clear()
        caches = [number for number, each in census.namespaces.items() if each.gives_way]
        for number in caches:
            holding = census.namespaces[number]
            if holding.limited:
                need = max(
                    eviction.excess(holding.space.used, holding.space.capacity),
                    self._admission.lacking(number, holding.space),
                )
                share = eviction.share(need, holding.here, holding.space.used)
                freed += await self._relieve_one(
                    number, [number], share, "namespace_full", holding.space
                )
        caches = [number for number in caches if not census.namespaces[number].is_shared]
        need = max(
            eviction.excess(census.store.used - freed, census.store.capacity),
            self._admission.lacking(STORE, census.store) - freed,
        )
        if need > 0 and self._surplus is not None:
            numbers = [n for n, each in census.namespaces.items() if not each.is_shared]
            dropped = await self._drop_copies(self._surplus, numbers, min(need, _BATCH_BYTES))
            if dropped:
                return freed + dropped
        return freed + await self._relieve_one(STORE, caches, need, "store_full", census.store)

    async def _drop_copies(self, spare: Spare, namespace_ids: list[int], need: int) -> int:
        """Drops one batch of data files that other nodes have too, the coldest; returns the bytes
        freed."""
        chosen = await self._choose(namespace_ids, need, spare)
        if not chosen:
            return 0
        dropped = await self._engine.transact(lambda t: spare.let_go(t, chosen))
        failed = await unlink_each(self._files, [name for name, _ in dropped])
        self._index.remove([name[0] for name, _ in dropped if name not in failed])
        self._counters["dropped_copies"] += len(dropped)
        for error in failed.values():
            raise error
        return sum(inode.blocks for _, inode in dropped) * BLOCK

    async def _relieve_one(
        self, number: int, caches: list[int], need: int, reason: str, space: Space
    ) -> int:
        if need <= 0:
            return 0
        patient = cold_demotion.may_wait(space.used, space.capacity)
        freed = await self._evict(caches, need, reason, patient=patient)
        if not freed and not (self._releaser and self._releaser.is_sending):
            self._stuck.add(number)
        return freed

    async def _evict(
        self, namespace_ids: list[int], need: int, reason: str, *, patient: bool
    ) -> int:
        """Evicts one batch from these namespaces; returns the bytes freed. `patient`: the cold tier
        may take its time."""
        chosen = await self._choose(namespace_ids, min(need, _BATCH_BYTES))
        released = 0
        if chosen and self._releaser is not None:
            released, chosen = await self._releaser.release(chosen, patient=patient)
        if not chosen:
            return released
        now = time.time_ns()

        def remove_names(t: Transaction) -> list[lifecycle.Evicted]:
            return [gone for ino, _ in chosen if (gone := lifecycle.evict(t, ino, now))]

        try:
            evicted = await self._engine.transact(remove_names)
        except NoSpace:
            await unlink_each(self._files, chosen)
            evicted = await self._engine.transact(remove_names)
        return released + await self._evicted(evicted, reason)

    async def evict(self, ino: int) -> bool:
        """Evicts a file of a cache namespace that only this node has and nobody here uses, since
        the node is drained; returns whether it did. A file that the cold tier takes keeps its name.
        Raises KvfsError, OSError."""
        (inode,) = await self._engine.read(lambda t: read_inodes(t, [ino]))
        if inode is None or self._in_use(ino, inode):
            return False
        name = ino, inode.version
        if self._releaser is not None:
            _, rest = await self._releaser.release([name], patient=True)
            if not rest:
                return False  # it is there, or on its way: the next who looks finds it gone
        now = time.time_ns()
        evicted = await self._engine.transact(lambda t: _evict_last(t, name, now))
        if evicted is None:
            return False
        await self._evicted([evicted], "drained")
        return True

    async def _evicted(self, evicted: Evicted, reason: str) -> int:
        """Does the work after step 1; returns the bytes freed."""
        self._on_evicted(evicted)
        self._tell(evicted)
        await self._drop(evicted)
        freed = sum(each.inode.blocks for each in evicted) * BLOCK
        self._counters[f"evicted_files_{reason}"] += len(evicted)
        self._counters[f"evicted_bytes_{reason}"] += freed
        return freed

    async def _choose(
        self, namespace_ids: list[int], need: int, spare: Spare | None = None
    ) -> list[tuple[int, int]]:
        """Returns (inode, version) of the coldest files that may go, with `spare` only those that
        are; a bounded number of those in use is passed over."""
        for number in range(1, _PASSES + 1):
            limit = _BATCH * number if spare else _BATCH
            orders = [self._index.coldest(number, limit) for number in namespace_ids]
            inos = eviction.coldest(orders, limit)
            if spare is None:
                chosen = await self._choose_from(inos, need)
            else:
                chosen = await self._choose_from(await self._spare(spare, inos), need)
            if chosen or len(inos) < limit:
                return chosen
            await trio.lowlevel.checkpoint()
        return []

    async def _spare(self, spare: Spare, inos: list[int]) -> list[int]:
        """Returns the files that other nodes have too, in their order. Files of a durable namespace
        that no other node has leave the cold end: they free nothing."""

        def fn(t: Transaction) -> tuple[set[int], set[int]]:
            found = zip(inos, read_inodes(t, inos), strict=True)
            inodes = {ino: inode for ino, inode in found if inode is not None}
            there = spare.among(t, inodes)
            return there, {
                ino for ino in inodes if ino not in there and namespaces.is_durable(t, ino)
            }

        there, needed = await self._engine.read(fn)
        for ino in needed:
            self._index.touch(ino)
        return [ino for ino in inos if ino in there]

    async def _choose_from(self, inos: list[int], need: int) -> list[tuple[int, int]]:
        inodes = await self._engine.read(lambda t: read_inodes(t, inos))
        found = list(zip(inos, inodes, strict=True))
        if gone := [ino for ino, inode in found if inode is None]:
            self._index.remove(gone)
        evictable = (
            (ino, BLOCK * inode.blocks)
            for ino, inode in found
            if inode is not None and self._evictable(ino, inode)
        )
        versions = {ino: inode.version for ino, inode in found if inode is not None}
        return [(ino, versions[ino]) for ino in eviction.choose(evictable, need)]

    def _evictable(self, ino: int, inode: Inode) -> bool:
        """Returns whether the file may go now; one that may not is as good as used, and leaves the
        cold end."""
        if inode.blocks and inode.flags & Flag.PUBLISHED and inode.nlink:
            if not self._in_use(ino, inode):
                return True
            self._counters["passed_over_in_use"] += 1
        self._index.touch(ino)
        return False

    def _in_use(self, ino: int, inode: Inode) -> bool:
        if self._holders.in_use(ino):
            return True
        try:
            fd = self._files.open(ino, inode.version, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        try:
            return file_lease.is_unused(fd) is False
        finally:
            os.close(fd)

    async def _drop(self, evicted: Evicted) -> None:
        """Does steps 2 to 4. A file opened since step 1 keeps its record until its release, as any
        unlinked file; one that cannot be unlinked keeps its own as after a kill, and its error is
        raised when the others have gone."""
        names = [(each.ino, each.inode.version) for each in evicted]
        failed = await unlink_each(self._files, names)
        # What was opened and closed since step 1 may be kept open without a handle: who opened it
        # again would have a file without a record.
        gone = [
            name[0] for name in names if name not in failed and not self._holders.in_use(name[0])
        ]
        self._index.remove(gone)

        def reap(t: Transaction) -> None:
            for ino in gone:
                tree.reap(t, ino)

        await self._engine.transact(reap)
        for error in failed.values():
            raise error

    def _tell(self, evicted: Evicted) -> None:
        try:
            self._to_announce.send_nowait(evicted)
        except trio.WouldBlock:
            log.warning("mounts may name %d evicted files still", len(evicted))

    async def _announce(self) -> None:
        """Makes mounts forget the names, in their own time: a create that waits for space holds the
        lock on its directory, which forgetting a name in there needs."""
        announcing = Persistence(log.warning, "mounts may name evicted files still")
        async for evicted in self._announced:
            await announcing.attempt(partial(self._on_removed, evicted), pause_s=0)


def _evict_last(t: Transaction, name: tuple[int, int], now: int) -> lifecycle.Evicted | None:
    """Does step 1 for a cache's file that no other node has; else nothing."""
    ino, version = name
    (inode,) = read_inodes(t, [ino])
    if inode is None or inode.version != version or namespaces.is_durable(t, ino):
        return None
    if any(
        keys.pack_node(node) != t.node for node in replica_counts.whole_holders(t, ino, version)
    ):
        return None
    return lifecycle.evict(t, ino, now)
