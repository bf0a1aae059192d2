"""The treatment of a file whose data file differs from its record: one decision for every door.

| data file | cache namespace | durable namespace |
|---|---|---|
| missing, in a cold tier that is not asked here | a miss, the record stays | Unavailable |
| missing, and no node that has it can be asked | a miss, the record is forgotten | Unavailable |
| missing, and nobody has it | a miss, the record is forgotten | Corrupt |
| not as long as its seal | evicted: a miss | set aside, then as missing |
| on a disk that does not give it | evicted, unless others have it: a miss | Corrupt; it stays |
| of a record that has no name any more | Stale | Stale |

If another node has the file, its copy replaces the torn one.

Invariants
- A door that finds a data file missing or torn has the node settle it and looks again (`open`): so
  the order in which doors are asked changes no answer. Only then does `loss` give the answer.
- Only its node forgets a record (`Volume.give_up`): beside it, and without one, the record stays.
- A file that is open for writing has no seal, so a change in progress is never taken for damage.
"""

import os
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from kvfs.base.descriptors import closing
from kvfs.base.errors import Corrupt, KvfsError, Stale, Unavailable, Unreached
from kvfs.datastore.files import DataFiles
from kvfs.datastore.kernel.safe_open import Unreadable
from kvfs.meta import keys
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.records import Flag, Inode
from kvfs.tree import namespaces
from kvfs.tree.inodes import read_inodes


class Loss(NamedTuple):
    """The decision on a record whose data cannot be had."""

    error: KvfsError
    """The answer of every door, which each translates."""
    forgets: bool
    """Whether the node forgets the record: the next look-up finds nothing."""


def loss(
    t: Transaction,
    ino: int,
    inode: Inode,
    shown: str,
    *,
    asks_tier: bool = False,
    away: Sequence[int] = (),
) -> Loss:
    """Returns the decision on a file that `shown` names, whose data nobody could give. `asks_tier`:
    the cold tier was asked too; `away`: the nodes that have its data and cannot be asked."""
    if not inode.nlink:
        return Loss(Stale(f"{shown}: evicted or removed"), False)
    in_tier = bool(inode.flags & Flag.COLD) and not asks_tier
    if in_tier:
        said = f"{shown}: its data are in the cold tier: start the node with --cold"
    elif away:
        nodes = ", ".join(map(str, away))
        said = f"{shown}: no node can be asked that has its data, which are on: {nodes}"
    else:
        said = f"{shown}: its data file is missing or torn: run `kvfs fsck`"
    if namespaces.is_durable(t, ino):
        return Loss(Unavailable(said) if in_tier or away else Corrupt(said), False)
    miss = Unreached(said if in_tier else f"{shown}: its data have gone")
    miss.at = keys.file_entry(inode.parent, inode.name)  # the node may know why
    return Loss(miss, not in_tier)


def is_torn(inode: Inode, stat: os.stat_result) -> bool:
    """Returns whether a data file cannot be the sealed one. An unsealed record may lag behind its
    file."""
    return bool(inode.flags & Flag.SEALED) and stat.st_size != inode.size


async def _never(_: int) -> bool:
    """Stands in where nobody writes."""
    return False


class Missing:
    """Settles such files for one node. `give_up` handles a record whose data nobody has, `damaged`
    a data file that is not the sealed one, `unreadable` one that its disk does not give (it raises
    the answer, or the record is another then). `is_elsewhere` tells whether data may be fetched
    from other nodes or a cold tier. `is_written`: whether a file is open for writing here; then it
    has no seal when that returns."""

    def __init__(
        self,
        engine: Engine,
        files: DataFiles,
        give_up: Callable[[int, Inode], Awaitable[object]],
        damaged: Callable[[int, Inode], Awaitable[None]],
        unreadable: Callable[[int, Inode, OSError], Awaitable[None]],
        is_elsewhere: Callable[[], bool],
        is_written: Callable[[int], Awaitable[bool]] = _never,
    ) -> None:
        self._engine = engine
        self._files = files
        self._give_up = give_up
        self._damaged = damaged
        self._unreadable = unreadable
        self._is_elsewhere = is_elsewhere
        self._is_written = is_written

    async def settle(self, ino: int) -> None:
        """Brings record and data file together, as the table says; does nothing if they agree.

        Cancelled: done or not, never half. Raises Unavailable, NoSpace, OSError; Corrupt and
        Unreached where the disk does not give it.
        """
        inode = await self._record(ino)
        if inode is None or not inode.nlink or not inode.flags & Flag.PUBLISHED:
            return
        try:
            stat = self._look(ino, inode.version)
        except FileNotFoundError:
            if not self._is_elsewhere():
                await self._give_up(ino, inode)
            return
        except Unreadable as error:
            await self._unreadable(ino, inode, error)
            return
        if not is_torn(inode, stat) or await self._is_written(ino):
            return
        if await self._record(ino) == inode:
            await self._damaged(ino, inode)

    def _look(self, ino: int, version: int) -> os.stat_result:
        try:
            with closing(self._files.open_unseen(ino, version)) as fd:
                return os.fstat(fd)
        except BlockingIOError:  # a lease is being given back
            return self._files.stat(ino, version)

    async def _record(self, ino: int) -> Inode | None:
        return (await self._engine.read(lambda t: read_inodes(t, [ino])))[0]
