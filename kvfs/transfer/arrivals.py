"""Files that came here whole: their names, and what the engine is told of them.

| step | on disk | in the engine | after a kill here |
|---|---|---|---|
| 1 whole and verified, beside the data files | the file | nothing | a start clears it away |
| 2 named | the data file | nothing | nobody is told of it: `stale_data_gc` |
| 3 on disk, described | the same | nothing | the same |
| 4 recorded | the same | this node's placement | nothing to do |

It can be opened from step 2 on: nobody waits for the disk or the engine.

Invariants
- What has the name of a data file was verified against the record, where the record had a checksum.
- A data file that came stays until the record says so: others may count on it by then.
"""

import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import Final, NamedTuple

import trio

from kvfs.base.errors import Corrupt
from kvfs.base.retry import Persistence
from kvfs.datastore import file_sync
from kvfs.datastore import files as data
from kvfs.datastore.checksum import combine
from kvfs.datastore.files import DataFiles
from kvfs.datastore.index import Index, Sealed
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.records import Flag, Inode
from kvfs.transfer.transfer import Transfer
from kvfs.tree import lifecycle
from kvfs.tree.copies import placements
from kvfs.tree.inodes import read_inodes
from kvfs.vfs import seal
from kvfs.vfs.inode_holders import Holders

log = logging.getLogger(__name__)
_GATHER_S: Final = 0.01
_BATCH: Final = 64
Name = tuple[int, int]


class _Settled(NamedTuple):
    """A data file that is on disk."""

    ino: int
    version: int
    blocks: int


class Arrivals:
    """The files of one node that came whole."""

    def __init__(
        self,
        engine: Engine,
        files: DataFiles,
        index: Index,
        holders: Holders,
        drop: Callable[[Sequence[Name]], Awaitable[None]],
    ) -> None:
        """`drop` unlinks data files whose records are others by now."""
        self._engine = engine
        self._files = files
        self._index = index
        self._holders = holders
        self._drop = drop
        self._unheld: dict[Name, None] = {}
        self._wake = trio.Event()
        self.counters = {"brought_files": 0, "brought_bytes": 0}

    def __len__(self) -> int:
        """Returns how many are not recorded yet."""
        return len(self._unheld)

    async def run(self) -> None:
        """Records what came, until cancelled."""
        holding = Persistence(log.warning, "what came here is not recorded yet")
        while True:
            await self._wake.wait()
            await trio.sleep(_GATHER_S)
            self._wake = trio.Event()
            while self._unheld:
                await holding.attempt(self._hold_batch)

    def name(self, transfer: Transfer, inode: Inode, sums: bytes) -> None:
        """Takes step 2 for a file whose chunks have these checksums. Raises Corrupt if they are not
        the record's, OSError."""
        ino, version = transfer.wanted.ino, transfer.wanted.version
        if inode.flags & Flag.SEALED and combine(sums) != inode.checksum:
            raise Corrupt(f"{os.fsdecode(inode.name)}: what came does not match its checksum")
        os.utime(transfer.fd, ns=(inode.atime_ns, inode.mtime_ns))
        transfer.ready()
        self._index.store([Sealed(ino, version, sums, os.fstat(transfer.fd).st_blocks)])
        self._files.arrived(ino, version)
        if (ino, version) not in self._unheld:
            self._unheld[ino, version] = None
            self._holders.unrecorded(ino)
        self._wake.set()
        self.counters["brought_files"] += 1
        self.counters["brought_bytes"] += inode.size

    async def _hold_batch(self) -> None:
        """Takes steps 3 and 4 for some files."""
        names = list(islice(self._unheld, _BATCH))
        described = await self._engine.read(lambda t: [_describe(t, *name) for name in names])

        def settle() -> list[_Settled]:
            pairs = zip(names, described, strict=True)
            return [each for name, about in pairs if (each := self._settle(name, about))]

        settled = await trio.to_thread.run_sync(settle)
        held = await self._engine.transact(lambda t: _hold(t, settled))
        for name in names:
            del self._unheld[name]
            self._holders.recorded(name[0])
        await self._drop([each[:2] for each in settled if each[:2] not in held])

    def _settle(self, name: Name, description: data.Description | None) -> _Settled | None:
        try:
            fd = self._files.open(*name, os.O_RDWR)
        except FileNotFoundError:
            return None
        try:
            if description is not None:
                data.describe(fd, description)
            file_sync.sync(fd)
            return _Settled(*name, os.fstat(fd).st_blocks)
        except OSError:
            if not file_sync.is_lost(fd):
                raise
            self._files.unlink(*name)  # a copy: whoever it came from has it
            return None
        finally:
            os.close(fd)


def _describe(t: Transaction, ino: int, version: int) -> data.Description | None:
    (inode,) = read_inodes(t, [ino])
    if inode is None or inode.version != version or not inode.flags & Flag.SEALED:
        return None
    return seal.described(t, ino, version, inode.size, inode.checksum)


def _hold(t: Transaction, settled: Sequence[_Settled]) -> set[Name]:
    """Takes step 4; returns those that are still what their records say."""
    held: set[Name] = set()
    inodes = read_inodes(t, [each.ino for each in settled])
    for each, inode in zip(settled, inodes, strict=True):
        if inode is None or inode.version != each.version or not inode.nlink:
            continue
        placements.hold(t, each.ino, each.version)
        if not inode.blocks:  # it was in the cold tier alone
            lifecycle.brought(t, each.ino, each.version, each.blocks)
        held.add((each.ino, each.version))
    return held
