"""Recovery: a start's work on what the last process left behind.

| left by | found by | action |
|---|---|---|
| a kill before the first close | the list of unpublished files | the file goes |
| likewise, of a file made over NFS, on a lone node | the same | it is published as it is |
| a kill while a file was open for writing | the list of unsealed files | the size is taken anew |
| a kill between unlink and drop, or in an eviction | the list of orphans | it is dropped wholly |
| a kill while a file was put | the list of reserved numbers | with data: an orphan |
| a power cut: data that were not synced | the list of unsealed files, their boot | the file goes |
| a power cut between a seal and its sync | the list of unsealed files | it is sealed anew |
| a power cut: the engine is back at its checkpoint, not the disk | comparing all | see below |

Only the last one reads everything, and only after a power cut (2 to 4 us a file): data files
without a record go, those that may be durable into quarantine; so do records of cache namespaces
without a data file. A durable record without one stays, for `fsck` to report: its data were
acknowledged, so this is damage.

A node of a cluster repairs what it left itself; if another node has the whole content of a file,
that counts, and the content here goes. Of records without a data file it examines only those that
it holds. Data files that no record names are found while it runs (`stale_data_gc`).

Invariants
- It runs before anything else uses the store, with its lock held. A kill at any point: run again,
  same result.
- A file is removed as everywhere: names, then data file, then index entry, then record.
"""

import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Final

import trio

from kvfs.datastore.files import DataFiles
from kvfs.datastore.index import Index
from kvfs.datastore.layout import Store
from kvfs.datastore.quarantine_directory import Reason
from kvfs.meta import keys
from kvfs.meta.engine import Engine, Transaction, itself, transact_each
from kvfs.meta.lmdb.reconstruction import damaged_metadata
from kvfs.meta.records import Flag, Inode, namespace_of, unpack_inode
from kvfs.tree import lifecycle, namespaces, reserved_inodes, tree
from kvfs.tree.copies import placements
from kvfs.tree.inodes import read_inodes
from kvfs.vfs.content_versions import Overtaken, check_follows, publish_anew
from kvfs.vfs.quarantine import Kinds, kinds_of, put_away

log = logging.getLogger(__name__)
_BATCH: Final = 256
_REGULAR: Final = 0o100000
_FORMAT: Final = 0o170000


_Grown = tuple[int, Inode, os.stat_result]


class Recovery:
    """One recovery of one store; `run` does it."""

    def __init__(
        self,
        engine: Engine,
        files: DataFiles,
        index: Index,
        boots: Collection[int],
        now: int,
        alive: Collection[int] = (),
        leased: Callable[[Sequence[int]], set[int]] = lambda _inos: set(),
    ) -> None:
        """`boots`: the boots since which there was no power cut. `alive`: inodes that a mount still
        has open: they stay unpublished, or without a name, in a cluster as they are. `leased`
        returns those of some files whose content a client was promised: they stay without a
        name."""
        self._leased = leased
        self._alive = alive
        self._engine = engine
        self._files = files
        self._index = index
        self._intact = frozenset((0, *boots))
        self._now = now
        self._clustered = False
        self.is_damaged = False
        """Whether damage took the end of the journal: files that look unfinished or removed may
        have been acknowledged then, and are kept apart."""
        self._is_cut = False
        self.found = {
            "unpublished_dropped": 0,
            "unsynced_dropped": 0,
            "orphans_dropped": 0,
            "sizes_refreshed": 0,
            "data_files_removed": 0,
            "data_files_quarantined": 0,
            "records_without_data_dropped": 0,
            "durable_data_missing": 0,
        }

    async def run(self, *, orderly: bool, compare_all: bool) -> None:
        """Does everything in the table above; `compare_all` after a power cut. `orderly`: the last
        process stopped in order, in this boot, so the unsealed files (4 us each) are as their
        records say. Raises NoSpace, ReadOnly, Corrupt."""
        self._clustered = await self._engine.read(lambda t: bool(t.node))
        self._is_cut = compare_all
        await self._each(reserved_inodes.reserved, self._abandon_reserved)
        await self._each(lifecycle.unpublished, self._drop_unpublished)
        if not orderly:
            await self._each(lifecycle.unsealed, self._judge_unsealed)
        if compare_all:
            await self._remove_leaked()
            await self._each(_held if self._clustered else _regular_files, self._judge_present)
        # Else a power cut could undo what made orphans of them, and find their data gone.
        await self._engine.sync()
        await self._each(lifecycle.orphans, self._drop_orphans)

    async def _each(
        self,
        listed: Callable[[Transaction, int, int], list[int]],
        step: Callable[[list[int]], Awaitable[None]],
    ) -> None:
        """Gives `step` everything that the engine lists, a batch at a time."""
        after = 0
        while True:
            inos = await self._engine.read(_page(listed, after))
            if not inos:
                return
            await step(inos)
            after = inos[-1]
            await trio.lowlevel.checkpoint()

    async def _abandon_reserved(self, inos: list[int]) -> None:
        """Releases reserved numbers, and abandons those that have a data file. The processes that
        reserved them are dead, or learn of it when they use one."""
        made = {ino for ino in inos if self._has_data(ino)}

        def fn(t: Transaction, part: list[int]) -> list[None]:
            reserved_inodes.abandon(t, [ino for ino in part if ino in made], self._now)
            reserved_inodes.release(t, part)
            return []

        await transact_each(self._engine, inos, itself, fn)

    async def _drop_unpublished(self, inos: list[int]) -> None:
        inos = [ino for ino in inos if ino not in self._alive]
        records = await self._read(inos)
        kept = self._kept(records)
        await self._refresh(kept)
        self.found["sizes_refreshed"] += len(kept)
        for ino, _, _ in kept:
            del records[ino]
        kinds = await self._engine.read(kinds_of)
        for ino, inode in records.items():
            if inode is None and self.is_damaged:
                self._put_away(kinds, ino, 0, None)
            elif inode is None:  # reserved by a process that then never made the record
                self.found["data_files_removed"] += self._files.unlink(ino, 0)

        def fn(t: Transaction, part: list[int]) -> list[None]:
            for ino in part:
                if records[ino] is None:
                    t.delete(keys.unpublished(ino))
                else:
                    lifecycle.evict(t, ino, self._now, "damaged")
            return []

        await transact_each(self._engine, records, itself, fn)
        self.found["unpublished_dropped"] += len(records)

    def _kept(self, records: dict[int, Inode | None]) -> list[_Grown]:
        """Returns those that stay though they were never closed, as their data files are."""
        found: list[_Grown] = []
        for ino, inode in records.items():
            if inode is None or not inode.flags & Flag.RESERVED or not inode.nlink:
                continue
            if self._clustered or inode.boot not in self._intact:
                continue
            stat = self._stat(ino, inode)
            if stat is not None:
                found.append((ino, inode, stat))
        return found

    async def _judge_unsealed(self, inos: list[int]) -> None:
        """Drops files that a power cut may have torn; the others are as long as their data
        files."""
        torn: list[int] = []
        unsure: list[int] = []
        grown: list[_Grown] = []
        if self._clustered:  # what is open is published when it is closed
            inos = [ino for ino in inos if ino not in self._alive]
            inos = await self._leave_to_others(inos)
        for ino, inode in (await self._read(inos)).items():
            if inode is None or not inode.nlink:
                continue
            if ino in self._alive and not inode.flags & Flag.PUBLISHED:
                continue
            stat = self._stat(ino, inode)
            if inode.boot not in self._intact or (inode.boot and stat is None):
                torn.append(ino)
            elif stat is not None and not _agree(inode, stat):
                grown.append((ino, inode, stat))
            elif self._is_unsure(inode):
                unsure.append(ino)
        await transact_each(self._engine, torn, itself, self._evict)
        await transact_each(self._engine, unsure, itself, _reopen)
        if self._clustered:
            await self._publish_grown(grown)
        else:
            await self._refresh(grown)
        self.found["unsynced_dropped"] += len(torn)
        self.found["sizes_refreshed"] += len(grown)

    async def _leave_to_others(self, inos: list[int]) -> list[int]:
        """Leaves files to other nodes that may be torn here, or were changed and not closed, and
        that another node has whole: that counts. Returns those that no other node has."""
        doubtful = [
            ino
            for ino, inode in (await self._read(inos)).items()
            if inode is not None and inode.nlink and not self._is_sound(ino, inode)
        ]
        left = await transact_each(self._engine, doubtful, itself, _leave_to_others)
        records = await self._read(left)
        if left:
            await self._engine.sync()
        for ino, inode in records.items():
            if inode is not None:
                self._files.unlink(ino, inode.version)
        self._index.remove(left)
        return [ino for ino in inos if ino not in left]

    def _is_sound(self, ino: int, inode: Inode) -> bool:
        stat = self._stat(ino, inode)
        if stat is None or inode.boot not in self._intact or self._is_unsure(inode):
            return False
        return _same_content(inode, stat)

    def _is_unsure(self, inode: Inode) -> bool:
        """Returns whether the seal of a file that is listed as unsealed may be of content that a
        power cut partly took."""
        return self._is_cut and bool(inode.flags & Flag.SEALED)

    async def _publish_grown(self, grown: list[_Grown]) -> None:
        """Publishes changed content, which in a cluster is another version, except for the data of
        an upload, which no other node has: there its parts decide what counts."""
        uploads = [each for each in grown if each[1].flags & Flag.ASSEMBLY]
        await self._refresh(uploads)
        for each in grown:
            ino, inode, _ = each
            if not inode.flags & Flag.ASSEMBLY and not self._is_sound(ino, inode):
                record = partial(_publish, each)
                with contextlib.suppress(Overtaken):
                    await publish_anew(self._engine, self._files, ino, inode.version, record, set())

    async def _judge_present(self, inos: list[int]) -> None:
        """Checks, after a power cut, whether each record has its data file."""
        caches = await self._engine.read(_cache_namespaces)
        missing = [
            ino
            for ino, inode in (await self._read(inos)).items()
            if inode is not None
            and inode.nlink
            and not inode.flags & Flag.COLD
            and self._stat(ino, inode) is None
        ]
        if self._clustered:
            left = await transact_each(self._engine, missing, itself, _leave_to_others)
            missing = [ino for ino in missing if ino not in left]
        gone = [ino for ino in missing if namespace_of(ino) in caches]
        await transact_each(self._engine, gone, itself, self._evict)
        self.found["records_without_data_dropped"] += len(gone)
        self.found["durable_data_missing"] += len(missing) - len(gone)

    async def _drop_orphans(self, inos: list[int]) -> None:
        leased = self._leased(inos)
        inos = [ino for ino in inos if ino not in self._alive and ino not in leased]
        if self._clustered:
            inos = await self._engine.read(
                lambda t: [ino for ino in inos if t.get(keys.placement(ino, t.node)) is not None]
            )
        kinds = await self._engine.read(kinds_of)
        for ino, inode in (await self._read(inos)).items():
            if inode is None or inode.mode & _FORMAT != _REGULAR:
                continue
            if self.is_damaged:
                self._put_away(kinds, ino, inode.version, None)
            else:
                self._files.unlink(ino, inode.version)
        self._index.remove(inos)

        await transact_each(self._engine, inos, itself, tree.reap_all)
        self.found["orphans_dropped"] += len(inos)

    async def _remove_leaked(self) -> None:
        """Unlinks, after a power cut, data files whose record did not survive."""
        batch: list[tuple[int, int]] = []
        for each in self._files.scan():
            batch.append(each)
            if len(batch) == _BATCH:
                await self._remove_leaked_of(batch)
                batch = []
        await self._remove_leaked_of(batch)

    async def _remove_leaked_of(self, batch: list[tuple[int, int]]) -> None:
        records = await self._read([ino for ino, _ in batch])
        kinds = await self._engine.read(kinds_of)
        for ino, version in batch:
            inode = records[ino]
            if inode is None or inode.version != version:
                self._put_away(kinds, ino, version, inode)
        await trio.lowlevel.checkpoint()

    def _put_away(self, kinds: Kinds, ino: int, version: int, inode: Inode | None) -> None:
        """Removes a data file that is not the one of this record, if there is any."""
        reason, recorded = Reason.UNNAMED, -1
        if inode is not None:
            reason, recorded = Reason.OUTDATED, inode.version
        try:
            path = put_away(self._files, kinds, ino, version, reason, recorded)
        except OSError as error:
            log.warning("%s stays for now: %s", self._files.path(ino, version), error)
            return
        if path is not None:
            log.warning("no record names the data file %s any more: see `kvfs quarantine`", path)
        if inode is None:
            self._index.remove([ino])
        counted = "data_files_removed" if path is None else "data_files_quarantined"
        self.found[counted] += 1

    async def _refresh(self, grown: list[_Grown]) -> None:
        await transact_each(self._engine, grown, lambda each: each[0], _publish_all)

    def _evict(self, t: Transaction, inos: list[int]) -> list[None]:
        for ino in inos:
            lifecycle.evict(t, ino, self._now, "damaged")
        return []

    def _stat(self, ino: int, inode: Inode) -> os.stat_result | None:
        try:
            return self._files.stat(ino, inode.version)
        except FileNotFoundError:
            return None

    def _has_data(self, ino: int) -> bool:
        try:
            self._files.stat(ino, 0)
        except FileNotFoundError:
            return False
        return True

    async def _read(self, inos: list[int]) -> dict[int, Inode | None]:
        found = await self._engine.read(lambda t: read_inodes(t, inos))
        return dict(zip(inos, found, strict=True))


async def recover(
    store: Store,
    engine: Engine,
    files: DataFiles,
    index: Index,
    *,
    boot: int,
    before: Collection[int] = (),
    now: int,
    clean: bool,
    restored: bool,
    alive: Collection[int] = (),
    leased: Callable[[Sequence[int]], set[int]] = lambda _inos: set(),
) -> dict[str, int] | None:
    """Puts a store in order before its node serves; returns its findings, None if there were none.

    `boot`: the boot of the store by `places.boot_of`, and `before` the others that the last process
    may have taken it for. `clean`: the result of `Store.take_clean`. `restored`: whether the engine
    went back to a checkpoint. `alive`, `leased`: see `Recovery`. Raises NoSpace, ReadOnly, Corrupt.
    Cancelled: run again at the next start.
    """
    boots = {boot, *before}
    recovery = Recovery(engine, files, index, boots, now, alive, leased)
    known = store.recovered_boot()
    is_mended = not restored and known in boots
    recovery.is_damaged = not is_mended and bool(damaged_metadata(store.meta))
    await recovery.run(
        orderly=clean and not restored and known in boots,
        compare_all=restored or (not clean and known not in boots),
    )
    await engine.sync()
    if known != boot:
        store.mark_recovered(boot)
    return recovery.found if any(recovery.found.values()) else None


def _page(
    listed: Callable[[Transaction, int, int], list[int]], after: int
) -> Callable[[Transaction], list[int]]:
    return lambda t: listed(t, after, _BATCH)


def _regular_files(t: Transaction, after_ino: int, limit: int) -> list[int]:
    """Returns up to `limit` inode numbers above `after_ino` of published regular files."""
    found: list[int] = []
    for key, value in t.scan(keys.inode(after_ino) + b"\0", b"j"):
        inode = unpack_inode(value)
        if inode.mode & _FORMAT == _REGULAR and inode.flags & Flag.PUBLISHED:
            found.append(keys.unpack_u64(key, 1))
            if len(found) >= limit:
                break
    return found


def _cache_namespaces(t: Transaction) -> set[int]:
    return {number for number, each in namespaces.records(t).items() if each.kind == "cache"}


def _same_content(inode: Inode, stat: os.stat_result) -> bool:
    """Returns whether nothing was written to the data file since it was recorded."""
    return (inode.size, inode.mtime_ns) == (stat.st_size, stat.st_mtime_ns)


def _agree(inode: Inode, stat: os.stat_result) -> bool:
    return _same_content(inode, stat) and inode.blocks == stat.st_blocks


def _publish_all(t: Transaction, grown: list[_Grown]) -> list[None]:
    for each in grown:
        _publish(each, t, None)
    return []


def _reopen(t: Transaction, inos: list[int]) -> list[None]:
    for ino in inos:
        lifecycle.reopen(t, ino)
    return []


def _leave_to_others(t: Transaction, inos: list[int]) -> list[int]:
    return [ino for ino in inos if placements.leave_to_others(t, ino)]


def _publish(grown: _Grown, t: Transaction, version: int | None) -> None:
    ino, inode, stat = grown
    if version is not None:
        check_follows(t, ino, inode.version)
    # The sealer, killed at it, leaves a file more blocks than its record knows: that is no change.
    lifecycle.publish(
        t,
        ino,
        size=stat.st_size,
        blocks=stat.st_blocks,
        mtime_ns=stat.st_mtime_ns,
        ctime_ns=inode.ctime_ns if _same_content(inode, stat) else stat.st_ctime_ns,
        boot=inode.boot,
        version=version,
    )


def _held(t: Transaction, after_ino: int, limit: int) -> list[int]:
    """Like `_regular_files`, for those that this node has."""
    return placements.held_by(t, t.node, after_ino, limit)
