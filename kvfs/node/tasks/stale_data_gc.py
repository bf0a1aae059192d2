"""Data files of a node of a cluster that no record needs any more: their content was replaced, or
their file removed, while the node was away; or a kill came between a data file and its record.

| data file | record | action |
|---|---|---|
| of the record's version, held by this node | there, in the index | it is as it should be |
| the same | there, sealed, not so in the index | it is read, and comes into the index |
| the same, not recorded as held | another node has it, or the file was removed | it goes |
| the same | nobody else has it, sealed | compared with its checksum: see below |
| the same | nobody else has it, not sealed | put away |
| of an older version | another node has the record's, or the file was removed | it goes |
| of another version | else | put away |
| any | none, and its number is not reserved | put away |

A node that comes back after a power cut, or with a damaged journal, has from its engine the records
that its own journal lost, and not the entries of its index, by which it counts and evicts.

A compared file that has the record's content is recorded as held; one that differs is put away; if
it cannot be told now (no descriptor, no memory, an error of the disk), it stays, and the next sweep
looks again. To put away is to unlink a file of a cache, and to move one that may be durable into
quarantine (`vfs.quarantine`).

Invariants
- A data file younger than the sweep's limit stays: its maker may be about to record it.
- While metadata are copied into the engine nothing is judged: the records may be about to come.
- A file open in this process, or leased by a client, stays, whatever its record says: it goes when
  it is closed, or with a later sweep.
- A file that goes because of a commit goes after that commit is as durable as the engine makes it.
"""

import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final, NamedTuple, Protocol

import trio

from kvfs.base.descriptors import closing
from kvfs.base.retry import Persistence
from kvfs.datastore import file_sync
from kvfs.datastore.batch_unlink import Name, unlink_each
from kvfs.datastore.checksum import FileChecksum, checksum, combine
from kvfs.datastore.files import DataFiles
from kvfs.datastore.index import Index, IndexEntry, Sealed
from kvfs.datastore.quarantine_directory import Reason
from kvfs.meta import keys
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.engine_copy import refuse_unfinished
from kvfs.meta.records import Flag, Inode
from kvfs.tree.copies import placements
from kvfs.tree.inodes import read_inodes
from kvfs.vfs.quarantine import kinds_of, put_away

log = logging.getLogger(__name__)
_BATCH: Final = 256
_PERIOD_S: Final = 3600.0
_AGE_S: Final = 60.0
_PART_BYTES: Final = 64 << 20


class StaleDataHolds(Protocol):
    """The files that this process has open."""

    def busy(self, ino: int) -> bool:
        """Returns whether a handle is open."""

    @property
    def let_go(self) -> Callable[[int], None]:
        """Closes a data file that is kept open though no handle is."""


class _Found(NamedTuple):
    """The findings, by the treatment of the data files."""

    held: list[Name]
    """Data files that are sealed, and match their records."""
    gone: list[Name]
    alone: list[Name]
    """Data files to be compared."""
    away: list["_Away"]


class _Away(NamedTuple):
    """A data file that is to be put away."""

    name: Name
    reason: Reason
    recorded: int
    """The other version that its record has; -1: there is none."""


class Strays:
    """Finds them for one node."""

    def __init__(
        self,
        engine: Engine,
        files: DataFiles,
        index: Index,
        holders: StaleDataHolds,
        leased: Callable[[Sequence[int]], set[int]] = lambda _inos: set(),
    ) -> None:
        """`leased` returns those of some files whose content a client was promised."""
        self._engine = engine
        self._files = files
        self._index = index
        self._holders = holders
        self._leased = leased
        self._unclear = Persistence(log.warning, "data files that cannot be judged now stay")
        self.counters = {"strays_removed": 0, "strays_kept": 0, "strays_quarantined": 0}

    async def run(self) -> None:
        """Examines all data files once, and every hour, until cancelled. The first time, files made
        since the start are left alone."""
        sweeping = Persistence(log.warning, "data files that nobody needs stay for now")
        before_ns = time.time_ns()
        while True:
            await sweeping.attempt(lambda: self.sweep(before_ns))  # noqa: B023
            await trio.sleep(_PERIOD_S)
            before_ns = time.time_ns() - int(_AGE_S * 1e9)

    async def sweep(self, before_ns: int) -> None:
        """Examines the data files that were made, or got their name, before this time. Raises
        Conflict while metadata are copied into the engine."""
        everything = self._files.scan()
        while batch := list(islice(everything, _BATCH)):
            await self._judge([name for name in batch if self._is_older(name, before_ns)])
            await trio.lowlevel.checkpoint()

    def _is_older(self, name: Name, before_ns: int) -> bool:
        try:
            return self._files.stat(*name).st_ctime_ns < before_ns
        except FileNotFoundError:
            return False
        except OSError as error:
            self._complain(name, error)
            return False

    async def _judge(self, names: list[Name]) -> None:
        found = await self._engine.read(lambda t: _strays(t, names))
        if found.held:
            await self._enter(found.held)
        away = found.away
        for name in found.alone:
            try:
                if not await self._adopt(name):
                    away.append(_Away(name, Reason.DAMAGED, -1))
            except (OSError, MemoryError) as error:
                self._complain(name, error)
        if found.gone:
            await self._engine.sync()
        kept = self._leased([each.name[0] for each in away] + [ino for ino, _ in found.gone])
        kept |= {ino for ino, _ in names if self._holders.busy(ino)}
        await self._put_away([each for each in away if each.name[0] not in kept])
        await self._remove([name for name in found.gone if name[0] not in kept])

    def _complain(self, name: Name, error: OSError | MemoryError) -> None:
        path = self._files.path(*name)
        if isinstance(error, MemoryError):
            error = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), path)
        self._unclear.complain(error)

    async def _put_away(self, away: list[_Away]) -> None:
        kinds = await self._engine.read(kinds_of)
        for (ino, version), reason, recorded in away:
            self._holders.let_go(ino)
            try:
                path = await trio.to_thread.run_sync(
                    put_away, self._files, kinds, ino, version, reason, recorded
                )
            except OSError as error:
                self._complain((ino, version), error)
                continue
            if self._is_indexed(ino, version):
                self._index.remove([ino])
            self.counters["strays_removed" if path is None else "strays_quarantined"] += 1
            if path is not None:
                log.warning("%s, a data file, is %s: see `kvfs quarantine`", path, reason.value)

    async def _remove(self, names: list[Name]) -> None:
        for ino, _ in names:
            self._holders.let_go(ino)
        failed = await unlink_each(self._files, names)
        gone = [name for name in names if name not in failed]
        self._index.remove([ino for ino, version in gone if self._is_indexed(ino, version)])
        self.counters["strays_removed"] += len(gone)
        for name, error in failed.items():
            self._complain(name, error)

    def _is_indexed(self, ino: int, version: int) -> bool:
        entry = self._index.get(ino)
        return entry is not None and entry.version == version

    async def _enter(self, names: list[Name]) -> None:
        """Enters sealed data files in the index that are not there, or as they were before they
        were sealed. One that differs from its record is entered without checksums: the scrubber
        judges it."""
        inos = [ino for ino, _ in names]
        inodes = await self._engine.read(lambda t: read_inodes(t, inos))
        left = [
            (name, inode)
            for name, inode, entry in zip(names, inodes, self._index.get_many(inos), strict=True)
            if inode is not None and inode.version == name[1] and not _tells_of(entry, inode)
        ]
        while left:
            part = _first_of(left)
            del left[: len(part)]
            read = await trio.to_thread.run_sync(self._read_all, part)
            # What was removed while it was read has left the index, and is not to come back.
            there = [pair for pair in zip(part, read, strict=True) if self._files.has(*pair[0][0])]
            self._index.store(found for _, found in there if isinstance(found, Sealed))
            for (name, inode), found in there:
                if found is None:
                    self._index.add_missing(*name, inode.blocks)
                elif not isinstance(found, Sealed):
                    self._complain(name, found)

    def _read_all(
        self, files: Sequence[tuple[Name, Inode]]
    ) -> list[Sealed | OSError | MemoryError | None]:
        return [self._read_sealed(*each) for each in files]

    def _read_sealed(self, name: Name, inode: Inode) -> Sealed | OSError | MemoryError | None:
        """Returns a data file's entry; None if it is not what its record says."""
        try:
            found = self._read(name, inode.size)
        except (OSError, MemoryError) as error:
            return error
        if found is None or found[0].combined != inode.checksum:
            return None
        return Sealed(*name, found[0].chunks, found[1])

    async def _adopt(self, name: Name) -> bool:
        """Records the data file as held, if it matches its record; False if it differs. Raises
        OSError, MemoryError: it cannot be told."""
        ino, version = name
        inode = await self._engine.read(lambda t: read_inodes(t, [ino])[0])
        if inode is None or inode.version != version:
            return True  # by now it is the next sweep's
        found = await trio.to_thread.run_sync(lambda: self._read(name, inode.size, syncs=True))
        if found is None or found[0].combined != inode.checksum:
            return False
        sums, blocks = found

        def hold(t: Transaction) -> bool:
            now = read_inodes(t, [ino])[0]
            if now is None or (now.version, now.checksum) != (version, sums.combined):
                return False
            placements.hold(t, ino, version)
            return True

        if await self._engine.transact(hold):
            self._index.store([Sealed(ino, version, sums.chunks, blocks)])
            self.counters["strays_kept"] += 1
        return True

    def _read(
        self, name: Name, size: int, *, syncs: bool = False
    ) -> tuple[FileChecksum, int] | None:
        """Returns checksums and blocks; None if it is not as long as its record says. `syncs`: it
        is on disk then; a data file whose seal is recorded was before."""
        with closing(self._files.open_unseen(*name)) as fd:
            if syncs:
                file_sync.sync(fd)
            stat = os.fstat(fd)
            found = checksum(fd, size) if stat.st_size == size else None
        return None if found is None else (found, stat.st_blocks)


def _tells_of(entry: IndexEntry | None, inode: Inode) -> bool:
    """Returns whether an entry is of a sealed file's content."""
    if entry is None or entry.version != inode.version:
        return False
    return combine(entry.chunks) == inode.checksum


def _first_of(files: Sequence[tuple[Name, Inode]]) -> list[tuple[Name, Inode]]:
    """Returns the first of these files, as many as are read in one go."""
    size, count = 0, 0
    while count < len(files) and (not count or size + files[count][1].size <= _PART_BYTES):
        size += files[count][1].size
        count += 1
    return list(files[:count])


def _strays(t: Transaction, names: list[Name]) -> _Found:
    """Raises Conflict while metadata are copied into the engine."""
    refuse_unfinished(t)
    found = _Found([], [], [], [])
    inos = [ino for ino, _ in names]
    own = placements.holding(t, inos, t.node)
    for name, inode, held in zip(names, read_inodes(t, inos), own, strict=True):
        if inode is None:
            if t.get(keys.reserved(name[0])) is None:
                found.away.append(_Away(name, Reason.UNNAMED, -1))
        elif inode.version == name[1] and held is not None and held.version == name[1]:
            if inode.flags & Flag.SEALED:
                found.held.append(name)
        elif not inode.nlink or _is_elsewhere(t, name[0], inode.version, at_least=name[1]):
            found.gone.append(name)
        elif inode.version == name[1] and inode.flags & Flag.SEALED:
            found.alone.append(name)
        elif inode.version == name[1]:
            found.away.append(_Away(name, Reason.UNNAMED, -1))
        else:
            found.away.append(_Away(name, Reason.OUTDATED, inode.version))
    return found


def _is_elsewhere(t: Transaction, ino: int, version: int, *, at_least: int) -> bool:
    """Returns whether another node has the whole of this version, and it is not older than
    `at_least`."""
    return version >= at_least and any(
        each.whole and each.holding.version == version and each.node != t.node
        for each in placements.holders(t, ino)
    )
