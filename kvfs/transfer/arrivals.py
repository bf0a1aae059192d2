"""Files that came here whole: their names, and what the engine is told of them.

| step | on disk | in the engine | after a kill here |
|---|---|---|---|
| 1 whole and verified, beside the data files | the file | nothing | a start clears it away |
| 2 named | the data file | nothing | nobody is told of it: `stale_data_gc` |
| 3 on disk, described | the same | nothing | the same |
| 4 recorded | the same | this node's placement | nothing to do |

It can be opened from step 2 on: nobody waits for the disk or the engine, nor for the index, which
has its checksums and its space on disk from step 3 on.

Invariants
- What has the name of a data file was verified against the record, where the record had a checksum.
- A data file that came stays until the record says so: others may count on it by then. One that
  went all the same is not recorded: the transaction that would looks whether it is there. While a
  data file of the same number is dropped, which may be one of a former version, that waits.
- None gets its name while a former one of that name is dropped (`Holders.dropping`).
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
from kvfs.meta import keys
from kvfs.meta.engine import Engine, Transaction, transact_each
from kvfs.meta.records import Flag, Inode, namespace_of
from kvfs.transfer.transfer import Transfer
from kvfs.tree import lifecycle, namespaces
from kvfs.tree.copies import held_names, placements
from kvfs.tree.inodes import read_inodes
from kvfs.vfs import seal
from kvfs.vfs.inode_holders import Holders

log = logging.getLogger(__name__)
_GATHER_S: Final = 0.05
"""Time for which files that came are gathered: each batch is a sync, a commit at the engine and an
entry in all nodes' log, beside readers who wait for the next file. One that others replace or
remove in that time needs none of it."""
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
        *,
        is_shared: bool,
    ) -> None:
        """`drop` unlinks data files whose records are others by now. `is_shared`: whether there are
        other nodes, so that data files which a kill kept from being recorded are looked for."""
        self._engine = engine
        self._files = files
        self._index = index
        self._holders = holders
        self._drop = drop
        self._is_shared = is_shared
        self._unheld: dict[Name, bytes] = {}
        """The files that are not recorded yet, and the checksums of their chunks."""
        self._wake, self._hurry = trio.Event(), trio.Event()
        self.counters = {"brought_files": 0, "brought_bytes": 0}

    def __len__(self) -> int:
        """Returns how many are not recorded yet."""
        return len(self._unheld)

    async def run(self) -> None:
        """Records what came, until cancelled."""
        holding = Persistence(log.warning, "what came here is not recorded yet")
        while True:
            await self._wake.wait()
            with trio.move_on_after(_GATHER_S):
                await self._hurry.wait()
            self._wake, self._hurry = trio.Event(), trio.Event()
            while self._unheld:
                await holding.attempt(self._hold_batch)

    def hurry(self) -> None:
        """Has what came recorded now: a task waits for that."""
        self._hurry.set()

    def name(self, transfer: Transfer, inode: Inode, sums: bytes) -> None:
        """Takes step 2 for a file whose chunks have these checksums, of which none is dropped now.
        Raises Corrupt if they are not the record's, OSError."""
        ino, version = transfer.wanted.ino, transfer.wanted.version
        if inode.flags & Flag.SEALED and combine(sums) != inode.checksum:
            raise Corrupt(f"{os.fsdecode(inode.name)}: what came does not match its checksum")
        os.utime(transfer.fd, ns=(inode.atime_ns, inode.mtime_ns))
        transfer.ready()
        blocks = os.fstat(transfer.fd).st_blocks
        if self._is_shared or not inode.flags & Flag.SEALED:
            self._index.add(ino, version, blocks)
        else:  # a kill after the next line must not leave a file that nobody counts or evicts
            self._index.store([Sealed(ino, version, sums, blocks)])
        self._files.arrived(ino, version)
        if (ino, version) not in self._unheld:
            self._holders.unrecorded(ino)
        self._unheld[ino, version] = sums
        self._wake.set()
        if len(self._unheld) >= _BATCH:
            self.hurry()
        self.counters["brought_files"] += 1
        self.counters["brought_bytes"] += inode.size

    async def _hold_batch(self) -> None:
        """Takes steps 3 and 4 for some files."""
        taken = dict(islice(self._unheld.items(), _BATCH))
        names = list(taken)
        described = await self._engine.read(lambda t: [_describe(t, *name) for name in names])

        def settle() -> list[_Settled]:
            pairs = zip(names, described, strict=True)
            return [each for name, about in pairs if (each := self._settle(name, about))]

        settled = await trio.to_thread.run_sync(settle)
        # One that others replaced meanwhile is gone, and stays so in the index.
        settled = [each for each in settled if self._is_here(each)]
        self._index.store(Sealed(*each[:2], taken[each[:2]], each.blocks) for each in settled)
        waiting = {name for name in names if self._holders.is_dropping(name[0])}

        def hold(t: Transaction, settled: list[_Settled]) -> list[Name]:
            waiting.update(each[:2] for each in settled if self._holders.is_dropping(each.ino))
            return _hold(t, [each for each in settled if self._is_here(each)])

        outdated = await transact_each(self._engine, settled, _inode_of, hold)
        for name, sums in taken.items():
            if name not in waiting and self._unheld[name] is sums:
                # Else it went meanwhile, and has come again.
                del self._unheld[name]
                self._holders.recorded(name[0])
        await self._drop(outdated)
        for ino, _ in waiting:
            await self._holders.until_dropped(ino)

    def _is_here(self, settled: _Settled) -> bool:
        """Returns whether it is there still, and nobody is about to unlink it."""
        is_going = self._holders.is_dropping(settled.ino)
        return not is_going and self._files.has(settled.ino, settled.version)

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


def _inode_of(settled: _Settled) -> int:
    return settled.ino


def _hold(t: Transaction, settled: Sequence[_Settled]) -> list[Name]:
    """Takes step 4; returns those that others replaced or removed. One whose record vanished stays
    where it may be durable, for the record may have been lost; in a cache it was removed before the
    file had come. Of a file whose record is this node's own, others stay known only where they keep
    copies of it; it is sealed here."""
    outdated: list[Name] = []
    inodes = read_inodes(t, [each.ino for each in settled])
    for each, inode in zip(settled, inodes, strict=True):
        if inode is None:
            if not namespaces.is_durable(t, each.ino):
                outdated.append((each.ino, each.version))
            continue
        if inode.version != each.version or not inode.nlink:
            outdated.append((each.ino, each.version))
            continue
        if namespaces.is_peer(t, namespace_of(each.ino)):
            if not inode.flags & Flag.SEALED:
                placements.hold_alone(t, each.ino, each.version)
                t.put(keys.unsealed(each.ino), t.node)
            elif namespaces.get(t, namespace_of(each.ino)).replicas:
                placements.hold(t, each.ino, each.version)
                placements.let_go(t, each.ino, keys.pack_node(held_names.COLD))
            else:
                placements.hold_alone(t, each.ino, each.version)
        else:
            placements.hold(t, each.ino, each.version)
        if not inode.blocks:  # it was in the cold tier alone
            lifecycle.brought(t, each.ino, each.version, each.blocks)
    return outdated
