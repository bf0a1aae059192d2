"""Publication: the moment when writes made through the mount are recorded in the engine.

It happens at FLUSH of a writable handle whose file has changed (its error reaches close), at fsync,
and at RELEASE if no FLUSH came. One task at a time publishes a file.
"""

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

import trio

from gateway.fuse.files.open_file import OpenFile, copy_over, signature_of, turn
from kvfs.base import detach
from kvfs.base.errors import Stale
from kvfs.datastore import file_sync
from kvfs.datastore.kernel import writeback
from kvfs.meta import keys
from kvfs.meta.engine import NearEngine, Transaction
from kvfs.meta.records import Flag, Inode
from kvfs.transfer.transfers import Transfers
from kvfs.tree import inodes, lifecycle, tree
from kvfs.tree.inodes import read_inodes
from kvfs.tree.private_files import NameState, settle
from kvfs.vfs.content_versions import Overtaken, check_follows, name_draft, publish_anew
from kvfs.vfs.volume import Volume

_SYNCS: Final = 40
"""Most syncs at a time, each with a descriptor of its own."""
log = logging.getLogger(__name__)
_UNPLACED: Final = (
    "another node removed its directory, or took its name, before it was closed here: what was"
    " written is kept nowhere"
)
_OVERTAKEN: Final = (
    "another node has published newer content since the file was opened for writing here: what was"
    " written is kept nowhere"
)


class _Record(Protocol):
    """Records a state of a file, under a new version where one is given."""

    def __call__(self, t: Transaction, version: int | None = None) -> NameState: ...


class _Recorded(Exception):
    """An earlier attempt, whose answer was lost, has already published what was made here."""


class Publishing:
    """Publishes the open files of one mount."""

    def __init__(
        self,
        volume: Volume,
        transfers: Transfers,
        near: NearEngine,
        boot: int,
        is_strict: Callable[[int], bool],
        unplaced: Callable[[int, int], None],
        renamed: Callable[[OpenFile], object],
        cut: Callable[[OpenFile, bool], object],
    ) -> None:
        """`near`: what commits at once. `is_strict`: whether other nodes see each change of a file
        at once; then nobody goes past it. `unplaced` is told the inode and the data version of an
        open file that has no place any more, `renamed` an open file whose data file may have
        another version since, `cut` one that is about to be published: what comes after builds on
        that."""
        self._volume = volume
        self._transfers = transfers
        self._near = near
        self._boot = boot
        self._syncs = trio.CapacityLimiter(_SYNCS)
        self._is_strict = is_strict
        self._unplaced = unplaced
        self._renamed = renamed
        self._cut = cut

    async def begin_writing(self, file: OpenFile) -> None:
        """Records that the data file may change from here on, before its first byte does."""
        volume = self._volume
        if volume.lapses is not None:
            file.lapses = volume.lapses()
        file.base, file.refused = file.version, ""
        file.is_appended = file.replaces = file.in_doubt = False
        if file.incoming is not None:
            await detach.aside()
            await file.incoming.whole()
            file.published = signature_of(os.fstat(file.fd))
        if not file.writable:
            fd = volume.files.open(file.ino, file.version, os.O_RDWR)
            os.dup2(fd, file.fd, inheritable=False)  # a worker may be reading from that number
            os.close(fd)
            file.writable = True
        if file.published is not None:
            await volume.engine.transact(lambda t: lifecycle.reopen(t, file.ino))

    async def publish(self, file: OpenFile, *, synced: bool = False) -> None:
        """Records size, times and blocks if the data file changed since they were last recorded.
        Writes to a file that others removed meanwhile go with it, as those to any open file without
        a name.

        Raises NoSpace, ReadOnly, Corrupt, Unavailable, Stale (the file has no place any more, or
        others went past it: nobody else sees what was written); OSError of fstat. Cancelled: it is
        recorded, or else the next call records it.
        """
        try:
            await self._publish(file, synced=synced)
        except Stale:
            if file.refused or not file.is_removed:
                raise
            file.published, file.in_doubt = signature_of(os.fstat(file.fd)), False
            await self._transfers.outdated.drop([(file.ino, file.version)])

    async def _publish(self, file: OpenFile, *, synced: bool) -> None:
        if file.armed:
            await self.disarm(file)
        while file.publishing is not None:
            await turn(file.publishing)
        if file.refused:
            raise Stale(file.refused)
        st = os.fstat(file.fd)
        signature = signature_of(st)
        if signature == file.published and not synced:
            file.rewritten = file.overwriters > 0
            return
        if signature == file.published and self._transfers.is_shared:
            await self._record_synced(file)
            return
        boot = 0 if synced else self._boot
        lapses = file.lapses if self._volume.lapses is None else self._volume.lapses()

        record = self._recording(file, st, boot)
        waiting: list[trio.Event] = []
        file.publishing = waiting
        if file.replaces:
            self._cut(file, False)
        try:
            if file.is_mappable:
                await self._fix(file)
            known = synced or file.lapses != lapses
            place = await self._publish_first(file, record, known=known)
            if place is None:
                try:
                    await self._publish_anew(file, record, synced=synced)
                finally:
                    self._renamed(file)
                # Its names changed, and with them its ctime.
                signature = (*signature[:2], os.fstat(file.fd).st_ctime_ns)
            file.lapses = lapses
            self._note_published(file, signature, st)
        except BaseException:
            file.in_doubt = True
            raise
        finally:
            file.publishing = None
            for each in waiting:
                each.set()
        if place is NameState.TAKEN:
            return
        self._volume.published(file.ino, file.version, st.st_blocks)
        await self._volume.acknowledge([file.ino])

    def publish_now(self, file: OpenFile) -> bool:
        """Like `publish`, where that waits for nothing. Returns False, and does nothing, for a file
        that somebody may have mapped, or is publishing; in a cluster for any but a new one of which
        others may hear later. Raises what `publish` raises."""
        if file.armed or file.publishing is not None or file.refused:
            return False
        volume = self._volume
        if volume.lapses is not None and not self._is_private(file):
            return False
        st = os.fstat(file.fd)
        signature = signature_of(st)
        if signature == file.published:
            file.rewritten = file.overwriters > 0
            return True
        if file.is_mappable:
            return False
        if file.replaces:
            self._cut(file, False)
        try:
            record = self._recording(file, st, self._boot, yields=file.is_appended)
            done = self._near.try_now(record, private=file.ino, behind=True)
            if not done.is_done:
                return False
            place: NameState = done.result
            if place is not NameState.OWN:
                self._check_place(file, place)
        except BaseException:
            file.in_doubt = True
            raise
        self._note_published(file, signature, st)
        if place is not NameState.TAKEN:
            volume.published(file.ino, file.version, st.st_blocks)
        return True

    def _is_private(self, file: OpenFile) -> bool:
        """Returns whether a file was made here and others may hear of its first close later."""
        return file.is_new and not self._is_late(file) and self._volume.may_lag(file.ino)

    def _note_published(
        self, file: OpenFile, signature: tuple[int, int, int], st: os.stat_result
    ) -> None:
        """The data file, as it was then, is recorded."""
        file.is_new = file.replaces = file.in_doubt = False
        file.published, file.base = signature, file.version
        now = os.fstat(file.fd)
        rewritten = (now.st_size, now.st_mtime_ns) != signature[:2]
        file.rewritten = file.overwriters > 0 or rewritten
        # Its access time too: each new file's would be written once more, by a commit of its own.
        file.atime_ns = st.st_atime_ns
        self._volume.atimes.pop(file.ino, None)

    def _recording(
        self, file: OpenFile, st: os.stat_result, boot: int, *, yields: bool | None = None
    ) -> _Record:
        """Returns the function that records this state of a file and tells what has become of its
        name. `yields`: whether a new file gives way to another that has its name; None: as
        `_follows` says when it is recorded."""

        def record(t: Transaction, version: int | None = None) -> NameState:
            is_first = bool(t.node) and file.is_new
            if is_first and file.in_doubt and _is_published(t, file.ino):
                raise _Recorded
            published = lifecycle.publish(
                t,
                file.ino,
                size=st.st_size,
                blocks=st.st_blocks,
                mtime_ns=st.st_mtime_ns,
                ctime_ns=st.st_ctime_ns,
                atime_ns=st.st_atime_ns,
                boot=boot,
                version=version,
            )
            if not is_first:
                return NameState.OWN
            gives_way = self._follows(file) if yields is None else yields
            now = time.time_ns()
            return settle(t, file.ino, now, yields=gives_way, record=published)

        return record

    async def _publish_first(
        self, file: OpenFile, record: _Record, *, known: bool
    ) -> NameState | None:
        """Records the file under the version that it has. Returns None if that is impossible:
        others may have content that was published under it. TAKEN: the file is empty, and another
        file has its name. Raises Stale if it has no place any more."""
        if self._transfers.is_shared and not file.is_new:
            return None
        try:
            place = await self._volume.publish_new(file.ino, record, known=known)
        except _Recorded:
            file.is_new = False
            return None
        self._check_place(file, place)
        return place

    def _check_place(self, file: OpenFile, place: NameState) -> None:
        """Raises Stale if a file that was just recorded has no place any more, unless it is empty,
        and another file has its name."""
        if place is not NameState.OWN:
            self._unplaced(file.ino, file.version)
            refusal = self._refusal(file, _UNPLACED)
            if place is not NameState.TAKEN or os.fstat(file.fd).st_size:
                raise refusal

    async def _fix(self, file: OpenFile) -> None:
        """Makes every later store through a mapping change the signature. Only the data file itself
        can be mapped unseen: otherwise the kernel writes back at each FLUSH."""
        if file.backing_id and not writeback.clean_now(file.fd):
            await detach.aside()
            await trio.to_thread.run_sync(writeback.clean, file.fd)

    def _refusal(self, file: OpenFile, why: str) -> Stale:
        """Keeps the writes unseen; programs that have the file open for writing are told so from
        now on."""
        file.is_new, file.refused = False, why
        log.error("inode %x: %s", file.ino, why)
        return Stale(why)

    async def _record_synced(self, file: OpenFile) -> None:
        """Records that the published content is on disk. Raises Stale if it turns out to have no
        place."""

        def fn(t: Transaction) -> bool:
            lifecycle.synced(t, file.ino)
            return inodes.read_inode(t, file.ino).nlink > 0

        had_name = await self._volume.engine.transact(fn)
        if not had_name:
            return
        # What was private until now may have found its name taken.
        inode = await self._volume.engine.read(lambda t: inodes.read_inode(t, file.ino))
        if not inode.nlink:
            raise self._refusal(file, _UNPLACED)

    def _follows(self, file: OpenFile) -> bool:
        """Returns whether the writes build on the content before them and go past nobody: appends;
        changes to a file of a strict namespace that was not truncated to nothing; and late writes,
        since others went on from what they had."""
        if file.is_appended or self._is_late(file):
            return True
        return not file.replaces and self._is_strict(file.ino)

    def _is_late(self, file: OpenFile) -> bool:
        """Returns whether others may have gone on without these writes: they may have taken this
        node for dead since the file was opened, or an earlier attempt failed."""
        lapses = self._volume.lapses
        return file.in_doubt or (lapses is not None and file.lapses != lapses())

    async def _publish_anew(self, file: OpenFile, record: _Record, *, synced: bool) -> None:
        """Publishes under a version that nobody had."""
        volume = self._volume

        def follow(t: Transaction, version: int) -> None:
            if self._follows(file):
                check_follows(t, file.ino, file.base)
            record(t, version)

        if file.is_draft:
            await self._name_draft(file)
            file.is_draft = False
        elif not self._is_named(file):
            await self._name_anew(file)
        try:
            file.version = await publish_anew(
                *(volume.engine, volume.files, file.ino, file.version, follow, file.names),
                synced=synced,
            )
        except Overtaken:
            raise self._refusal(file, _OVERTAKEN) from None
        recorded = await volume.engine.read(lambda t: inodes.read_inode(t, file.ino))
        if not recorded.nlink:  # which was nobody's to drop here as long as it had no data here
            self._unplaced(file.ino, file.version)

    def _is_named(self, file: OpenFile) -> bool:
        """Returns whether the open data file still has its name: in the moment in which it was
        opened it may have been evicted, or replaced by newer content."""
        try:
            named = self._volume.files.stat(file.ino, file.version)
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(file.fd))

    async def _name_anew(self, file: OpenFile) -> None:
        """Gives the name to a copy, since an open file cannot be named again."""
        await detach.aside()
        files = self._volume.files
        fd = files.begin_draft(file.ino, file.version)
        try:
            await trio.to_thread.run_sync(copy_over, file.fd, fd)
        except BaseException:
            files.drop_draft(file.ino, file.version)
            raise
        finally:
            os.close(fd)
        await self._name_draft(file)

    async def _name_draft(self, file: OpenFile) -> None:
        engine, files = self._volume.engine, self._volume.files
        file.version = await name_draft(engine, files, file.ino, file.version)
        file.names.add(file.version)

    async def disarm(self, file: OpenFile) -> bool:
        """Clears the set-id bits if the data file changed since they were set. Returns whether it
        did."""
        if file.armed is None or signature_of(os.fstat(file.fd)) == file.armed:
            return False
        file.armed = None

        def fn(t: Transaction) -> None:
            inode = tree.read_inode(t, file.ino)
            inode.mode = inodes.without_set_ids(inode.mode)
            inodes.write_inode(t, file.ino, inode)

        await self._volume.engine.transact(fn)
        return True

    async def sync(self, file: OpenFile, *, datasync: bool) -> None:
        """Returns when what was written and recorded survives power loss."""
        async with self._syncs:
            fd = os.dup(file.fd)
            try:
                await trio.to_thread.run_sync(partial(file_sync.sync, fd, datasync=datasync))
            finally:
                os.close(fd)
        if file.writable:
            await self.publish(file, synced=True)
        await self._volume.sync(file.ino)


def unsealed_here(t: Transaction, ino: int) -> Inode | None:
    """Returns the record of a published file that this node was the last to write and that is not
    sealed yet."""
    if t.get(keys.unsealed(ino)) != t.node:
        return None
    (inode,) = read_inodes(t, [ino])
    if inode is None or inode.flags & Flag.ASSEMBLY or not inode.flags & Flag.PUBLISHED:
        return None
    return inode


def _is_published(t: Transaction, ino: int) -> bool:
    (inode,) = read_inodes(t, [ino])
    return inode is not None and bool(inode.flags & Flag.PUBLISHED)


def differs(inode: Inode, stat: os.stat_result) -> bool:
    """Returns whether the data file of an unsealed file has other content than was recorded. If
    nobody has it open, its last close could not be recorded."""
    if inode.flags & Flag.SEALED:
        return False
    return signature_of(stat)[:2] != (inode.size, inode.mtime_ns)
