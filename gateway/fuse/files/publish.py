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
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
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

    def __init__(self, volume: Volume, transfers: Transfers, boot: int) -> None:
        self._volume = volume
        self._transfers = transfers
        self._boot = boot
        self._syncs = trio.CapacityLimiter(_SYNCS)
        self.is_strict: Callable[[int], bool] = lambda _ino: False
        """Returns whether other nodes see each change of a file at once: then nobody goes past
        it."""

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

        Raises NoSpace, ReadOnly, Corrupt, Unavailable, Stale (the file has no place any more, or
        others went past it: nobody else sees what was written); OSError of fstat. Cancelled: it is
        recorded, or else the next call records it.
        """
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
        try:
            if file.is_mappable:
                await self._fix(file)
            known = synced or file.lapses != lapses
            place = await self._publish_first(file, record, known=known)
            if place is None:
                await self._publish_anew(file, record, synced=synced)
                # Its names changed, and with them its ctime.
                signature = (*signature[:2], os.fstat(file.fd).st_ctime_ns)
            file.lapses = lapses
            _note_published(file, signature)
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

    def publish_now(self, file: OpenFile, engine: EmbeddedEngine) -> bool:
        """Like `publish`, on a lone node with this engine. Returns False, and does nothing, for a
        file that somebody may have mapped, or is publishing. Raises what `publish` raises."""
        if file.armed or file.publishing is not None or file.refused:
            return False
        st = os.fstat(file.fd)
        signature = signature_of(st)
        if signature == file.published:
            file.rewritten = file.overwriters > 0
            return True
        if file.is_mappable:
            return False

        def record(t: Transaction) -> None:
            lifecycle.publish(
                t,
                file.ino,
                size=st.st_size,
                blocks=st.st_blocks,
                mtime_ns=st.st_mtime_ns,
                ctime_ns=st.st_ctime_ns,
                boot=self._boot,
            )

        try:
            engine.transact_now(record)
        except BaseException:
            file.in_doubt = True
            raise
        _note_published(file, signature)
        self._volume.published(file.ino, file.version, st.st_blocks)
        return True

    def _recording(self, file: OpenFile, st: os.stat_result, boot: int) -> _Record:
        """Returns the function that records this state of a file and tells what has become of its
        name."""

        def record(t: Transaction, version: int | None = None) -> NameState:
            is_first = bool(t.node) and file.is_new
            if is_first and file.in_doubt and _is_published(t, file.ino):
                raise _Recorded
            lifecycle.publish(
                t,
                file.ino,
                size=st.st_size,
                blocks=st.st_blocks,
                mtime_ns=st.st_mtime_ns,
                ctime_ns=st.st_ctime_ns,
                boot=boot,
                version=version,
            )
            if not is_first:
                return NameState.OWN
            return settle(t, file.ino, time.time_ns(), yields=self._follows(file))

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
        if place is not NameState.OWN:
            refusal = self._refusal(file, _UNPLACED)
            if place is not NameState.TAKEN or os.fstat(file.fd).st_size:
                raise refusal
        return place

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
        return not file.replaces and self.is_strict(file.ino)

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
            file.version = await name_draft(volume.engine, volume.files, file.ino, file.version)
            file.is_draft = False
        elif not self._is_named(file):
            await self._name_anew(file)
        try:
            file.version = await publish_anew(
                volume.engine, volume.files, file.ino, file.version, follow, synced=synced
            )
        except Overtaken:
            raise self._refusal(file, _OVERTAKEN) from None

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
        file.version = await name_draft(self._volume.engine, files, file.ino, file.version)

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
        await self._volume.engine.sync()


def _note_published(file: OpenFile, signature: tuple[int, int, int]) -> None:
    """The data file, as it was then, is recorded."""
    file.is_new = file.replaces = file.in_doubt = False
    file.published, file.base = signature, file.version
    file.rewritten = file.overwriters > 0 or signature_of(os.fstat(file.fd))[:2] != signature[:2]


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
