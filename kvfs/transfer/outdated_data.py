"""Removes data files of this node that others replaced or removed, or that it need not have any
more.

Invariants
- A data file that a program of this host has open is removed when it is closed.
- A data file is unlinked only if a record says so: one of newer content, or of an orphan. One whose
  record was lost is left to `stale_data_gc`. By the time when it is unlinked the record may be
  another one, which counts then.
- An index entry goes before its data file: a kill between leaves the file, which `stale_data_gc`
  finds, and no entry, which nobody would look for. It goes once more after it: who saw the file
  meanwhile may have entered it again.
"""

import os
from collections.abc import Iterable, Sequence

import trio

from kvfs.base.background import Background
from kvfs.base.errors import Stale
from kvfs.datastore.files import DataFiles
from kvfs.datastore.index import Index
from kvfs.meta import keys
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.records import Flag, Inode, unpack_inode
from kvfs.tree.copies import placements
from kvfs.tree.inodes import read_inode, read_inodes
from kvfs.vfs.volume import Volume

Name = tuple[int, int]
Change = tuple[bytes, bytes | None, bytes | None]
"""Key, value before, value now."""


class OutdatedData:
    """The outdated data files of one node."""

    def __init__(self, engine: Engine, files: DataFiles, index: Index, volume: Volume) -> None:
        self._engine = engine
        self._files = files
        self._index = index
        self._volume = volume
        self._open: dict[int, set[int]] = {}
        """Versions of data files whose content was replaced elsewhere while they are open here."""
        self._tasks = Background()

    async def run(self) -> None:
        """Drops what is outdated, until cancelled; what becomes known later waits for the next
        start."""
        await self._tasks.run()

    def applied(self, changes: Iterable[Change]) -> None:
        """Takes what others committed: data of a content that was replaced, or of an orphan that
        was reaped, soon go here too.

        A record that had a name and vanishes was lost (an engine that was put back to an older
        state, or damaged), likewise a newer version: nobody removes either. The data here may be
        the last there are, and are left to `stale_data_gc`."""
        replaced: list[Name] = []
        unlinked: list[int] = []
        for key, old, new in changes:
            if key[:1] != keys.INODE or old is None:
                continue
            before = unpack_inode(old)
            now = None if new is None else unpack_inode(new)
            ino = keys.unpack_u64(key, 1)
            if now is None:
                if not before.nlink:
                    self._volume.holders.removed(ino, before)
                    replaced.append((ino, before.version))
            elif now.version != before.version:
                if now.version > before.version:
                    replaced.append((ino, before.version))
            elif before.nlink and not now.nlink:
                unlinked.append(ino)
            elif now.mtime_ns != before.mtime_ns and not now.flags & Flag.SEALED:
                self._stamp(ino, before, now)
        if self._tasks.runs and (replaced or unlinked):
            self._tasks.begin(self._act, replaced, unlinked)

    async def _act(self, replaced: list[Name], unlinked: list[int]) -> None:
        await self.drop(replaced)
        for ino in unlinked:
            await self._lost_link(ino)

    def _stamp(self, ino: int, before: Inode, now: Inode) -> None:
        """Sets the times that others gave a file that is not sealed: its data file has the truth
        about them, if it is here and has not been changed meanwhile."""
        if self._volume.holders.writes(ino):
            return
        path = self._files.path(ino, before.version)
        try:
            found = os.stat(path, follow_symlinks=False)
            if (found.st_size, found.st_mtime_ns) == (before.size, before.mtime_ns):
                os.utime(path, ns=(now.atime_ns, now.mtime_ns), follow_symlinks=False)
        except FileNotFoundError:
            return

    def _is_open(self, name: Name) -> bool:
        """Returns whether it is open, and so has to stay until `closed`."""
        holders = self._volume.holders
        if not holders.busy(name[0]) or not holders.has_content(*name):
            return False
        self._open.setdefault(name[0], set()).add(name[1])
        return True

    def has(self, ino: int) -> bool:
        """Returns whether data files of it wait for its close."""
        return ino in self._open

    def closed(self, ino: int) -> None:
        """Drops what was replaced elsewhere while the file's data file, now closed, was open."""
        versions = self._open.pop(ino, None)
        if versions and self._tasks.runs:
            self._tasks.begin(self.drop, [(ino, version) for version in versions])

    async def _lost_link(self, ino: int) -> None:
        """Lets go of this node's data of an orphan, unless somebody here holds it."""

        def fn(t: Transaction) -> int:
            inode = read_inode(t, ino)
            own = t.get(keys.placement(ino, t.node))
            return -1 if inode.nlink or own is None else inode.version

        try:
            version = await self._engine.read(fn)
        except Stale:
            return
        if version >= 0 and not self._volume.holders.keep(ino):
            self._volume.holders.let_go(ino)
            self._volume.drop_later(ino, version)

    async def drop(self, names: Sequence[Name]) -> None:
        """Unlinks data files that no record speaks of any more, if they are here; open ones when
        they are closed. What a client has leased is left to `stale_data_gc`. Raises Unavailable,
        OSError."""
        here = [name for name in names if self._files.has(*name) and not self._is_open(name)]
        if not here:
            return
        with self._volume.holders.dropping([ino for ino, _ in here]):
            here = await self._engine.read(lambda t: _unneeded(t, here))
            leased = self._volume.leased([ino for ino, _ in here])
            here = [name for name in here if name[0] not in leased and not self._is_open(name)]
            for ino, _ in here:
                self._volume.holders.let_go(ino)
            self._leave_index(here)

            def unlink() -> None:
                for name in here:
                    self._files.unlink(*name)

            await trio.to_thread.run_sync(unlink)
            self._leave_index(here)

    def _leave_index(self, names: Sequence[Name]) -> None:
        if entered := [name[0] for name in names if self._index.has(*name)]:
            self._index.remove(entered)


def _unneeded(t: Transaction, names: Sequence[Name]) -> list[Name]:
    """Returns those of which no record says that this node has them."""
    inodes = read_inodes(t, [ino for ino, _ in names])
    return [
        (ino, version)
        for (ino, version), inode in zip(names, inodes, strict=True)
        if inode is None or not placements.is_here(t, ino, inode) or inode.version != version
    ]
