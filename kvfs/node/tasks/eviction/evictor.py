"""Keeps space free ahead of the writers, by evicting the files of cache namespaces that were used
longest ago.

| step of an eviction | on disk | in the engine | after a kill here |
|---|---|---|---|
| 1 names removed | data file | orphan | recovery finishes it |
| 2 data file unlinked | nothing | orphan | recovery finishes it |
| 3 index entry removed | nothing | orphan | recovery finishes it |
| 4 record dropped | nothing | nothing | - |

In a cluster with a full store, a data file of which other nodes have copies goes first, and without
its names (`surplus_replicas`); names go of what no other node has. If a namespace is full names go,
and each node evicts its share.

A commit that fails for lack of space is tried again after step 2: space must come from somewhere. A
kill then leaves a cache file's record without data, which is a miss.

Invariants
- Only published files of cache namespaces are evicted, and only while nobody uses them
  (`eviction_candidates`), or was promised them (`kvfs.datastore.leases.taker`).
- On an embedded engine nothing runs between those checks and step 1.
- No eviction waits for a mount.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from kvfs.base.errors import NoSpace
from kvfs.base.retry import Persistence
from kvfs.datastore.batch_unlink import unlink_each
from kvfs.datastore.files import DataFiles
from kvfs.datastore.index import Index
from kvfs.datastore.leases.taker import LeaseTaker
from kvfs.meta import keys
from kvfs.meta.engine import Engine, Transaction, itself, transact_each
from kvfs.meta.records import Inode, namespace_of
from kvfs.node.tasks.eviction.cold_offload import Releaser
from kvfs.node.tasks.eviction.eviction_candidates import (
    MOST_LOOKED_AT,
    EvictionCandidates,
    EvictionHolds,
    Name,
)
from kvfs.node.tasks.eviction.surplus_replicas import Spare
from kvfs.policy import eviction
from kvfs.tree import lifecycle, namespaces, tree
from kvfs.tree.copies import replica_counts
from kvfs.tree.inodes import BLOCK, read_inodes
from kvfs.vfs.admission import Admission
from kvfs.vfs.space_accounting import STORE, Accounting, Census, Space

if TYPE_CHECKING:  # it loads what a lone node does without
    from kvfs.node.siblings.cold_blocks import ColdBlocks
    from kvfs.node.siblings.peer_spares import PeerSpares

log = logging.getLogger(__name__)
_BATCH_BYTES: Final = 256 << 20
"""Little enough that freed space is seen soon: 0.1 s if unlinking is slow."""
_ANNOUNCEMENTS: Final = 1024
"""Batches of names that mounts have not forgotten yet. A name beyond is noticed by its use: its
inode number is stale, and the kernel looks it up again."""

_ROUNDS: Final = 64
"""Batches of which all files are leased that are passed over in one go."""
_STORE_FULL: Final = "store_full"
Evicted = Sequence[lifecycle.Evicted]


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
        leases: LeaseTaker,
        on_removed: Callable[[Evicted], Awaitable[None]],
        on_evicted: Callable[[Evicted], None],
        *,
        spare: Spare | None = None,
        releaser: Releaser | None = None,
        is_kept: Callable[[int], bool] = lambda _ino: False,
        spares: "Callable[[], PeerSpares | None]" = lambda: None,
        cold_blocks: "ColdBlocks | None" = None,
    ) -> None:
        """`leases`: the files clients were promised. `on_evicted` is told at once, `on_removed`
        soon. `spare`: in a cluster the surplus replicas, data that others have too, which go
        without their names. `releaser`: of a node with a cold tier; files that go there keep their
        names. `is_kept`: whether a file stays for now, because another node counts on it. `spares`:
        of namespaces that are kept by their nodes the copies that others have too; `cold_blocks`:
        what sends those of them to the cold tier that nobody else keeps."""
        self._engine = engine
        self._files = files
        self._index = index
        self._holders = holders
        self._candidates = EvictionCandidates(engine, files, index, holders, is_kept, spare)
        self._leases = leases
        self._on_removed = on_removed
        self._on_evicted = on_evicted
        self._stuck: set[int] = set()
        self._surplus = spare
        self._releaser = releaser
        self._is_kept = is_kept
        self._spares = spares
        self._cold_blocks = cold_blocks
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
        }
        self._dropped_copies = 0

    @property
    def counters(self) -> dict[str, int]:
        """Counts of evictions since the start by reason; of files not evicted because in use; of
        creates refused."""
        released = self._releaser.counters if self._releaser else {}
        return {
            **self._counters,
            "passed_over_in_use": self._candidates.passed_over,
            "passed_over_leased": self._leases.passed_over,
            "dropped_copies": self._dropped_copies,
            "refused_no_space": self._admission.refused,
            **released,
        }

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
        self._leases.tell_capacity(census.store.capacity)
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
        return freed + await self._relieve_one(STORE, caches, need, _STORE_FULL, census.store)

    async def _drop_copies(self, spare: Spare, namespace_ids: list[int], need: int) -> int:
        """Drops one batch of data files that other nodes have too, the coldest; returns the bytes
        freed."""
        choose = partial(self._candidates.surplus, spare, namespace_ids, need)
        return await self._take_unleased(choose, partial(self._drop_copies_of, spare))

    async def _take_unleased(
        self,
        choose: Callable[[], Awaitable[list[Name]]],
        take: Callable[[list[Name]], Awaitable[int]],
    ) -> int:
        """Takes those of the chosen files that nobody has leased; returns the bytes freed."""
        for _ in range(_ROUNDS):
            chosen = await choose()
            if not chosen:
                return 0
            with self._leases.taking([ino for ino, _ in chosen]) as leased:
                self._candidates.pass_over(leased)
                free = [name for name in chosen if name[0] not in leased]
                if free:
                    return await take(free)
        return 0

    async def _drop_copies_of(self, spare: Spare, chosen: list[Name]) -> int:
        dropped = await transact_each(self._engine, chosen, _inode_of, spare.let_go)
        inos = [name[0] for name, _ in dropped]
        with self._holders.dropping(inos):
            # Before the data files, and after them, for the reasons that `OutdatedData` has.
            self._index.remove(inos)
            failed = await unlink_each(self._files, [name for name, _ in dropped])
            self._index.remove(inos)
        self._dropped_copies += len(dropped)
        for error in failed.values():
            raise error
        return sum(inode.blocks for _, inode in dropped) * BLOCK

    async def _relieve_one(
        self, number: int, caches: list[int], need: int, reason: str, space: Space
    ) -> int:
        if need <= 0:
            return 0
        patient = eviction.may_wait_for_cold_tier(space.used, space.capacity)
        freed = await self._evict(caches, need, reason, patient=patient)
        senders = (self._releaser, self._cold_blocks)
        if not freed and not any(each is not None and each.is_sending for each in senders):
            self._stuck.add(number)
        return freed

    async def _evict(
        self, namespace_ids: list[int], need: int, reason: str, *, patient: bool
    ) -> int:
        """Evicts one batch from these namespaces; returns the bytes freed. `patient`: the cold tier
        may take its time."""
        if freed := await self._evict_spares(namespace_ids, min(need, _BATCH_BYTES), reason):
            return freed
        choose = self._candidates.alone if reason == _STORE_FULL else self._candidates.coldest
        return await self._take_unleased(
            partial(choose, namespace_ids, min(need, _BATCH_BYTES)),
            partial(self._evict_unleased, namespace_ids, reason, patient=patient),
        )

    async def _evict_unleased(
        self, namespace_ids: list[int], reason: str, chosen: list[Name], *, patient: bool
    ) -> int:
        """Evicts these files, which nobody has leased; returns the bytes freed."""
        before = await self._records(chosen)
        released = 0
        if chosen and self._cold_blocks is not None:
            chosen = await self._cold_blocks.sent(chosen, patient=patient)
        if chosen and self._releaser is not None:
            released, chosen = await self._releaser.release(chosen, patient=patient)
        if not chosen:
            return released
        now, own = time.time_ns(), {n for n in namespace_ids if self._engine.is_local(n)}

        def is_own_still(t: Transaction, ino: int) -> bool:
            """Returns whether what goes is what was meant: this node's copy, or everybody's."""
            return (namespace_of(ino) in own) == namespaces.is_peer(t, namespace_of(ino))

        def remove_names(t: Transaction, names: list[tuple[int, int]]) -> list[lifecycle.Evicted]:
            there = [ino for ino, _ in names if is_own_still(t, ino)]
            going = [ino for ino in there if self._is_as_before(t, ino, before)]
            return [gone for ino in going if (gone := lifecycle.evict(t, ino, now))]

        try:
            evicted = await transact_each(self._engine, chosen, _inode_of, remove_names)
        except NoSpace:
            await unlink_each(self._files, chosen)
            evicted = await transact_each(self._engine, chosen, _inode_of, remove_names)
        return released + await self._evicted(evicted, reason)

    async def _evict_spares(self, namespace_ids: list[int], need: int, reason: str) -> int:
        """Evicts one batch of files that other nodes keep, the coldest, from those of these
        namespaces that are kept by their nodes; returns the bytes freed."""
        spares = self._spares()
        own = [number for number in namespace_ids if self._engine.is_local(number)]
        if spares is None or not own or spares.rests:
            return 0
        orders = [self._index.coldest(number, MOST_LOOKED_AT) for number in own]
        inos = await spares.elsewhere(eviction.coldest(orders, MOST_LOOKED_AT))
        chosen = await self._candidates.choose_from(inos, need) if inos else []
        if not chosen:
            spares.rest()
            return 0
        with self._leases.taking([ino for ino, _ in chosen]) as leased:
            self._candidates.pass_over(leased)
            inos = [ino for ino, _ in chosen if ino not in leased]
            evicted = await spares.evict(inos, self._candidates.in_use) if inos else []
            freed = await self._evicted(evicted, reason) if evicted else 0
        if freed < need:
            spares.rest()
        return freed

    async def evict(self, ino: int) -> bool:
        """Evicts a file of a cache namespace that only this node has and nobody here uses, since
        the node is drained; returns whether it did. A file that the cold tier takes keeps its name.
        Raises KvfsError, OSError."""
        with self._leases.taking([ino]) as leased:
            return not leased and await self._evict_one(ino)

    async def _evict_one(self, ino: int) -> bool:
        (inode,) = await self._engine.read(lambda t: read_inodes(t, [ino]))
        if inode is None or self._candidates.in_use(ino, inode):
            return False
        name = ino, inode.version
        before = await self._records([name])
        if self._cold_blocks is not None and not await self._cold_blocks.sent([name], patient=True):
            return False
        if self._releaser is not None:
            _, rest = await self._releaser.release([name], patient=True)
            if not rest:
                return False  # it is there, or on its way: the next who looks finds it gone
        now, was_own = time.time_ns(), self._engine.is_local(namespace_of(ino))

        def evict(t: Transaction) -> lifecycle.Evicted | None:
            is_so = namespaces.is_peer(t, namespace_of(ino)) == was_own
            return (
                _evict_last(t, name, now) if is_so and self._is_as_before(t, ino, before) else None
            )

        evicted = await self._engine.transact(evict)
        if evicted is None:
            return False
        await self._evicted([evicted], "drained")
        return True

    async def _records(self, names: Sequence[tuple[int, int]]) -> dict[int, Inode | None]:
        """Returns the records of files, if the cold tier is waited for before they go."""
        if self._cold_blocks is None and self._releaser is None:
            return {}
        inos = [ino for ino, _ in names]
        found = await self._engine.read(lambda t: read_inodes(t, inos))
        return dict(zip(inos, found, strict=True))

    def _is_as_before(self, t: Transaction, ino: int, before: Mapping[int, Inode | None]) -> bool:
        """Returns whether a file may go still: nobody used or changed it while the cold tier was
        waited for."""
        if ino not in before:
            return not self._is_kept(ino)
        (inode,), was = read_inodes(t, [ino]), before[ino]
        if inode is None or was is None:
            return False
        # Two writes within a tick of the kernel's clock have one ctime; the first ends the seal.
        kept = inode.version, inode.ctime_ns, inode.checksum
        is_same = kept == (was.version, was.ctime_ns, was.checksum)
        return is_same and not self._candidates.in_use(ino, inode)

    async def _evicted(self, evicted: Evicted, reason: str) -> int:
        """Does the work after step 1; returns the bytes freed."""
        self._on_evicted(evicted)
        self._tell(evicted)
        await self._drop(evicted)
        freed = sum(each.inode.blocks for each in evicted) * BLOCK
        self._counters[f"evicted_files_{reason}"] += len(evicted)
        self._counters[f"evicted_bytes_{reason}"] += freed
        return freed

    async def _drop(self, evicted: Evicted) -> None:
        """Does steps 2 to 4. A file opened since step 1 keeps its record until its release, as any
        unlinked file; one that cannot be unlinked keeps its own as after a kill, and its error is
        raised when the others have gone."""
        with self._holders.dropping([each.ino for each in evicted]):
            # A mount that forgot the name may have dropped it, and it may have come again since.
            names = await self._engine.read(lambda t: _orphans(t, evicted))
            failed = await unlink_each(self._files, names)
            # What was opened and closed since step 1 may be kept open without a handle: who opened
            # it again would have a file without a record.
            gone = [
                name[0]
                for name in names
                if name not in failed and not self._holders.in_use(name[0])
            ]
            self._index.remove(gone)

            await transact_each(self._engine, gone, itself, tree.reap_all)
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


def _inode_of(name: tuple[int, int]) -> int:
    return name[0]


def _orphans(t: Transaction, evicted: Evicted) -> list[tuple[int, int]]:
    """Returns the data files of those that are orphans still."""
    inodes = read_inodes(t, [each.ino for each in evicted])
    return [
        (each.ino, each.inode.version)
        for each, inode in zip(evicted, inodes, strict=True)
        if inode is not None and not inode.nlink
    ]


def _evict_last(t: Transaction, name: tuple[int, int], now: int) -> lifecycle.Evicted | None:
    """Does step 1 for a cache's file that no other node has, or whose names are each node's own;
    else nothing."""
    ino, version = name
    (inode,) = read_inodes(t, [ino])
    if inode is None or inode.version != version or namespaces.is_durable(t, ino):
        return None
    if not namespaces.is_peer(t, namespace_of(ino)) and any(
        keys.pack_node(node) != t.node for node in replica_counts.whole_holders(t, ino, version)
    ):
        return None
    return lifecycle.evict(t, ino, now)
