"""A node's view of its files: inode numbers, and the end of files nobody holds.

A regular file ends in three steps, so that a kill between any two leaks nothing: its last link goes
and its record becomes an orphan (one transaction), its data file is unlinked, its record and index
entry are dropped (one transaction for many). A kill leaves orphans, which the next start finds by
their keys.

Access times set by reading are gathered here and written in batches: an open must not cost a
commit."""

import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import islice
from typing import Final

import trio

from kvfs.base.errors import KvfsError, Paused
from kvfs.base.retry import Persistence
from kvfs.datastore.batch_unlink import Name, unlink_each
from kvfs.datastore.files import DataFiles
from kvfs.datastore.index import Index
from kvfs.meta.engine import MOVED, Engine, T, Transaction, itself, transact_each
from kvfs.meta.records import NAMESPACE_SHIFT, Inode, namespace_of
from kvfs.policy.miss_reasons import Lost
from kvfs.tree import inodes, lifecycle, namespaces, tree
from kvfs.vfs.inode_holders import Holders
from kvfs.vfs.missing_data import Loss, loss

_RANGE: Final = 4096
"""Inode numbers taken from the engine at a time; those that a process does not use are never
used."""
log = logging.getLogger(__name__)
_BATCH: Final = 256
_RETRY_S: Final = 1.0
_LONGEST_RETRY_S: Final = 60.0
_GATHER_S: Final = 0.02
"""Seconds of gathering: files dropped together cost one transaction and one hand-over to a
thread."""
_ATIME_PERIOD_S: Final = 1.0


async def _nothing(inos: Sequence[int]) -> None:
    """Stands in on a lone node, which has all the copies that there are."""


class Volume:
    """Inode numbers, orphans and access times of one node."""

    def __init__(
        self,
        engine: Engine,
        files: DataFiles,
        index: Index,
        holders: Holders,
        on_lost: Callable[[lifecycle.Evicted], None],
        *,
        why_lost: Lost = "damaged",
        published: Callable[[int, int, int], None] | None = None,
        acknowledge: Callable[[Sequence[int]], Awaitable[None]] = _nothing,
        known: Callable[[Sequence[int]], Awaitable[None]] | None = None,
        may_lag: Callable[[int], bool] | None = None,
        lapses: Callable[[], int] | None = None,
        sync_local: Callable[[], Awaitable[None]] | None = None,
        leased: Callable[[Sequence[int]], set[int]] = lambda _inos: set(),
    ) -> None:
        """`on_lost` is called with a file that was forgotten because nobody has its data, for the
        reason `why_lost`: on a lone node the data file itself is missing; elsewhere no living node
        has it. `published` is called with inode number, data version and blocks after each publish
        (None: the index has them). `acknowledge` returns when files that were published have the
        copies that a close of theirs promises, or raises Unavailable.

        In a cluster `known` returns when the other nodes know what was done here to inodes, or
        raises Unavailable, `may_lag` says whether others may hear of a new file in a namespace
        after its close, and `lapses` counts how often this node has lost its lease, so that others
        may have taken it for dead; `sync_local` makes what is kept on this node alone survive power
        loss.

        `leased` returns those of some files whose content a client was promised."""
        self.engine = engine
        self.files = files
        self.index = index
        self.holders = holders
        self.atimes: dict[int, int] = {}
        """Access times (ns) not yet written to the engine."""
        self._on_lost = on_lost
        self._why_lost = why_lost
        self.published: Final = published or index.add
        self.acknowledge: Final = acknowledge
        self._known = known
        self._may_lag = may_lag
        self.lapses: Final = lapses
        self._sync_local = sync_local
        self.leased: Final = leased
        self._ranges: dict[int, tuple[int, int]] = {}
        """The next number that this process has taken in each namespace, and the end."""
        self._spare_ranges: dict[int, tuple[int, int]] = {}
        """The same of the ranges that come next: a create waits for no engine that is paused."""
        self._used_up: dict[int, None] = {}
        """Namespaces of which half a range is used."""
        self._use = trio.Event()
        self._doomed: dict[Name, None] = {}
        self._unwilling: dict[Name, None] = {}
        """Data files that the disk would not unlink. With the doomed never more than the orphans
        that the engine remembers."""
        self._wake = trio.Event()

    async def allocate(self, namespace_id: int) -> int:
        """Returns a new inode number of the namespace; never used before, never again."""
        taken = self.allocate_now(namespace_id)
        if taken:
            return taken
        following, end = await self._take_range(namespace_id)
        self._ranges[namespace_id] = following + 1, end
        return following

    def allocate_now(self, namespace_id: int) -> int:
        """Like `allocate`, from the numbers that this process has taken; returns 0 if none is
        left."""
        following, end = self._ranges.get(namespace_id, (0, 0))
        if following == end:
            following, end = self._spare_ranges.pop(namespace_id, (0, 0))
            if not following:
                return 0
        self._ranges[namespace_id] = following + 1, end
        if end - following == _RANGE // 2:
            self._used_up[namespace_id] = None
            self._use.set()
        return following

    async def _take_range(self, namespace_id: int) -> tuple[int, int]:
        following = await self.engine.transact(
            lambda t: namespaces.allocate_inodes(t, namespace_id, _RANGE)
        )
        return following, following + _RANGE

    async def _take_spare_ranges(self) -> None:
        """Takes numbers ahead where half of a range is used. One that fails is taken when it is
        needed."""
        while True:
            await self._use.wait()
            self._use = trio.Event()
            while self._used_up:
                namespace_id, _ = self._used_up.popitem()
                with contextlib.suppress(KvfsError):
                    self._spare_ranges[namespace_id] = await self._take_range(namespace_id)

    async def sync(self, ino: int) -> None:
        """Makes everything committed so far of an inode survive power loss. Raises Unavailable."""
        if self._sync_local is not None and self.engine.is_local(namespace_of(ino)):
            await self._sync_local()
        else:
            await self.engine.sync(namespace_of(ino))

    async def publish_new(
        self, ino: int, fn: Callable[[Transaction], T], *, known: bool = False
    ) -> T:
        """Commits the publication of a file that was made here and that nobody else has; returns
        the result of `fn`. Others may hear of it a moment later if its namespace's coherence
        allows, and it need not be `known` when this returns."""
        behind = not known and self.may_lag(ino)
        return await self.engine.transact(fn, private=ino if behind else 0, behind=behind)

    def may_lag(self, ino: int) -> bool:
        """Returns whether others may hear of a new file in the namespace of an inode after its
        close; False on a lone node, which has no others."""
        return self._may_lag is not None and self._may_lag(ino >> NAMESPACE_SHIFT)

    async def rename(
        self,
        old: tuple[int, bytes],
        new: tuple[int, bytes],
        fn: Callable[[Transaction], T],
        *,
        flags: int = 0,
    ) -> T:
        """Commits `fn`, which moves a name from one place to another (each parent, name), with
        flags of rename(2), and does nothing else; returns its result. Others may hear of it a
        moment later if it is a file of this node and its namespace's coherence allows."""
        private = self.private_of_rename(old[0], new[0], flags)
        return await self.engine.transact(fn, private=private)

    def private_of_rename(self, old_parent: int, new_parent: int, flags: int = 0) -> int:
        """Returns `private` of the transaction of a rename between directories: 0 if other nodes
        have to know of it at once."""
        space, may_lag = namespace_of(new_parent), self._may_lag
        if self.engine.is_local(space):
            return new_parent
        is_inside = space != 0 and space == namespace_of(old_parent) and not flags
        return MOVED if is_inside and may_lag is not None and may_lag(space) else 0

    def drop_later(self, ino: int, version: int) -> None:
        """Drops, soon and in the background, the data file and record of an orphan that nobody
        holds any more."""
        if (ino, version) not in self._unwilling:
            self._doomed[ino, version] = None
            self._wake.set()

    async def drop(self, doomed: Sequence[Name]) -> dict[Name, OSError]:
        """Unlinks the data files of these orphans (inode, version), then drops their records;
        returns those whose data file could not be unlinked, with the errors. The engine decides
        what an orphan is: a file with a name stays. So does one that a client has leased, for
        `tasks.orphan_gc` to find.

        In a durable namespace it syncs first: else a power cut could undo the rename that made an
        orphan, and find its data gone. When it is cancelled, the rest is found again at the next
        start. Raises NoSpace, ReadOnly, Unavailable.
        """
        if self._known is not None:  # others may have given one another name
            await self._known([ino for ino, _ in doomed])
        with self.holders.dropping([ino for ino, _ in doomed]):
            names = await self.engine.read(lambda t: _nameless(t, doomed))
            leased = self.leased([ino for ino, _ in names])
            names = [name for name in names if name[0] not in leased]
            if await self.engine.read(lambda t: _any_durable(t, names)):
                await self.engine.sync()

            failed = await unlink_each(self.files, names)
            kept = {ino for ino, _ in failed}
            gone = list({ino: None for ino, _ in names if ino not in kept})

            self.index.remove(gone)
            await transact_each(self.engine, gone, itself, tree.reap_all)
            return failed

    async def give_up(
        self, ino: int, inode: Inode, *, asks_tier: bool = False, away: Sequence[int] = ()
    ) -> Loss:
        """Carries out and returns the decision on a file whose data nobody could give
        (`missing_data.loss`, with these arguments). Raises NoSpace, ReadOnly, Unavailable."""
        now, namespace_id = time.time_ns(), namespace_of(ino)
        shown, was_own = os.fsdecode(inode.name), self.engine.is_local(namespace_id)

        def fn(t: Transaction) -> tuple[Loss, lifecycle.Evicted | None]:
            if was_own and not namespaces.is_peer(t, namespace_id):
                return Loss(Paused(f"{shown}: its namespace has changed, try again"), False), None
            decided = loss(t, ino, inode, shown, asks_tier=asks_tier, away=away)
            if not decided.forgets:
                return decided, None
            return decided, lifecycle.evict(t, ino, now, self._why_lost)

        decided, evicted = await self.engine.transact(fn)
        if decided.forgets:
            self.drop_later(ino, 0)
        if evicted is not None:
            self._on_lost(evicted)
        return decided

    async def run(self) -> None:
        """Drops doomed files, writes access times and takes numbers ahead, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._take_spare_ranges)
            nursery.start_soon(self._drop_doomed)
            nursery.start_soon(self._retry_unwilling)
            nursery.start_soon(self._write_atimes)

    async def _drop_doomed(self) -> None:
        dropping = Persistence(log.warning, "orphans wait for their end, it will be tried again")
        while True:
            await self._wake.wait()
            await trio.sleep(_GATHER_S)
            self._wake = trio.Event()
            while self._doomed:
                await dropping.attempt(partial(self._drop_batch, dropping))

    async def _drop_batch(self, dropping: Persistence) -> None:
        batch = list(islice(self._doomed, _BATCH))
        failed = await self.drop(batch)
        for name in batch:
            del self._doomed[name]
        for name, error in failed.items():
            self._unwilling[name] = None
            dropping.complain(error)

    async def _retry_unwilling(self) -> None:
        """Retries them all together, ever more rarely while some stay."""
        delay_s = _RETRY_S
        while True:
            await trio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_RETRY_S) if self._unwilling else _RETRY_S
            again, self._unwilling = self._unwilling, {}
            for name in again:
                self.drop_later(*name)

    async def _write_atimes(self) -> None:
        writing = Persistence(log.warning, "access times of the last second are lost")
        while True:
            await trio.sleep(_ATIME_PERIOD_S)
            await writing.attempt(self.flush_atimes, pause_s=0)

    async def flush_atimes(self) -> None:
        """Writes the gathered access times to the engine."""
        if not self.atimes:
            return
        atimes, self.atimes = self.atimes, {}

        def fn(t: Transaction, part: Sequence[int]) -> list[None]:
            for ino, inode in zip(part, inodes.read_inodes(t, part), strict=True):
                if inode is not None:
                    inode.atime_ns = atimes[ino]
                    inodes.write_inode(t, ino, inode)
            return []

        await transact_each(self.engine, atimes, itself, fn)


def _nameless(t: Transaction, doomed: Sequence[Name]) -> list[Name]:
    """Returns the data files of those that have no name; for an orphan that was written to since
    its last name went, also the one that its record has now."""
    found: dict[Name, None] = {}
    records = inodes.read_inodes(t, [ino for ino, _ in doomed])
    for name, inode in zip(doomed, records, strict=True):
        if inode is None or not inode.nlink:
            found[name] = None
        if inode is not None and not inode.nlink:
            found[name[0], inode.version] = None
    return list(found)


def _any_durable(t: Transaction, doomed: Sequence[Name]) -> bool:
    known = namespaces.records(t)
    spaces = {namespace_of(ino) for ino, _ in doomed}
    return any(each not in known or known[each].kind != "cache" for each in spaces)
