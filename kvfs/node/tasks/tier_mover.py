"""Manages the places of a store: measures them, decides where new files go, and moves the least
used files from memory to disk before memory is full.

| step of a move | memory | disk |
|---|---|---|
| 1 copied, its checksum compared | data file | arriving, without a name |
| 2 named, synced if its record says that it is on disk | data file | data file |
| 3 unlinked | nothing | data file |

After a kill between 2 and 3 both are there, with the same content; the disk's counts, and the other
goes with the next measurement.

Invariants
- Only sealed files are moved, and none that the mount has open or a client has leased; a reader of
  the old one elsewhere goes on reading it.
- Between the check that the file is what was copied, and step 3, nothing of this process runs.
- Walking a place takes at most a twentieth of a thread's time.
"""

import contextlib
import errno
import logging
import math
import os
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

import trio

from kvfs.base.descriptors import closing
from kvfs.base.media import Place
from kvfs.base.retry import Persistence
from kvfs.datastore import file_lease, file_sync, places
from kvfs.datastore.checksum import checksum
from kvfs.datastore.files import DataFiles, copy_description
from kvfs.datastore.index import Index
from kvfs.datastore.layout import Store
from kvfs.datastore.leases.taker import LeaseTaker
from kvfs.datastore.tiered_files import TieredFiles
from kvfs.meta.engine import Engine
from kvfs.meta.records import Flag, Inode
from kvfs.policy import tier_choice as policy
from kvfs.policy.tier_choice import TierRoom
from kvfs.tree import namespaces
from kvfs.tree.inodes import BLOCK, read_inodes

log = logging.getLogger(__name__)
_TELL_S: Final = 1.0
_LOOK_S: Final = 5.0
"""Time between two looks whether a disk takes files: each writes to it."""
_FAILED: Final = (errno.EROFS, errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ENXIO, errno.ENODEV)
_SHORTEST_S: Final = 0.25
_COST_FACTOR: Final = 20
_BATCH: Final = 512
_SEND_BYTES: Final = 64 << 20


class TierHolds(Protocol):
    """The files that this process has open."""

    def in_use(self, ino: int) -> bool:
        """Returns whether a handle is open; a file that is only kept open is closed."""


class _Seen(NamedTuple):
    """A data file as the last walk saw it."""

    ino: int
    version: int
    size: int
    """Bytes on its medium."""


class Tiering:
    """The tiering of one node. `own_free` tells how many bytes the store's own directory has
    left."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        files: TieredFiles,
        index: Index,
        holders: TierHolds,
        own_free: Callable[[], int],
        leases: LeaseTaker,
    ) -> None:
        self._store = store
        self._engine = engine
        self._files = files
        self._index = index
        self._holders = holders
        self._own_free = own_free
        self._leases = leases
        self.rooms: list[TierRoom] = []
        self._refusals: dict[str, tuple[float, str | None]] = {}
        """The reason why a place takes no files, with the time of the look."""
        self.counters = {"demoted_files": 0, "demoted_bytes": 0}

    @property
    def elsewhere(self) -> tuple[int, int]:
        """Bytes of data files that are neither in the store's own directory nor in shared ones, and
        the capacity that counts for them: for memory its used bytes, since it has no space for
        all."""
        local = [each for each in self.rooms if not each.place.is_shared]
        used = sum(each.used for each in local)
        return used, sum(
            each.used if each.place.medium == "ram" else each.capacity for each in local
        )

    def describe(self) -> list[dict[str, Any]]:
        """Returns the part of the node's status."""
        return [
            {
                "medium": each.place.medium,
                "path": each.place.root,
                "used_bytes": each.used,
                "capacity_bytes": each.capacity,
                "refusal": each.refusal,
            }
            for each in self.rooms
        ]

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Measures, tells and moves, until cancelled. A move that is cut off leaves both files."""
        await self._measure()
        await self._tell()
        task_status.started()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_telling)
            nursery.start_soon(self._keep_apart)

    def ended(self) -> None:
        """Notes that no node decides any more: other processes make files in the store's own
        directory."""
        places.write_targets(self._store, {})

    async def _keep_telling(self) -> None:
        telling = Persistence(log.warning, "where new files go cannot be told")
        await telling.repeat(self._tell, _TELL_S, first_s=_TELL_S)

    async def _keep_apart(self) -> None:
        moving = Persistence(log.warning, "files are not moved between tiers")
        while True:
            await moving.attempt(self._round)

    async def _tell(self) -> None:
        found = await self._engine.read(namespaces.records)
        media = {number: each.media for number, each in found.items()}
        targets = policy.targets(media, self.rooms, self._own_free())
        self._files.use(targets)
        places.write_targets(self._store, targets)

    async def _round(self) -> None:
        began = time.monotonic()
        seen = await self._measure()
        cost_s = time.monotonic() - began
        for room in self.rooms:
            if room.place.medium == "ram" and room.excess:
                await self._tell()
                await self._relieve(room, seen[room.place.root])
        await trio.sleep(max(_SHORTEST_S, cost_s * _COST_FACTOR))

    async def _measure(self) -> dict[str, list[_Seen]]:
        """Measures every place; returns the files in those of memory."""
        seen: dict[str, list[_Seen]] = {}
        rooms = []
        for place in self._files.places:
            found: list[_Seen] = []
            try:
                if not place.is_shared:
                    files = self._files.at(place)
                    found = await trio.to_thread.run_sync(_walk, files)
                rooms.append(self._room(place, sum(each.size for each in found)))
            except OSError as error:
                self._refusals[place.root] = time.monotonic(), error.strerror
                rooms.append(self._lost(place, error))
            if place.medium == "ram":
                seen[place.root] = found
        _tell_refusals(self.rooms, rooms)
        self.rooms = rooms
        return seen

    def _room(self, place: Place, used: int) -> TierRoom:
        """Measures a place whose data files take so many bytes. Raises OSError."""
        disk = os.statvfs(place.root)
        capacity = used + disk.f_bavail * disk.f_frsize
        looked_at, refusal = self._refusals.get(place.root, (-math.inf, None))
        if time.monotonic() - looked_at > _LOOK_S:
            refusal = refusal_of(place.root)
            self._refusals[place.root] = time.monotonic(), refusal
        return TierRoom(place, used, min(place.limit or capacity, capacity), refusal)

    def _lost(self, place: Place, error: OSError) -> TierRoom:
        """Returns a place that cannot be measured, as full as it was."""
        before = [each for each in self.rooms if each.place == place]
        room = before[0] if before else TierRoom(place, 0, 0)
        return room._replace(refusal=error.strerror)

    async def _relieve(self, room: TierRoom, seen: list[_Seen]) -> None:
        """Moves the coldest files there until it is below its headroom again."""
        need = room.excess
        source = self._files.at(room.place)
        for each in await self._coldest(seen):
            if need <= 0:
                return
            if self._is_double(each):
                source.unlink(each.ino, each.version)
                need -= each.size
            elif await self._move(source, each):
                need -= each.size

    async def _coldest(self, seen: list[_Seen]) -> list[_Seen]:
        clocks: dict[_Seen, int] = {}
        for start in range(0, len(seen), _BATCH):
            for each in seen[start : start + _BATCH]:
                entry = self._index.get(each.ino)
                clocks[each] = entry.clock if entry is not None else 0
            await trio.lowlevel.checkpoint()
        return sorted(seen, key=lambda each: clocks[each])

    def _is_double(self, each: _Seen) -> bool:
        """Returns whether it was moved, except for step 3."""
        for place in self._files.places:
            if place.medium == "ssd" and _is_there(self._files.at(place), each):
                return True
        return _is_there(self._files.own, each)

    async def _move(self, source: DataFiles, each: _Seen) -> bool:
        (inode,) = await self._engine.read(lambda t: read_inodes(t, [each.ino]))
        if not self._may_move(each, inode):
            return False
        assert inode is not None
        target = self._target()
        if target is None:
            return False
        try:
            fd = source.open_unseen(each.ino, each.version)
        except FileNotFoundError:
            return False
        try:
            before = _stamp(fd)
            whole = await trio.to_thread.run_sync(lambda: _copy(fd, target, each, inode))
            (now,) = await self._engine.read(lambda t: read_inodes(t, [each.ino]))
            if not whole or now is None or now.checksum != inode.checksum:
                return False
            if not self._may_move(each, now) or _stamp(fd) != before:
                return False
            if file_lease.is_quiet(fd) is False:
                return False
            with self._leases.taking([each.ino]) as leased:
                if leased:
                    return False
                target.arrived(each.ino, each.version)
                source.unlink(each.ino, each.version)
        finally:
            os.close(fd)
            target.drop_arriving(each.ino, each.version)
        self.counters["demoted_files"] += 1
        self.counters["demoted_bytes"] += each.size
        return True

    def _may_move(self, each: _Seen, inode: Inode | None) -> bool:
        if inode is None or not inode.flags & Flag.SEALED or inode.version != each.version:
            return False
        return not self._holders.in_use(each.ino)

    def _target(self) -> DataFiles | None:
        """Returns the disk with the most space; None if all are full, until the evictor has freed
        some."""
        best = policy.roomiest("ssd", self.rooms)
        own_free = self._own_free()
        if best is None or best.free <= own_free:
            return self._files.own if own_free else None
        return self._files.at(best.place)


def _tell_refusals(before: list[TierRoom], now: list[TierRoom]) -> None:
    refused = {each.place.root for each in before if each.refusal is not None}
    for each in now:
        root = each.place.root
        if each.refusal is not None and root not in refused:
            log.error(
                "the tier %s takes no new files (%s), what it has is read as long as it gives it:"
                " look at its disk and the kernel's log, and mount it anew",
                *(root, each.refusal),
            )
        elif each.refusal is None and root in refused:
            log.warning("the tier %s takes files again", root)


def refusal_of(root: str) -> str | None:
    """Returns the reason why the disk of a directory takes no files; None: it takes some, or is
    full."""
    try:
        os.close(os.open(root, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except OSError as error:
        return error.strerror if error.errno in _FAILED else None
    return None


def _walk(files: DataFiles) -> list[_Seen]:
    found = []
    for ino, version in files.scan():
        with contextlib.suppress(FileNotFoundError):
            found.append(_Seen(ino, version, BLOCK * files.stat(ino, version).st_blocks))
    return found


def _is_there(files: DataFiles, each: _Seen) -> bool:
    try:
        files.stat(each.ino, each.version)
    except FileNotFoundError:
        return False
    return True


def _stamp(fd: int) -> tuple[int, int, int]:
    found = os.fstat(fd)
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _copy(fd: int, target: DataFiles, each: _Seen, inode: Inode) -> bool:
    """Does step 1, in a thread; returns whether the copy matches the record."""
    source = os.fstat(fd)
    with closing(target.begin_arriving(each.ino, each.version, source.st_size)) as copy:
        at = 0
        while at < source.st_size:
            count = os.sendfile(copy, fd, at, min(_SEND_BYTES, source.st_size - at))
            if not count:
                return False
            at += count
        found = checksum(copy, source.st_size)
        if found is None or found.combined != inode.checksum:
            return False
        copy_description(fd, copy)
        os.utime(copy, ns=(source.st_atime_ns, source.st_mtime_ns))
        if not inode.boot:
            file_sync.sync(copy)
        return True
